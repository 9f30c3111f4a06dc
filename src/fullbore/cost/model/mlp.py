"""MLPs: two matrices with an activation between them, or three where one gates another.

Fused, a gated MLP of width f keeps gate and up (2f) and their product (f); a plain one keeps the
activation's input and output (f each). Run operation by operation, a gated one keeps the activated
gate too, and GPT-2's GELU, spelled out as 0.5·x·(1 + tanh(…)), keeps x, 0.5·x, the tanh and one
plus it.
"""

from __future__ import annotations

from fullbore.cost.model.frame import Frame, Part, moves
from fullbore.cost.model.linear import entering, leaving, matrix
from fullbore.cost.model.piece import Kept
from fullbore.cost.model.shape import Activation, Mlp

__all__ = ["activated", "activation_traffic", "mlp"]


def mlp(frame: Frame, shape: Mlp, *, name: str = "mlp") -> tuple[Part, ...]:
    """All steps; the input, which the layer's norm made, is kept by the layer."""
    width = shape.width // frame.split.tensor
    first = f"{name} gate and up" if shape.gated else f"{name} up"
    out = f"{name} down"
    columns = width * (2 if shape.gated else 1)
    return (
        entering(frame, first, frame.hidden),
        matrix(
            frame,
            first,
            inner=frame.hidden,
            columns=columns,
            bias=shape.bias,
            gathered="input",
        ),
        Part(
            kept=activated(
                frame,
                name,
                elements=frame.tokens * width,
                gated=shape.gated,
                activation=shape.activation,
            )
        ),
        activation_traffic(frame, name, elements=frame.tokens * width, gated=shape.gated),
        matrix(
            frame,
            out,
            inner=width,
            columns=frame.hidden,
            bias=shape.bias,
            gathered="output",
        ),
        leaving(frame, out, frame.hidden),
    )


def activated(
    frame: Frame, name: str, *, elements: float, gated: bool, activation: Activation
) -> tuple[Kept, ...]:
    """What lies between the matrices; elements: of one tensor of the inner width."""
    last = f"{name} down input"
    product = Kept(
        name=last, elements=elements, bytes_each=frame.precision.product_input, until="W"
    )
    tensors = _tensors(gated=gated, activation=activation, eager=frame.eager)
    if activation == "relu" and product.bytes_each == frame.bytes:
        tensors = ()  # its output is enough
    return (
        *(
            Kept(name=f"{name} {tensor}", elements=elements, bytes_each=frame.bytes)
            for tensor in tensors
        ),
        product,
    )


def _tensors(*, gated: bool, activation: Activation, eager: bool) -> tuple[str, ...]:
    """The tensors of the inner width besides the last matrix's input."""
    if not eager:
        return ("gate", "up") if gated else ("up",)
    if activation == "clamped_silu":
        return _CLAMPED
    inside = ("half up", "tanh", "one plus tanh") if activation == "gelu_spelled" else ()
    return ("gate", "activated gate", "up") if gated else ("up", *inside)


# gpt-oss: gate and up clamped, the sigmoid of a multiple of the gate, its product, up plus one.
_CLAMPED = ("gate", "up", "clamped gate", "sigmoid", "glu", "up plus one")


def activation_traffic(frame: Frame, name: str, *, elements: float, gated: bool) -> Part:
    """Reads and writes of the activation, fused with the product of gate and up or not."""
    size = elements * frame.bytes
    if not gated:
        return moves(f"{name} activation", forward=(size, size), backward=(2 * size, size))
    if frame.eager:
        return moves(
            f"{name} activation", forward=(3 * size, 2 * size), backward=(5 * size, 3 * size)
        )
    return moves(f"{name} activation", forward=(2 * size, size), backward=(3 * size, 2 * size))
