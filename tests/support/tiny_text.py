"""A tiny tokenizer, some text, and a tiny model folder that has both, for tests of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_config

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "many",
    "old",
    "ships",
    "sail",
    "to",
    "green",
    "lands",
]


def make_text(paragraphs: int, *, seed: int = 0) -> list[str]:
    """Paragraphs of a few words in an order that can be learnt: each word has few successors."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(paragraphs):
        place = int(torch.randint(len(WORDS), (), generator=generator))
        words = []
        for _ in range(40):
            place = (place * 3 + int(torch.randint(2, (), generator=generator))) % len(WORDS)
            words.append(WORDS[place])
        texts.append(" ".join(words) + ".")
    return texts


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of a few dozen tokens more than there are bytes."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        make_text(20), vocab_size=300, special_tokens=["<end>"], show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>")


def write_model(
    folder: Path, *, family: str = "llama", weights: bool = True, **changes: Any
) -> Any:
    """A folder with a tiny random model and its tokenizer; returns the model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    config = make_config(family, **{"vocab_size": 320, "num_hidden_layers": 4, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if weights:
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


def write_text(path: Path, paragraphs: int = 120, *, seed: int = 0) -> Path:
    """A JSONL file of paragraphs."""
    lines = [json.dumps({"text": text}) for text in make_text(paragraphs, seed=seed)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
