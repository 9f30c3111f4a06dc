"""Training through a pipeline is the training that one process does, saved and resumed or not."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import training_jobs as jobs
from ranks import run_ranks as run_ranks_for
from tiny_text import write_model

from fullbore.errors import ConfigError
from fullbore.train.checkpoint import find_checkpoint, read_progress
from fullbore.train.export import export
from fullbore.train.plan import make_plan
from fullbore.train.sources import read_config

# Some train for long, on cores that others may want too.
pytestmark = pytest.mark.timeout(300)
run_ranks = partial(run_ranks_for, timeout_s=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "virtual_stages"),
    [("gpipe", None), ("1f1b", None), ("interleaved", 2), ("looped-bfs", 2), ("zb-v", None)],
)
def test_twenty_losses_equal_those_of_one_process(
    folder: Path, schedule: str, virtual_stages: int | None
) -> None:
    settings = jobs.settings_for(
        folder,
        pipeline_model_parallel_size=2,
        schedule=schedule,
        num_virtual_stages_per_pipeline_rank=virtual_stages,
        train_iters=20,
        clip_grad=0.5,
    )
    losses, norms = jobs.train_plainly(settings, steps=20)
    assert losses[-1] < losses[0] - 0.5  # it learns
    assert max(norms) > 0.5  # and the limit binds
    for found, found_norms, _ in run_ranks(jobs.run_steps, 2, settings, steps=20):
        assert found == pytest.approx(losses, rel=1e-4)
        assert found_norms == pytest.approx(norms, rel=1e-4)


def test_slices_train_as_whole_sequences_do(folder: Path) -> None:
    sliced = jobs.settings_for(folder, schedule="seq1f1b", slices=4)
    losses, norms, _ = jobs.run_steps(0, jobs.settings_for(folder), steps=3)
    found, found_norms, _ = jobs.run_steps(0, sliced, steps=3)
    assert found == pytest.approx(losses, rel=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_split_backwards_and_recomputation_train_the_same(
    folder: Path, tmp_path: Path, family: str, ranks: int
) -> None:
    write_model(tmp_path / "model", family=family)
    settings = jobs.settings_for(
        folder, model=str(tmp_path / "model"), pipeline_model_parallel_size=ranks
    )
    variants = [
        (None, "none", None),
        (0, "none", None),
        (2, "none", None),
        (1, "full", None),
        (1, "1", None),
        (1, "full", 1),
        (None, "none", None, 1),
        (1, "1", None, 1),
    ]
    for found in run_ranks(jobs.run_split, ranks, settings, variants, steps=3):
        losses, norms, weights, shares = found[0]
        assert shares == []
        for other in found[1:]:
            assert other[:2] == (losses, norms)
            assert all(torch.equal(weights[name], other[2][name]) for name in weights)
            if not other[3]:
                continue  # whole backwards
            if ranks > 1:
                assert other[3] == [0.0] * ranks  # every product waits for W
            else:
                assert 0 < other[3][0] < 1  # the head is the embedding, so it goes with I


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_went_on(folder: Path, tmp_path: Path) -> None:
    """With dropout, so that the random numbers must go on too."""
    write_model(tmp_path / "model", family="gpt2", dropout=True)
    settings = jobs.settings_for(
        folder,
        model=str(tmp_path / "model"),
        save=tmp_path / "run",
        pipeline_model_parallel_size=2,
        num_virtual_stages_per_pipeline_rank=2,
    )
    through = run_ranks(jobs.run_steps, 2, settings, steps=6)
    begun = run_ranks(jobs.run_steps, 2, settings, steps=3, save=True)
    resumed = run_ranks(jobs.run_steps, 2, settings, steps=3, load=tmp_path / "run")
    assert begun[0][0] + resumed[0][0] == through[0][0]
    wanted, found = jobs.merged(through), jobs.merged(resumed)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_a_run_goes_on_at_another_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    two = jobs.settings_for(folder, save=tmp_path / "run", pipeline_model_parallel_size=2)
    one = jobs.settings_for(folder, save=tmp_path / "one")
    losses, _, wanted = jobs.run_steps(0, one, steps=6)
    run_ranks(jobs.run_steps, 2, two, steps=3, save=True)
    assert read_progress(find_checkpoint(tmp_path / "run")).ranks == 2
    found, _, weights = jobs.run_steps(0, one, steps=3, load=tmp_path / "run")
    assert found == pytest.approx(losses[3:], rel=1e-6)
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)
    back = jobs.run_steps(0, one, steps=0, load=tmp_path / "run", save=True)[2]
    again = jobs.merged(run_ranks(jobs.run_steps, 2, two, steps=0, load=tmp_path / "one"))
    assert again.keys() == back.keys()
    assert all(torch.equal(again[name], back[name]) for name in back)


@pytest.mark.slow
def test_a_checkpoint_is_read_the_same_by_any_cut_and_schedule(
    folder: Path, tmp_path: Path
) -> None:
    def settings(schedule: str, v: int | None, ranks: int = 2) -> Any:
        return jobs.settings_for(
            folder,
            save=tmp_path / "run",
            pipeline_model_parallel_size=ranks,
            schedule=schedule,
            num_virtual_stages_per_pipeline_rank=v,
        )

    saved = jobs.merged(
        run_ranks(jobs.run_steps, 2, settings("interleaved", 2), steps=2, save=True)
    )
    many = [settings("1f1b", None), settings("gpipe", None), settings("looped-bfs", 2)]
    read = run_ranks(jobs.loads, 2, many, load=tmp_path / "run")
    alone = jobs.loads(0, [settings("1f1b", None, ranks=1)], load=tmp_path / "run")
    for found in (*zip(*read, strict=True), alone):
        again = jobs.merged([(None, None, weights) for weights in found])
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[name], saved[name]) for name in saved)


def test_frozen_weights_go_into_checkpoints(folder: Path, tmp_path: Path) -> None:
    """A resumed run has them from there, whatever the model's folder says by then."""
    model = write_model(tmp_path / "model", tie_word_embeddings=False)
    settings = jobs.settings_for(
        folder, model=str(tmp_path / "model"), save=tmp_path / "run", train_iters=4
    )
    through = jobs.frozen_run(settings, steps=4, load=None)
    shutil.rmtree(tmp_path / "run")
    begun = jobs.frozen_run(settings, steps=2, load=None)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    model.save_pretrained(tmp_path / "model")
    resumed = jobs.frozen_run(settings, steps=2, load=tmp_path / "run")
    assert begun["losses"] + resumed["losses"] == through["losses"]
    for name, weight in through["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name


@pytest.mark.slow
def test_bf16_keeps_exact_main_weights_and_resumes_with_them(folder: Path, tmp_path: Path) -> None:
    settings = jobs.settings_for(folder, save=tmp_path, bf16=True, train_iters=12)
    losses, _, wanted = jobs.run_steps(0, settings, steps=12)
    assert losses[-1] < losses[0] - 0.3
    mains = [value for name, value in wanted.items() if name.startswith("model.")]
    assert all(main.dtype == torch.float32 for main in mains)
    assert any(not torch.equal(main, main.bfloat16().float()) for main in mains)
    jobs.run_steps(0, settings, steps=5, save=True)
    found, _, weights = jobs.run_steps(0, settings, steps=7, load=tmp_path)
    assert found == losses[5:]
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_drawn_models_start_alike_at_any_number_of_ranks(folder: Path) -> None:
    one = jobs.settings_for(folder, from_scratch=True)
    two = jobs.settings_for(folder, from_scratch=True, pipeline_model_parallel_size=2)
    losses, _, _ = jobs.run_steps(0, one, steps=3)
    for found, _, _ in run_ranks(jobs.run_steps, 2, two, steps=3):
        assert found == pytest.approx(losses, rel=1e-5)
    other = jobs.settings_for(folder, from_scratch=True, seed=7)
    assert jobs.run_steps(0, other, steps=1)[0] != losses[:1]


def test_held_out_loss_is_that_of_the_whole_model(folder: Path) -> None:
    settings = jobs.settings_for(
        folder, pipeline_model_parallel_size=2, eval_interval=1, eval_iters=2, held_out=0.1
    )
    alone, _ = jobs.evaluate(0, settings.model_copy(update={"pipeline_model_parallel_size": 1}))
    assert alone is not None
    for loss, held in run_ranks(jobs.evaluate, 2, settings):
        assert loss == pytest.approx(alone, rel=1e-5)
        assert not any(held)


def test_a_full_disk_leaves_the_checkpoint_before_it_whole(folder: Path, tmp_path: Path) -> None:
    settings = jobs.settings_for(folder, save=tmp_path, pipeline_model_parallel_size=2)
    said = run_ranks(jobs.fill_the_disk, 2, settings)
    assert said[0] == said[1]
    assert said[0].startswith("CheckpointError: the checkpoint of step 2 could not be written")
    assert "File too large" in said[0] and " MB left" in said[0]
    assert f"{tmp_path / 'iter_0000001'}, is whole" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest"]
    export(tmp_path, tmp_path / "exported")


def test_more_positions_than_the_model_has_are_refused(folder: Path) -> None:
    most = read_config(folder / "model").max_position_embeddings
    make_plan(jobs.settings_for(folder, seq_length=most), folder / "model")
    with pytest.raises(ConfigError, match=f"the nearest legal value is {most}"):
        make_plan(jobs.settings_for(folder, seq_length=most + 1), folder / "model")


def test_more_layers_than_a_stage_has_are_not_recomputed_in_silence(folder: Path) -> None:
    """Of four layers the second of two stages has the head, and fewer."""

    def plan(**asked: Any) -> None:
        make_plan(jobs.settings_for(folder, stage_layers="3,1", **asked), folder / "model")

    two = {"pipeline_model_parallel_size": 2}
    plan(recompute=3, **two)
    with pytest.raises(ConfigError, match=r"--recompute is 4, .* legal value is 3; for all "):
        plan(recompute=4, **two)
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    with pytest.raises(ConfigError, match=r"--recompute-num-layers is 9, .*method uniform"):
        plan(recompute_num_layers=9, **block, **two)


@pytest.mark.parametrize("barrier", [True, False])
def test_a_loss_that_is_no_number_stops_the_run_before_it_spreads(
    folder: Path, barrier: bool
) -> None:
    settings = jobs.settings_for(folder, pipeline_model_parallel_size=2, optimizer_barrier=barrier)
    for said, untouched in run_ranks(jobs.poison, 2, settings):
        assert said.startswith("rank 1 failed in 1F0 of step 2: the loss of step 2 is nan ")
        assert "(microbatches 0, 1, 2, 3)" in said and "last actions of every rank" in said
        assert untouched


def test_what_one_rank_cannot_read_all_refuse(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"txet": 1}\n', encoding="utf-8")
    settings = jobs.settings_for(
        folder, data=[str(tmp_path / "broken.jsonl")], pipeline_model_parallel_size=2
    )
    said = run_ranks(jobs.refusal, 2, settings)
    assert said[0] == said[1]
    assert said[0].startswith("DataError") and "broken.jsonl, line 2" in said[0]


@pytest.mark.slow
def test_export_loads_in_transformers_with_equal_logits(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = jobs.settings_for(folder, save=tmp_path, pipeline_model_parallel_size=2)
    run_ranks(jobs.run_steps, 2, settings, steps=2, save=True)
    target = export(tmp_path, tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.config.use_cache is True
    trainer = jobs.make_trainer(jobs.settings_for(folder, save=tmp_path), 0)
    trainer.resume(tmp_path)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        wanted = trainer.stages[0].eval()(ids)
        torch.testing.assert_close(loaded(ids).logits, wanted, rtol=0, atol=0)
    before = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert not torch.equal(before(ids).logits, wanted)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode(tokenizer("the quick fox").input_ids) == "the quick fox"


@pytest.mark.slow
def test_buffers_that_files_hold_are_trained_saved_and_exported(
    folder: Path, tmp_path: Path
) -> None:
    """DeepSeek's routers keep one; the folder's are not what a fresh model has."""
    from safetensors.torch import load_file
    from tiny_models import make_model
    from tiny_text import make_tokenizer

    make_model("deepseek_v3", vocab_size=320).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    settings = jobs.settings_for(
        folder,
        model=str(tmp_path / "model"),
        save=tmp_path / "run",
        pipeline_model_parallel_size=2,
    )
    run_ranks(jobs.run_steps, 2, settings, steps=1, save=True)
    exported = load_file(export(tmp_path / "run", tmp_path / "hf") / "model.safetensors")
    wanted = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == wanted.keys()
    names = [name for name in wanted if name.endswith("e_score_correction_bias")]
    assert len(names) == 4
    assert all(torch.equal(exported[name], wanted[name]) for name in names)
    assert all(wanted[name].abs().max() > 0.1 for name in names)
    assert not torch.equal(exported["model.norm.weight"], wanted["model.norm.weight"])
