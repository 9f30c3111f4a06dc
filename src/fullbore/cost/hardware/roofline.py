"""Seconds of a piece's actions: a roofline of products, memory moved, messages waited for.

A product of [m, k] and [k, n] is cut into tiles of the output, which multiprocessors make in waves:

    tiles   = count · ceil(m / tile_rows) · ceil(n / tile_columns)
    compute = tiles · 2·tile_rows·tile_columns·(k + inner_lost) · share
              · (1 + tail_waves · multiprocessors / tiles) / (peak · product_share)
    memory  = bytes of both factors and of the output / (bandwidth · memory_share)
    seconds = max(compute, memory) + kernel_s

so that small, thin and short products reach less of the peak. A gradient of the input is the
product [m, n] x [n, k], one of the weight [k, m] x [m, n]; where kernels are fused, the sum that it
is added to travels beside it. Fused attention writes no scores: it is FLOPs over the peak and a
share of its own.

The host starts the kernels of an action one after another, `launch_s` each, unless a CUDA graph
replays them; an action takes as long as the slower of device and host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fullbore.cost.hardware.capture import Capture
from fullbore.cost.hardware.device import Constants, Device
from fullbore.cost.hardware.gemm import Gemm, gemm_s
from fullbore.cost.hardware.layout import Layout
from fullbore.cost.model.piece import MODULES, Action, Collective, Module, Piece, Product
from fullbore.cost.model.split import Kernels, Precision

__all__ = ["Overlap", "Priced", "Roofline", "Seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What travels beside computation, and costs only what is longer than that.

    backward: tensor-parallel messages of a backward, beside its products (as Megatron-LM does by
    default). forward: those of a forward, beside its products (--tp-comm-overlap). expert: those
    that take tokens to experts and back, beside another microbatch's computation
    (--overlap-moe-expert-parallel-comm); the layer itself has nothing to do until they are there.
    """

    backward: bool = True
    forward: bool = False
    expert: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """What one action is made of. exposed_s: messages that no computation hides. waited_s: by how
    much the host is behind, which starts all of it.
    """

    products_s: float = 0.0
    attention_s: float = 0.0
    traffic_s: float = 0.0
    exposed_s: float = 0.0
    waited_s: float = 0.0

    @property
    def device_s(self) -> float:
        """Seconds of the action on the device."""
        return self.products_s + self.attention_s + self.traffic_s + self.exposed_s

    @property
    def total_s(self) -> float:
        """Seconds of the action."""
        return self.device_s + self.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Seconds of a piece: F, I, W, and R, what recomputation adds to the backward."""

    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    recompute: Seconds

    @property
    def forward_s(self) -> float:
        """Seconds of F."""
        return self.forward.total_s

    @property
    def input_grad_s(self) -> float:
        """Seconds of I, recomputation included."""
        return self.input_grad.total_s + self.recompute.total_s

    @property
    def weight_grad_s(self) -> float:
        """Seconds of W."""
        return self.weight_grad.total_s


# Products of experts that Transformer Engine's grouped linear layer has under way at once, in as
# many streams (nvte_multi_stream_cublas_gemm).
_STREAMS = 4

_FUSED, _USUAL, _NOTHING = Kernels(), Overlap(), Capture()


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Prices pieces for one job.

    layout: the job on its cluster. precision: of products. kernels: as the pieces were made with.
    Flash attention skips what a causal mask hides and others do not: take pieces with
    causal=kernels.flash. capture: what CUDA graphs replay.
    """

    layout: Layout
    precision: Precision
    kernels: Kernels = _FUSED
    overlap: Overlap = _USUAL
    capture: Capture = _NOTHING

    def priced(self, piece: Piece) -> Priced:
        """Seconds of a piece's actions; ConfigError where the device has no such precision."""
        return Priced(
            forward=self._waiting(piece, "F", self._forward(piece, "F")),
            input_grad=self._waiting(piece, "I", self._input_grad(piece)),
            weight_grad=self._waiting(piece, "W", self._weight_grad(piece)),
            recompute=self._waiting(piece, "R", self._forward(piece, "R")),
        )

    def host_s(self, piece: Piece, action: Action, modules: Sequence[Module] = MODULES) -> float:
        """Seconds in which the host starts an action's kernels, but those that a graph replays."""
        kernels = sum(
            one.kernels + one.casts * self._constants.cast_kernels
            for one in piece.launches
            if one.action == action and one.module in modules and not self.capture.has(one.module)
        )
        return kernels * self._constants.launch_s

    def _waiting(self, piece: Piece, action: Action, found: Seconds) -> Seconds:
        """With what the device waits for the host.

        Without drops the host waits until the router has counted each expert's tokens, and can
        start nothing ahead of that: experts first, then all up to the next router.
        """
        host_s, device_s = self.host_s(piece, action), found.device_s
        total_s = max(device_s, host_s)
        if host_s and self.kernels.dropless and _counts_tokens(piece, action):
            experts = _only("moe", piece)
            experts_s = self._forward(experts, action).device_s
            behind_s = max(0.0, self.host_s(piece, action, ("moe",)) - experts_s)
            total_s = max(total_s, device_s + behind_s) if experts_s else total_s
        return replace(found, waited_s=total_s - device_s)

    def product_s(self, product: Product) -> float:
        """Seconds of the forward of a product."""
        if self._is_fused(product):
            return self._attention_s(product.forward_flops, self._constants.attention_share)
        return self._gemm_s(product, product.rows, product.inner, product.columns)

    def _forward(self, piece: Piece, action: Action) -> Seconds:
        """F, or what R makes again of it."""
        products = [p for p in piece.products if p.recomputed or action == "F"]
        made = [(self.product_s(product), not product.weight) for product in products]
        found = self._seconds(piece, action, made, hides=self.overlap.forward)
        return self._with_casts(found, [self._cast_s(each, "input") for each in products])

    def _input_grad(self, piece: Piece) -> Seconds:
        made = [(self._input_grad_s(each), not each.weight) for each in piece.products]
        found = self._seconds(piece, "I", made, hides=self.overlap.backward)
        return self._with_casts(found, [self._cast_s(each, "output") for each in piece.products])

    def _with_casts(self, found: Seconds, casts_s: Sequence[float]) -> Seconds:
        return replace(found, traffic_s=found.traffic_s + sum(casts_s))

    def _cast_s(self, product: Product, factor: Literal["input", "output"]) -> float:
        """In 8 bits a factor is read in 16, written in 8 and once more transposed.

        factor: the input, or the output's gradient. What is gathered is cast before, each rank its
        part, and transposed after. Each of several products has casts of its own.
        """
        if not self.precision.is_narrow or product.wide or not product.weight:
            return 0.0
        elements = product.rows * (product.inner if factor == "input" else product.columns)
        read_and_written = self.precision.activation + 2
        moved = read_and_written * elements
        if product.gathered == factor:
            moved = read_and_written * elements / product.parts + 2 * elements
        constants = self._constants
        share = constants.block_cast_share if self.precision.in_blocks else constants.cast_share
        per_s = self._device.memory_bytes_per_s * share
        gaps_s = self._constants.kernel_s * self._constants.cast_kernels
        return product.count * (min(moved, read_and_written * elements) / per_s + gaps_s)

    def _weight_grad(self, piece: Piece) -> Seconds:
        """Fused, sums into gradients travel beside the products, at the speed of a product."""
        made = [(self._weight_grad_s(each), False) for each in piece.products if each.weight]
        found = self._seconds(piece, "W", made, hides=self.overlap.backward)
        if self.kernels.style == "eager":
            return found
        sums_s = sum(self._memory_s(each.bytes) for each in piece.traffic if each.action == "W")
        return replace(found, traffic_s=max(0.0, sums_s - found.products_s))

    def _input_grad_s(self, product: Product) -> float:
        """[m, n] x [n, k]; without a weight [k, m] x [m, n] too."""
        if self._is_fused(product):
            share = self._constants.attention_backward_share
            return self._attention_s(product.input_grad_flops, share)
        one = self._gemm_s(product, product.rows, product.columns, product.inner)
        if product.weight:
            return one
        return one + self._gemm_s(product, product.inner, product.rows, product.columns)

    def _weight_grad_s(self, product: Product) -> float:
        """[k, m] x [m, n]; the sum that it is added to is traffic of the piece."""
        return self._gemm_s(product, product.inner, product.rows, product.columns, output_bytes=0.0)

    def _gemm_s(
        self,
        product: Product,
        rows: float,
        inner: float,
        columns: float,
        output_bytes: float | None = None,
    ) -> float:
        """Seconds of `product.count` products [rows, inner] x [inner, columns].

        Those of experts run a few at a time, each batch with an end of its own.
        """
        each = self.precision.activation
        narrow = product.weight and not product.wide
        together = min(product.count, _STREAMS) if product.weight else product.count
        gemm = Gemm(
            rows=rows,
            inner=inner,
            columns=columns,
            count=together,
            share=product.share,
            factor_bytes=self.precision.product_input if narrow else each,
            output_bytes=each if output_bytes is None else output_bytes,
        )
        peak = self._device.peak_flop_per_s(self.precision.name if narrow else self._wide_precision)
        one_s = gemm_s(gemm, self._device, self._constants, peak_flop_per_s=peak)
        return one_s * product.count / together

    def _attention_s(self, flops: float, share: float) -> float:
        peak = self._device.peak_flop_per_s(self._wide_precision) * share
        return flops / peak + self._constants.kernel_s

    def _seconds(
        self, piece: Piece, action: Action, made: list[tuple[float, bool]], *, hides: bool
    ) -> Seconds:
        """The parts of an action. made: seconds of each product, and whether it is attention's."""
        fused_s = sum(time_s for time_s, core in made if core and self.kernels.flash)
        products_s = sum(time_s for time_s, _ in made) - fused_s
        computed = Seconds(
            products_s=products_s,
            attention_s=fused_s,
            traffic_s=sum(
                self._traffic_s(traffic.bytes) + self._constants.kernel_s * traffic.kernels
                for traffic in piece.traffic
                if traffic.action == action
            ),
        )
        messages = [message for message in piece.collectives if message.action == action]
        to_experts = [message for message in messages if message.group == "expert"]
        around = [message for message in messages if message.group == "context"]
        others = [message for message in messages if message.group == "tensor"]
        exposed_s = self._exposed_s(others, products_s if hides else 0.0) + self._exposed_s(
            to_experts, computed.total_s if self.overlap.expert else 0.0
        )
        exposed_s += self._around_s(around, sum(time_s for time_s, core in made if core))
        return replace(computed, exposed_s=exposed_s)

    def _around_s(self, messages: Sequence[Collective], attention_s: float) -> float:
        """What is left of keys and values on their way round context-parallel ranks.

        While a rank computes with one of the C parts the next one arrives, so that C - 1 of C parts
        of attention hide what takes no longer. Their gradients go round one part behind, and the
        last message, which takes them home, has nothing beside it.
        """
        ring = self.layout.ring("context")
        turns = [(self.layout.turn_s(one.bytes, one.group), one.kind) for one in messages]
        hidden_s = attention_s * (ring.size - 1) / ring.size
        homeward_s = sum(time_s for time_s, kind in turns if kind == "reduce_scatter")
        return max(0.0, sum(time_s for time_s, _ in turns) - hidden_s) + homeward_s / max(
            1, ring.size - 1
        )

    def _exposed_s(self, messages: Sequence[Collective], beside_s: float) -> float:
        """What is left of messages next to beside_s of computation that does not wait for them.

        A product waits for the gather in front of its I, unless it takes what is there piece by
        piece (--tp-comm-overlap); other messages of a backward run beside the product that comes
        next, and slow it down, by what `hidden_share` leaves.
        """
        waited_s = hideable_s = hidden_s = 0.0
        for message in messages:
            seconds = self.layout.collective_s(
                message.kind, message.bytes, message.group, copies=message.copies
            )
            waits = message.action == "I" and message.kind == "all_gather"
            if waits and not self.overlap.forward:
                waited_s += seconds
            else:
                hideable_s += seconds
                hidden_s += seconds * self._hidden_share(message)
        return waited_s + hideable_s - min(beside_s, hidden_s)

    def _hidden_share(self, message: Collective) -> float:
        """Of a message beside computation.

        In t pieces, each beside the product of another (--tp-comm-overlap), one is left.
        """
        share = self._constants.hidden_share
        if message.group == "tensor" and self.overlap.forward:
            return max(share, 1 - 1 / self.layout.tensor)
        return share

    def _memory_s(self, moved_bytes: float) -> float:
        return moved_bytes / (self._device.memory_bytes_per_s * self._constants.memory_share)

    def _traffic_s(self, moved_bytes: float) -> float:
        return moved_bytes / (self._device.memory_bytes_per_s * self._constants.traffic_share)

    def _is_fused(self, product: Product) -> bool:
        return self.kernels.flash and not product.weight

    @property
    def _wide_precision(self) -> str:
        """Attention and the head stay in 16 bits where other products are in 8."""
        return "bf16" if self.precision.is_narrow else self.precision.name

    @property
    def _device(self) -> Device:
        return self.layout.cluster.device

    @property
    def _constants(self) -> Constants:
        return self.layout.cluster.constants


def _counts_tokens(piece: Piece, action: Action) -> bool:
    """Whether an action has a router's counts: F, and R where it makes them again."""
    return any(one.module == "moe_preprocess" and one.action == action for one in piece.launches)


def _only(module: Module, piece: Piece) -> Piece:
    """What a module has of a piece."""
    return replace(
        piece,
        products=tuple(each for each in piece.products if each.module == module),
        traffic=tuple(each for each in piece.traffic if each.module == module),
        collectives=tuple(each for each in piece.collectives if each.module == module),
    )
