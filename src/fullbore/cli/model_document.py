"""A priced model as JSON, with the keys that docs/json.md describes."""

from __future__ import annotations

from dataclasses import asdict

from fullbore.cli.model_inputs import Setting
from fullbore.cli.model_tables import groups
from fullbore.cost.model.piece import Piece

__all__ = ["document"]


def document(setting: Setting) -> dict[str, object]:
    """Everything that the command can say, numbers unrounded."""
    whole, rank = setting.whole, setting.rank
    states = setting.states
    return {
        "model": setting.name,
        "family": setting.shape.name,
        "layers": len(setting.shape.layers),
        "hidden": setting.shape.hidden,
        "vocab": setting.shape.vocab,
        "parameters": whole.parameters,
        "active_parameters": setting.active_parameters,
        "mtp_layers_not_counted": 0 if setting.shape.mtp_counted else setting.shape.mtp_layers,
        "conventions": _conventions(setting),
        "forward_flops_per_token": whole.forward_flops / setting.tokens,
        "model_flops_per_token": whole.model_flops / setting.tokens,
        "hardware_flops_per_token": whole.hardware_flops / setting.tokens,
        **_utilization(setting),
        "rank_parameters": rank.parameters,
        "weights_bytes": states.weights_bytes,
        "gradients_bytes": states.gradients_bytes,
        "optimizer_bytes": states.optimizer_bytes,
        "kept_bytes": rank.kept_bytes,
        "pieces": [_piece(title, same) for title, same in groups(setting)],
    }


def _conventions(setting: Setting) -> dict[str, object]:
    return {
        "sequence": setting.sequence,
        "microbatch": setting.microbatch,
        "precision": setting.precision.name,
        "kernels": setting.kernels.style,
        "flash": setting.kernels.flash,
        "recompute": setting.recompute.granularity,
        "recompute_layers": setting.recompute.layers,
        "recompute_modules": list(setting.recompute.modules)
        if setting.recompute.granularity == "selective"
        else [],
        "causal": setting.causal,
        "tensor": setting.split.tensor,
        "sequence_parallel": setting.split.sequence_parallel,
        "context": setting.split.context,
        "expert": setting.split.expert,
        "expert_tensor": setting.split.width_of_experts,
        "data_parallel": setting.data_parallel,
        "sharding": setting.sharding,
    }


def _utilization(setting: Setting) -> dict[str, object]:
    if setting.tokens_per_s is None or setting.peak_tflops is None:
        return {"mfu": None, "hfu": None}
    share = setting.tokens_per_s / (setting.peak_tflops * 1e12) / setting.tokens
    whole = setting.whole
    return {"mfu": whole.model_flops * share, "hfu": whole.hardware_flops * share}


def _piece(title: str, same: tuple[Piece, ...]) -> dict[str, object]:
    piece = same[0]
    return {
        "title": title,
        "kind": piece.kind,
        "indices": [one.index for one in same],
        "parameters": piece.parameters,
        "forward_flops": piece.forward_flops,
        "input_grad_flops": piece.input_grad_flops,
        "weight_grad_flops": piece.weight_grad_flops,
        "recomputed_flops": piece.recomputed_flops,
        "kept_bytes": piece.kept_bytes,
        "kept_until_weight_bytes": piece.kept_until_weight_bytes,
        "held_bytes": piece.held_bytes,
        "rebuilt_bytes": piece.rebuilt_bytes,
        "products": [asdict(product) for product in piece.products],
        "weights": [asdict(weights) for weights in piece.weights],
        "kept": [asdict(tensor) for tensor in piece.kept],
        "held": [asdict(tensor) for tensor in piece.held],
        "rebuilt": [asdict(tensor) for tensor in piece.rebuilt],
        "traffic": [asdict(traffic) for traffic in piece.traffic],
        "collectives": [asdict(message) for message in piece.collectives],
        "launches": [asdict(one) for one in piece.launches],
    }
