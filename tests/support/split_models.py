"""Stages whose weights are used in every way that a split backward meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pipe_models import WIDTH, Block
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D


class Adapted(nn.Module):
    """A low-rank adapter beside a frozen linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)) * 0.5)


class Gpt(nn.Module):
    """transformers' Conv1D, whose weight lies the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Conv1D(2 * WIDTH, WIDTH), Conv1D(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Attends(nn.Module):
    """torch's own attention: one packed weight; rows are a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.attention(x[None], x[None], x[None])
        return x + self.linear(y[0])


class Direct(nn.Module):
    """Calls functional.linear itself: one weight three times, with and without biases, in 3-D."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias, self.other = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x[:, None], self.weight, self.bias)
        y = functional.linear(torch.tanh(y), self.weight, bias=self.other)
        y = functional.linear(torch.tanh(y), weight=self.weight, bias=self.bias)
        y = functional.linear(torch.tanh(y), self.weight)
        return functional.linear(y, self.weight, self.frozen)[:, 0]


class ChangesInPlace(nn.Module):
    """What a product gives is changed in place, as an activation function may: in 2-D and 3-D."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.LeakyReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.two(self.act(self.one(x))[:, None]))
        y = self.three(y)
        y += x[:, None]
        return y[:, 0]


class Odd(nn.Module):
    """Products in forms that are not caught: views of weights, @, einsum, a bias that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(4)
        )
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.caught = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.a.t(), self.bias)
        y = torch.tanh(y) @ self.b
        y = torch.einsum("bi,ij->bj", torch.tanh(y), self.c)
        y = functional.linear(torch.tanh(y), self.d, self.bias * 2)
        y = functional.linear(y[0], self.d) + y  # one row, no batch
        return self.caught(y)


class TiedInside(nn.Module):
    """One matrix that is looked up in and multiplied by, under two names, and one under one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.both = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.detach().abs().sum(1) * 10).long() % WIDTH
        x = x + self.table(ids)
        x = x + torch.tanh(functional.linear(x, self.both)) * self.both.diagonal()
        return self.head(self.second(torch.tanh(self.first(x))))


class Twisted(nn.Module):
    """Inputs that are transposed, expanded or broadcast; regions without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.four = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.one(x).abs().mean()
        y = self.one(torch.stack([x, x * 2]).transpose(0, 1)).transpose(0, 1)[0]
        y = self.two(y[:, None, None].expand(-1, 2, 3, -1)).sum((1, 2)) / scale
        y = self.four(torch.stack([y, x]).transpose(0, 1)).sum(1)
        return self.three(y[:1]) + y


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight) * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 2 * gradient.mm(weight), 2 * gradient.t().mm(x)


class OwnFunction(nn.Module):
    """Multiplies inside an autograd function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Double.apply(x, self.inside.weight)  # type: ignore[no-untyped-call]
        return self.outside(y) + self.inside.bias


class InHalf(nn.Module):
    """Runs in bfloat16 under autocast; one weight twice, and a region in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.exact = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(torch.tanh(self.up(self.norm(x))))
            y = self.down(y)
            with torch.autocast("cpu", enabled=False):
                y = self.exact(y.float())
        return x + y


class Recomputed(nn.Module):
    """Blocks under torch's checkpoint; counts how often each one's forward runs."""

    def __init__(self, *, reentrant: bool, count: int = 2) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.dropout = nn.Dropout(0.25)
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=self.reentrant)
        return x

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.dropout(block(x))
        return result


class Penalized(nn.Module):
    """Takes a derivative inside its forward, and derives it again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probe = x.detach().requires_grad_()
        energy = torch.tanh(self.inner(probe)).sum()
        (force,) = torch.autograd.grad(energy, probe, create_graph=True)
        return self.outer(x + force)


class HalfFrozen(nn.Module):
    """Weights without biases' gradients, biases without weights', and a frozen middle."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.one.bias.requires_grad_(False)
        self.two.weight.requires_grad_(False)
        self.three.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(torch.tanh(self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))))


class Empty(nn.Module):
    """Products without rows, as of experts that no token chose, and one without columns."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.none = nn.Linear(1, WIDTH)
        self.none.weight = nn.Parameter(torch.zeros(WIDTH, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unchosen = self.two(torch.tanh(self.one(x[None, :0, None])))
        return self.two(self.one(x)) + unchosen.sum() + self.none(x[:, None, :0])[:, 0]


class Imaginary(nn.Module):
    """Complex numbers, of which a gradient is the conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = self.waves(self.waves(torch.complex(x, x.flip(0))))
        return self.linear(waves.real * waves.imag)


class Tangent(nn.Module):
    """Takes a derivative forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = torch.tanh(self.inner(forward_ad.make_dual(x, torch.ones_like(x))))
            y, tangent = forward_ad.unpack_dual(dual)
        return self.outer(y) + tangent


MODELS: dict[str, Callable[[], nn.Module]] = {
    "block": Block,
    "adapted": Adapted,
    "gpt": Gpt,
    "attends": Attends,
    "direct": Direct,
    "in-place": ChangesInPlace,
    "odd": Odd,
    "tied": TiedInside,
    "twisted": Twisted,
    "own-function": OwnFunction,
    "in-half": InHalf,
    "penalized": Penalized,
    "half-frozen": HalfFrozen,
    "empty": Empty,
    "imaginary": Imaginary,
    "tangent": Tangent,
    "checkpoint": lambda: Recomputed(reentrant=False),
    "reentrant": lambda: Recomputed(reentrant=True),
}


def stages_of(name: str, count: int, seed: int = 0) -> list[nn.Module]:
    """`count` stages of one kind, the same whenever they are made."""
    torch.manual_seed(seed)
    return [MODELS[name]() for _ in range(count)]
