"""`--pipeline-model-parallel-layout` read: `Ett|(ttt|)*6ttL`, as `emit.megatron.layout` writes it.

E the embedding, t a layer, m a layer of multi-token prediction, L the loss, a bar between stages;
commas mean nothing. Source: Megatron Core, `transformer/pipeline_parallel_layer_layout.py`.
"""

from __future__ import annotations

import re

from fullbore.errors import ConfigError

__all__ = ["layers_of_layout"]

_FLAG = "--pipeline-model-parallel-layout"
_REPEATED = re.compile(r"\(([^()]+)\)\*(\d+)")
_ONE = re.compile(r"(.)\*(\d+)")
_MOST = 100_000  # signs, so that a slip of the finger does not fill the memory


def layers_of_layout(
    text: str, *, layers: int | None, ranks: int, further: int = 0
) -> tuple[int, ...]:
    """Layers of each stage [S]. further: of multi-token prediction.

    Raises ConfigError where the layout is none, its stages do not divide over the ranks, or it has
    another number of layers of either kind than the model.
    """
    stages = _written_out(text).split("|")
    signs = "".join(stages)
    if wrong := sorted(set(signs) - set("EtmL")):
        raise ConfigError(f"{_FLAG} {text}: {' '.join(wrong)} is no sign of it; write E, t, m, L")
    if len(stages) % ranks:
        raise ConfigError(
            f"{_FLAG} {text} has {len(stages)} stages, and --pipeline-model-parallel-size {ranks} "
            "does not divide them"
        )
    if (signs[:1], signs[-1:], signs.count("E"), signs.count("L")) != ("E", "L", 1, 1):
        raise ConfigError(f"{_FLAG} {text}: it must begin with its only E and end with its only L")
    if layers is not None and signs.count("t") != layers:
        raise ConfigError(
            f"{_FLAG} {text} has {signs.count('t')} layers (t), and --num-layers is {layers}"
        )
    if signs.count("m") != further or "t" in signs.partition("m")[2]:
        raise ConfigError(
            f"{_FLAG} {text} has {signs.count('m')} layers of multi-token prediction (m), and "
            f"--mtp-num-layers is {further}: as many stand behind the last t"
        )
    return tuple(stage.count("t") for stage in stages)


def _written_out(text: str) -> str:
    made = text.replace(",", "").replace(" ", "")
    for pattern in (_REPEATED, _ONE):
        if sum(int(match[2]) * len(match[1]) for match in pattern.finditer(made)) > _MOST:
            raise ConfigError(f"{_FLAG} {text}: more than {_MOST} stages and layers")
        made = pattern.sub(lambda match: match[1] * int(match[2]), made)
    return made
