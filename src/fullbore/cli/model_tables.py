"""How a priced model reads on the terminal: one row a kind of piece, then one a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fullbore.cli.figures import counted, percent
from fullbore.cli.model_inputs import Setting
from fullbore.cli.output import table
from fullbore.cost.model.piece import Kept, Piece, Product
from fullbore.view.units import plain

__all__ = ["Group", "conventions", "explanation", "groups", "summary"]

_MIB, _GIGA = 2.0**20, 1e9

_MODULES = {
    "core_attn": "the core of attention",
    "layernorm": "outputs of norms",
    "mla_up_proj": "queries, keys and values from latents",
    "mlp": "MLPs",
    "moe": "mixtures of experts",
    "moe_act": "activations of experts",
    "shared_experts": "shared experts",
}

# One kind of piece: its title and the pieces, all of which cost the same.
Group = tuple[str, tuple[Piece, ...]]


def groups(setting: Setting) -> list[Group]:
    """The pieces, equal layers together, in the order in which each kind comes first."""
    kinds: dict[Piece, list[Piece]] = {}
    for piece in setting.pieces:
        kinds.setdefault(replace(piece, index=0), []).append(piece)
    return [(_title(same), tuple(same)) for same in kinds.values()]


def _title(same: Sequence[Piece]) -> str:
    first = same[0]
    if first.kind != "layer":
        return first.kind
    numbers = [piece.index for piece in same]
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]}-{numbers[-1]}"
    if len(numbers) == 2:
        return f"layers {numbers[0]} and {numbers[1]}"
    return f"layers {numbers[0]}, {numbers[1]}, ... {numbers[-1]}"


def summary(setting: Setting) -> str:
    """The model in a line, the conventions, a table of pieces, and what follows from it."""
    parts = [_headline(setting), "", *conventions(setting), "", _pieces(setting), ""]
    return "\n".join([*parts, *_conclusions(setting)])


def _headline(setting: Setting) -> str:
    shape = setting.shape
    total = setting.whole.parameters
    active = setting.active_parameters
    used = f", {_count(active)} of them for each token" if active < total else ""
    return (
        f"{setting.name} ({shape.name}): {counted(len(shape.layers), 'layer')}, hidden "
        f"{shape.hidden}, vocabulary {shape.vocab}: {_whole(total)} parameters{used}"
    )


def conventions(setting: Setting) -> list[str]:
    """What the figures presume, a line each."""
    split, kernels = setting.split, setting.kernels
    sizes = [f"t={split.tensor}"] + ["sequence parallel"] * split.sequence_parallel
    sizes += [f"cp={split.context}"] * (split.context > 1)
    if split.expert > 1 or split.width_of_experts != split.tensor:
        sizes.append(f"ep={split.expert}, {split.width_of_experts} a width")
    flash = "with" if kernels.flash else "without"
    lines = [
        f"one rank ({', '.join(sizes)}), one microbatch: {setting.microbatch} x "
        f"{setting.sequence} tokens",
        f"memory: {setting.precision.name}, {kernels.style} kernels {flash} flash attention, "
        f"recomputed: {_recomputed(setting)}",
        f"FLOPs: 2 a multiply-add, products only; attention "
        f"{'without the half that the mask hides' if setting.causal else 'counted whole'}",
    ]
    if setting.shape.mtp_layers and not setting.shape.mtp_counted:
        layers = counted(setting.shape.mtp_layers, "layer")
        lines.append(f"not counted: multi-token prediction, {layers} of the configuration")
    return lines


def _recomputed(setting: Setting) -> str:
    what = setting.recompute
    if what.granularity == "full":
        layers = len(setting.shape.layers)
        number = layers if what.layers is None else min(what.layers, layers)
        of = "every layer" if number == layers else f"the first {counted(number, 'layer')}"
        return f"{of}, all but its input"
    if what.granularity == "none":
        return "nothing"
    return ", ".join(_MODULES[module] for module in what.modules)


def _pieces(setting: Setting) -> str:
    columns = [
        "piece",
        "number",
        "parameters each",
        "F, GFLOP",
        "I, GFLOP",
        "W, GFLOP",
        "kept, MiB",
        "until W, MiB",
        "between I and W, MiB",
    ]
    rows = [_row(title, len(same), same[:1]) for title, same in groups(setting)]
    whole = _row("all", len(setting.pieces), setting.pieces)
    whole[2] = _whole(setting.rank.parameters)
    return table(columns, [*rows, whole])


def _row(title: str, number: int, of: Sequence[Piece]) -> list[str]:
    def total(name: str) -> float:
        return sum(float(getattr(piece, name)) for piece in of)

    return [
        title,
        str(number),
        _whole(total("parameters")),
        *(
            _figure(total(f"{name}_flops") / _GIGA)
            for name in ("forward", "input_grad", "weight_grad")
        ),
        *(
            _figure(total(name) / _MIB)
            for name in ("kept_bytes", "kept_until_weight_bytes", "held_bytes")
        ),
    ]


def _conclusions(setting: Setting) -> list[str]:
    whole, tokens = setting.whole, setting.tokens
    model, hardware = whole.model_flops / tokens, whole.hardware_flops / tokens
    lines = [
        f"FLOPs of a token  forward {_figure(whole.forward_flops / tokens / _GIGA)} G; a step "
        f"{_figure(model / _GIGA)} G (for MFU), with recomputation {_figure(hardware / _GIGA)} G "
        "(for HFU)",
    ]
    if setting.rank.largest_rebuilt_bytes:
        rebuilt = _figure(setting.rank.largest_rebuilt_bytes / _MIB)
        lines.append(f"recomputation     makes {rebuilt} MiB again while a layer's backward runs")
    lines.append(_states(setting))
    if setting.tokens_per_s is not None and setting.peak_tflops is not None:
        share = setting.tokens_per_s / (setting.peak_tflops * 1e12)
        lines.append(
            f"utilization       MFU {percent(model * share)}, HFU {percent(hardware * share)} at "
            f"{_figure(setting.tokens_per_s)} tokens/s a GPU of {_figure(setting.peak_tflops)} "
            "TFLOP/s, dense"
        )
    return lines


def _states(setting: Setting) -> str:
    held = setting.states
    each = held.bytes / max(1.0, setting.rank.parameters)
    return (
        f"states            {_figure(held.bytes / 2**30)} GiB if one rank had all pieces: weights "
        f"{_figure(held.weights_bytes / 2**30)}, gradients "
        f"{_figure(held.gradients_bytes / 2**30)}, optimizer "
        f"{_figure(held.optimizer_bytes / 2**30)}; {_figure(each)} bytes a parameter "
        f"({setting.sharding}, {counted(setting.data_parallel, 'replica')})"
    )


def explanation(setting: Setting) -> str:
    """Every product, tensor and message of each kind of piece."""
    return "\n\n".join(_explained(setting, title, same) for title, same in groups(setting))


def _explained(setting: Setting, title: str, same: tuple[Piece, ...]) -> str:
    piece = same[0]
    each = f", each of {len(same)}" if len(same) > 1 else ""
    sections = [
        f"{title}{each}",
        _matrices(piece),
        _tensors("kept for the backward", piece.kept),
        _tensors("made again by recomputation", piece.rebuilt),
        _tensors("held between I and W", piece.held),
        _traffic(piece),
        _messages(piece),
        _launches(setting, piece),
    ]
    return "\n\n".join(section for section in sections if section)


def _matrices(piece: Piece) -> str:
    """Products beside the weights of the same name, then weights that are in no product."""
    counts: dict[str, float] = {}
    for weights in piece.weights:
        counts[weights.name] = counts.get(weights.name, 0) + weights.count
    names = {product.name for product in piece.products}
    rows = [_product(product, counts.get(product.name)) for product in piece.products]
    rows += [[name, "", _whole(n), "", "", ""] for name, n in counts.items() if name not in names]
    if not rows:
        return ""
    rows.append(
        [
            "all",
            "",
            _whole(piece.parameters),
            *(
                _figure(flops / _GIGA)
                for flops in (
                    piece.forward_flops,
                    piece.input_grad_flops,
                    piece.weight_grad_flops,
                )
            ),
        ]
    )
    columns = [
        "products and weights",
        "rows x inner x columns",
        "parameters",
        "F, GFLOP",
        "I, GFLOP",
        "W, GFLOP",
    ]
    return table(columns, rows)


def _product(product: Product, weights: float | None) -> list[str]:
    size = f"{_figure(product.rows)} x {product.inner} x {product.columns}"
    if product.count > 1:
        size = f"{product.count} times {size}"
    if product.share < 1:
        size = f"{_figure(product.share)} of {size}"
    return [
        product.name + (" (again)" if product.recomputed else ""),
        size,
        "" if weights is None else _whole(weights),
        _figure(product.forward_flops / _GIGA),
        _figure(product.input_grad_flops / _GIGA),
        _figure(product.weight_grad_flops / _GIGA),
    ]


def _tensors(title: str, tensors: Iterable[Kept]) -> str:
    rows = [
        [
            tensor.name,
            _whole(tensor.elements),
            _figure(tensor.bytes_each),
            _figure(tensor.bytes / _MIB),
            tensor.until,
        ]
        for tensor in tensors
    ]
    if not rows:
        return ""
    total = sum(tensor.bytes for tensor in tensors)
    rows.append(["all", "", "", _figure(total / _MIB), ""])
    return table([title, "elements", "bytes each", "MiB", "until"], rows)


def _traffic(piece: Piece) -> str:
    rows = [
        [
            traffic.name,
            traffic.action,
            _figure(traffic.read_bytes / _MIB),
            _figure(traffic.written_bytes / _MIB),
        ]
        for traffic in piece.traffic
    ]
    columns = ["memory moved beside products", "in", "read, MiB", "written, MiB"]
    return table(columns, rows) if rows else ""


def _messages(piece: Piece) -> str:
    rows = [
        [message.name, message.kind, message.group, message.action, _figure(message.bytes / _MIB)]
        for message in piece.collectives
    ]
    return table(["messages", "kind", "ranks", "in", "MiB"], rows) if rows else ""


def _launches(setting: Setting, piece: Piece) -> str:
    """Kernels that the host starts, by module; of casts, how many there are, not of how many."""
    counts = {(one.module, one.action): one for one in piece.launches}
    rows = []
    for module in dict.fromkeys(one.module for one in piece.launches):
        cells: list[str] = [module]
        for action in ("F", "I", "W", "R"):
            one = counts.get((module, action))
            casts = f" + {one.casts} casts" if one and one.casts else ""
            cells.append("" if one is None else f"{one.kernels}{casts}")
        rows.append([*cells, "a graph" if setting.capture.has(module) else "the host"])
    columns = ["kernels started", "in F", "in I", "in W", "again", "by"]
    return table(columns, rows) if rows else ""


def _figure(value: float) -> str:
    """Four digits, or all of a larger number's whole part."""
    return plain(value, digits=4) if abs(value) < 1000 else f"{value:,.0f}".replace(",", " ")


def _whole(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def _count(value: float) -> str:
    """A number of parameters in billions or millions."""
    return f"{value / 1e9:.4g} billion" if value >= 1e9 else f"{value / 1e6:.4g} million"
