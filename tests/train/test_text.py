"""Text becomes documents, tokens, and batches whose order only the seed decides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_text import make_text, make_tokenizer, write_text

from fullbore.errors import DataError
from fullbore.train.batches import Batches
from fullbore.train.text import Corpus, list_files, read_documents, tokenize


def corpus_of(sources: list[Path], cache: Path, held_out: float = 0.1) -> Corpus:
    names = [str(source) for source in sources]
    return tokenize(names, make_tokenizer(), cache=cache, held_out=held_out)


def test_documents_come_back_from_their_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    text = write_text(tmp_path / "text.jsonl", 5)
    corpus = corpus_of([text], tmp_path / "cache", held_out=0)
    told = tokenizer.decode(corpus.train.tolist()).split("<end>")
    assert told == [*make_text(5), ""]
    assert corpus.documents == 5
    assert len(corpus.held_out) == 0


def test_many_documents_are_held_out_whole(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    corpus = corpus_of([write_text(tmp_path / "text.jsonl", 200)], tmp_path / "cache")
    kept, rest = (
        set(tokenizer.decode(stream.tolist()).split("<end>")[:-1])
        for stream in (corpus.train, corpus.held_out)
    )
    assert kept | rest == set(make_text(200))
    assert not kept & rest
    assert 8 <= len(rest) <= 40


def test_of_few_documents_the_end_is_held_out(tmp_path: Path) -> None:
    corpus = corpus_of([write_text(tmp_path / "text.jsonl", 10)], tmp_path / "cache", 0.25)
    total = len(corpus.train) + len(corpus.held_out)
    assert len(corpus.held_out) == pytest.approx(total / 4, abs=1)


def test_tokens_are_kept_until_text_tokenizer_or_share_change(tmp_path: Path) -> None:
    text, cache = write_text(tmp_path / "text.jsonl", 30), tmp_path / "cache"
    first = corpus_of([text], cache)
    (folder,) = (cache / "tokens").iterdir()
    marked = json.loads((folder / "facts.json").read_text()) | {"documents": 7}
    (folder / "facts.json").write_text(json.dumps(marked))
    assert corpus_of([text], cache).documents == 7  # read, not made again
    assert corpus_of([text], cache, 0.2).documents == first.documents
    write_text(text, 31)
    assert corpus_of([text], cache).documents == 31
    assert len(list((cache / "tokens").iterdir())) == 3


def test_folders_are_searched_in_one_order_and_tests_left_out(tmp_path: Path) -> None:
    for name in ("b/two.txt", "a/one.py", "a/data.jsonl", "tests/no.py", ".git/no.txt", "x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}', encoding="utf-8")
    found = [str(path.relative_to(tmp_path)) for path in list_files([str(tmp_path)])]
    assert found == ["a/data.jsonl", "a/one.py", "b/two.txt"]


def test_the_standard_library_is_text_that_every_machine_has() -> None:
    files = list_files(["stdlib"])
    assert {"argparse.py", "json"} <= {path.name for path in files} | {
        path.parent.name for path in files
    }
    assert not [path for path in files if "site-packages" in path.parts or "test" in path.parts]


def test_files_of_a_folder_that_are_no_text_are_counted(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "fine.txt").write_text("the quick brown fox", encoding="utf-8")
    corpus = corpus_of([tmp_path], tmp_path / "cache", 0)
    assert (corpus.documents, corpus.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2: not JSON"),
        ('{"body": "x"}', 'line 2: a line is {"text": "..."}'),
        ("[1, 2]", "line 2: a line is"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(f'"a string is a document"\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"text\.jsonl") as caught:
        list(read_documents(path))
    assert words in str(caught.value)


def test_unreadable_and_empty_text_is_refused(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("naïve".encode("latin-1"))
    with pytest.raises(DataError, match="is no UTF-8 text"):
        corpus_of([latin], tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no training text"):
        corpus_of([tmp_path / "empty"], tmp_path / "cache")
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n", encoding="utf-8")
    with pytest.raises(DataError, match="is empty"):
        corpus_of([blank], tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.bin"))


TOKENS = np.arange(101, dtype=np.uint32)


def batches(seed: int | None, size: int = 4, least: int | None = None) -> Batches:
    return Batches(TOKENS, seq_length=10, batch_size=size, seed=seed, what="it", least=least)


def test_targets_are_the_inputs_one_further() -> None:
    batch = batches(seed=1).at(0)
    assert batch.inputs.shape == batch.targets.shape == (4, 10)
    assert batch.inputs.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)


def test_each_pass_sees_every_sequence_once_in_an_order_of_its_own() -> None:
    made = batches(seed=1, size=2)
    assert made.sequences == 10
    passes = [
        torch.cat([made.at(start + step).inputs[:, 0] for step in range(0, 10, 2)]).tolist()
        for start in (0, 10)
    ]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(0, 100, 10))


def test_seed_and_position_decide_and_nothing_else() -> None:
    first, second = batches(seed=3), batches(seed=3)
    for position in (8, 0, 20, 8):  # a batch across two passes is one of them
        assert torch.equal(first.at(position).inputs, second.at(position).inputs)
    assert not torch.equal(first.at(0).inputs, batches(seed=4).at(0).inputs)
    assert batches(seed=None).at(0).inputs[:, 0].tolist() == [0, 10, 20, 30]


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(DataError, match="it has 101 tokens, 10 sequences of 10, and 11 are needed"):
        batches(seed=1, size=11)
    assert len(batches(seed=None, size=11, least=1).at(0).inputs) == 11
