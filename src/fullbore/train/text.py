"""Training text: files and folders become documents, documents become two streams of tokens.

Tokens are made once and kept in the cache as flat arrays, one to train on and one held out; whole
documents are held out where there are enough of them, so that no page is half in both. A document
ends in the end-of-text token, and sequences are cut from the stream without padding.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullbore.errors import DataError
from fullbore.files import move_folder

__all__ = ["STDLIB", "Corpus", "Tokens", "list_files", "read_documents", "tokenize"]

STDLIB = "stdlib"
_TEXT = {".txt", ".md", ".rst", ".py", ".text"}
_JSONL = {".jsonl", ".ndjson"}
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}
_FEW_DOCUMENTS = 50
_AT_ONCE = 256  # documents given to the tokenizer together

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two streams of token ids, each [n], documents ending in the end-of-text token."""

    train: Tokens
    held_out: Tokens
    documents: int
    skipped: int  # files in folders that are no UTF-8 text


def list_files(sources: Sequence[str]) -> list[Path]:
    """The files of these files and folders, in an order that does not depend on the machine.

    "stdlib" stands for the source of Python's standard library, without its tests. Folders are
    searched for text (.txt, .md, .rst, .py) and JSONL (.jsonl). Raises DataError where a source
    does not exist or holds nothing.
    """
    files: list[Path] = []
    for source in sources:
        path = Path(source)
        if source == STDLIB and not path.exists():
            path = Path(sysconfig.get_path("stdlib"))
        if not path.exists():
            raise DataError(f"there is no training text {source}: give a file or a folder")
        found = [path] if path.is_file() else sorted(_walk(path))
        if not found:
            kinds = ", ".join(sorted(_TEXT | _JSONL))
            raise DataError(f"{source} holds no training text ({kinds})")
        files.extend(found)
    return files


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        for name in names:
            if Path(name).suffix.lower() in _TEXT | _JSONL:
                yield Path(root, name)


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a file: each line's "text" of a JSONL file, else the whole file.

    Raises DataError naming file and line; UnicodeDecodeError where it is no UTF-8.
    """
    try:
        if path.suffix.lower() not in _JSONL:
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise DataError(f'{where}: a line is {{"text": "..."}} or a string')
    return text


def tokenize(sources: Sequence[str], tokenizer: Any, *, cache: Path, held_out: float) -> Corpus:
    """The tokens of some text, from the cache where nothing has changed.

    tokenizer: a transformers tokenizer. held_out: the share of documents (of tokens, where
    documents are few) that is not trained on. Raises DataError.
    """
    files = list_files(sources)
    folder = cache / "tokens" / _key(files, _identity(tokenizer), held_out)
    if not folder.is_dir():
        _make(folder, files, tokenizer, held_out)
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        streams = [
            np.memmap(folder / f"{name}.bin", dtype=np.uint32, mode="r")
            if facts[name]
            else np.zeros(0, dtype=np.uint32)
            for name in ("train", "held_out")
        ]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot read the tokens in {folder}: {error}; delete it") from error
    return Corpus(
        train=streams[0],
        held_out=streams[1],
        documents=facts["documents"],
        skipped=facts["skipped"],
    )


def _identity(tokenizer: Any) -> str:
    """What tells one tokenizer from another: its vocabulary and how it splits a sample."""
    sample = tokenizer("The quick\n\tbrown fox_2 jumps;  naïve 東京", add_special_tokens=False)
    known = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return repr((known, sample["input_ids"], tokenizer.eos_token_id))


def _key(files: Sequence[Path], identity: str, held_out: float) -> str:
    digest = hashlib.sha256(f"{identity}:{held_out}".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _make(folder: Path, files: Sequence[Path], tokenizer: Any, held_out: float) -> None:
    """Write the streams beside their place and move them there when they are whole."""
    skipped: list[Path] = []
    documents = list(_tokens_of(_texts(files, skipped), tokenizer))
    if not documents:
        raise DataError(f"the training text is empty ({len(files)} files)")
    train, rest = _split(documents, held_out)
    facts = {"documents": len(documents), "skipped": len(skipped)}
    facts |= {"train": len(train), "held_out": len(rest)}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
            made = Path(temporary) / folder.name
            made.mkdir()
            train.tofile(made / "train.bin")
            rest.tofile(made / "held_out.bin")
            (made / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
            move_folder(made, folder)
    except OSError as error:
        raise DataError(f"cannot keep the tokens in {folder}: {error}") from error


def _texts(files: Sequence[Path], skipped: list[Path]) -> Iterator[str]:
    """All documents that are not empty; of several files, those that are no UTF-8 are skipped."""
    for path in files:
        try:
            yield from (text for text in read_documents(path) if text.strip())
        except UnicodeDecodeError as error:
            if len(files) == 1:
                raise DataError(f"{path} is no UTF-8 text: {error}") from error
            skipped.append(path)


def _tokens_of(texts: Iterable[str], tokenizer: Any) -> Iterator[Tokens]:
    """One array of ids a document, the end-of-text token last."""
    end = [tokenizer.eos_token_id]
    remaining = iter(texts)
    while batch := list(islice(remaining, _AT_ONCE)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            yield np.array(ids + end, dtype=np.uint32)


def _split(documents: Sequence[Tokens], held_out: float) -> tuple[Tokens, Tokens]:
    """The stream to train on and the one held out: by document, or the end of it all if few."""
    if len(documents) < _FEW_DOCUMENTS:
        stream = np.concatenate(documents)
        cut = round(len(stream) * (1 - held_out))
        return stream[:cut], stream[cut:]
    chosen = [_is_held_out(index, held_out) for index in range(len(documents))]
    empty = np.zeros(0, dtype=np.uint32)
    kept, rest = (
        np.concatenate([empty, *(d for d, out in zip(documents, chosen, strict=True) if out is s)])
        for s in (False, True)
    )
    return kept, rest


def _is_held_out(document: int, held_out: float) -> bool:
    """The same documents always, spread over all of them."""
    digest = hashlib.sha256(str(document).encode()).digest()
    return int.from_bytes(digest[:4], "big") < held_out * 2**32
