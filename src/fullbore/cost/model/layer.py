"""One layer's steps in order, and all pieces of a model with recomputation applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from fullbore.cost.model.attention import attention
from fullbore.cost.model.ends import embedding, head
from fullbore.cost.model.experts import experts
from fullbore.cost.model.frame import Frame, Part, again_with, keeping, within
from fullbore.cost.model.further import around_further_layer
from fullbore.cost.model.latent import latent_attention
from fullbore.cost.model.launches import launches
from fullbore.cost.model.legal import check
from fullbore.cost.model.mlp import mlp
from fullbore.cost.model.norms import norm, residual
from fullbore.cost.model.piece import Collective, Kept, Kind, Module, Piece, Traffic, joined
from fullbore.cost.model.shape import Attention, LayerShape, Mlp, ModelShape, Norm
from fullbore.cost.model.split import Kernels, Precision, Recompute, Split

__all__ = ["pieces"]


def pieces(
    shape: ModelShape,
    split: Split,
    *,
    sequence: int,
    microbatch: int,
    recompute: Recompute,
    precision: Precision,
    causal: bool,
    kernels: Kernels | None = None,
) -> tuple[Piece, ...]:
    """The embedding, every layer and the head, for one rank and one microbatch.

    sequence: s, in tokens, before any cut. microbatch: b, in sequences. causal: whether FLOPs leave
    out the half of the attention that the mask hides. kernels: fused with flash attention where
    not given. Equal layers are priced once. Raises ConfigError where the split does not divide the
    model, naming sizes that do.
    """
    check(shape, split, sequence=sequence, microbatch=microbatch, recompute=recompute)
    frame = Frame(
        hidden=shape.hidden,
        split=split,
        sequence=sequence,
        microbatch=microbatch,
        precision=precision,
        kernels=kernels or Kernels(),
        causal=causal,
        hidden_dropout=shape.hidden_dropout,
        attention_dropout=shape.attention_dropout,
        unfused=shape.unfused,
    )
    ends = embedding(frame, shape), head(frame, shape)
    first, last = (_assemble(frame, parts, Recompute()) for parts in ends)
    if shape.mtp_counted:
        last = joined(last, *_further(frame, shape, recompute) * shape.mtp_layers)
    return (
        replace(first, kind="embedding"),
        *_layers(frame, shape, recompute),
        replace(last, kind="head"),
    )


def _layers(frame: Frame, shape: ModelShape, recompute: Recompute) -> Iterable[Piece]:
    priced: dict[tuple[LayerShape, Recompute], Piece] = {}
    for index, layer in enumerate(shape.layers):
        spared = recompute.layers is not None and index >= recompute.layers
        what = Recompute() if spared else replace(recompute, layers=None)
        if (layer, what) not in priced:
            priced[layer, what] = _assemble(frame, _steps(frame, layer, shape.norm), what)
        yield replace(priced[layer, what], index=index)


def _further(frame: Frame, shape: ModelShape, recompute: Recompute) -> tuple[Piece, Piece]:
    """A layer that predicts a further token, made like the last one, and what surrounds it.

    Where only the first layers of a stage are made again, it is not among them.
    """
    what = recompute if recompute.layers is None else Recompute()
    return (
        _assemble(frame, around_further_layer(frame, shape), Recompute()),
        _assemble(frame, _steps(frame, shape.layers[-1], shape.norm), what),
    )


def _steps(frame: Frame, layer: LayerShape, kind: Norm) -> tuple[Part, ...]:
    """Norm, attention, sum, norm, MLP, sum, in the order of F."""
    first: Module = "mlp" if isinstance(layer.mlp, Mlp) else "moe_router"
    last: Module = "mlp" if isinstance(layer.mlp, Mlp) else "moe"
    return (
        *within("attn", _first_half(frame, layer, kind)),
        *within(first, _second_input(frame, layer, kind)),
        *_mlp(frame, layer),
        *within(last, (*_after(frame, layer, "mlp", kind), residual(frame, "mlp"))),
    )


def _first_half(frame: Frame, layer: LayerShape, kind: Norm) -> tuple[Part, ...]:
    return (
        *_input(frame, layer, "attention", kind, norm_here=layer.norms_before > 0),
        *_attention(frame, layer),
        *_after(frame, layer, "attention", kind),
        residual(frame, "attention"),
    )


def _input(
    frame: Frame, layer: LayerShape, name: str, kind: Norm, *, norm_here: bool, first: bool = True
) -> tuple[Part, ...]:
    """The norm in front, and its output, which the first matrix keeps until W."""
    made = Part(kept=(frame.stream(f"{name} input", until_weight=True),))
    if not norm_here:
        return (made,)
    before = norm(frame, f"{name} norm", kind=kind, width=frame.hidden, keeps_input=first)
    return (*keeping("layernorm", before), *again_with("layernorm", made))


def _second_input(frame: Frame, layer: LayerShape, kind: Norm) -> tuple[Part, ...]:
    if layer.parallel and layer.norms_before < 2:
        return ()  # the MLP reads what attention reads
    *before, made = _input(
        frame, layer, "mlp", kind, norm_here=layer.norms_before > 1, first=not layer.parallel
    )
    return (*before, replace(made, feeds="mlp" if isinstance(layer.mlp, Mlp) else "moe"))


def _attention(frame: Frame, layer: LayerShape) -> tuple[Part, ...]:
    if isinstance(layer.attention, Attention):
        return attention(frame, layer.attention)
    return latent_attention(frame, layer.attention)


def _mlp(frame: Frame, layer: LayerShape) -> tuple[Part, ...]:
    if isinstance(layer.mlp, Mlp):
        return within("mlp", again_with("mlp", *mlp(frame, layer.mlp)))
    return experts(frame, layer.mlp)


def _after(frame: Frame, layer: LayerShape, name: str, kind: Norm) -> tuple[Part, ...]:
    if not layer.norms_after:
        return ()
    return (norm(frame, f"norm after {name}", kind=kind, width=frame.hidden),)


def _assemble(frame: Frame, parts: Sequence[Part], recompute: Recompute) -> Piece:
    """A piece of its steps; what recomputation makes again is taken out of what is kept."""
    again = [part for part in parts if _is_again(part, recompute)]
    kept = _kept(_fed(frame, part, recompute) for part in parts if not _is_again(part, recompute))
    if recompute.granularity == "full":
        kept = (frame.stream("layer input"),)
    every = _kept(parts)
    inputs = tuple(tensor for tensor in every if tensor.until == "W")
    kind: Kind = "layer"
    return Piece(
        kind=kind,
        index=0,
        products=tuple(
            replace(product, recomputed=_is_again(part, recompute), module=part.module)
            for part in parts
            for product in part.products
        ),
        kept=kept,
        held=(*inputs, *chain.from_iterable(part.grads for part in parts)),
        rebuilt=_kept(again),
        weights=tuple(chain.from_iterable(part.weights for part in parts)),
        traffic=_traffic(frame, parts, again),
        collectives=_collectives(parts, again),
        launches=launches(frame, parts, again),
    )


def _is_again(part: Part, recompute: Recompute) -> bool:
    if recompute.granularity == "selective":
        return not part.again.isdisjoint(recompute.modules)
    return recompute.granularity == "full"


def _fed(frame: Frame, part: Part, recompute: Recompute) -> Part:
    """What a module is made again from is kept as it came, not in the bits that products take."""
    if recompute.granularity != "selective" or part.feeds not in recompute.modules:
        return part
    return replace(part, kept=tuple(replace(kept, bytes_each=frame.bytes) for kept in part.kept))


def _kept(parts: Iterable[Part]) -> tuple[Kept, ...]:
    return tuple(chain.from_iterable(part.kept for part in parts))


def _traffic(frame: Frame, parts: Sequence[Part], again: Sequence[Part]) -> tuple[Traffic, ...]:
    """Every step's, once more where it is recomputed, and the sum into accumulated gradients."""
    told = [replace(traffic, module=part.module) for part in parts for traffic in part.traffic]
    repeated = [
        replace(traffic, action="R", module=part.module)
        for part in again
        for traffic in part.traffic
        if traffic.action == "F"
    ]
    learned = sum(weights.count for part in parts for weights in part.weights)
    size = learned * frame.precision.gradient
    summed = Traffic(name="gradient sums", read_bytes=size, written_bytes=size, action="W")
    return (*told, *repeated, summed)


def _collectives(parts: Sequence[Part], again: Sequence[Part]) -> tuple[Collective, ...]:
    told = [replace(message, module=part.module) for part in parts for message in part.collectives]
    repeated = [
        replace(message, action="R", module=part.module)
        for part in again
        for message in part.collectives
        if message.action == "F"
    ]
    return (*told, *repeated)
