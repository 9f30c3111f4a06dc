"""A plan as DeepSpeed's configuration, a pipeline module with its stages, and the launch command.

DeepSpeed's configuration says nothing of which layers a stage has: its `PipelineModule` cuts a list
of layers by number, parameters or type. So the stages come as a subclass that cuts the list where
the plan does. Source: DeepSpeed 0.19, `runtime/config.py`, `runtime/pipe/module.py`.
"""

from __future__ import annotations

import json
from itertools import accumulate

from fullbore.plan.emit.job import HERE, Job, Launch, LaunchFile, comment, torchrun
from fullbore.plan.engines import check, engine_of

__all__ = ["deepspeed_config", "deepspeed_launch", "stage_starts"]

# By Megatron-LM's names; what they are given is a place to start from.
_OPTIMIZERS = {
    "adam": {"type": "AdamW", "params": {"lr": 1e-4}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}},
}
_IN_16_BITS = 2.0


def deepspeed_launch(job: Job) -> Launch:
    """The script, the configuration, and a module with the stages.

    Raises ConfigError that names what DeepSpeed cannot do.
    """
    check(engine_of("deepspeed"), job.question, job.choice)
    return Launch(
        files=(
            LaunchFile(name="deepspeed.sh", text=_script(job)),
            LaunchFile(name="deepspeed.json", text=_json(job)),
            LaunchFile(name="deepspeed_stages.py", text=_stages(job)),
        ),
        needs=(("TRAIN", "your script, which builds PlannedPipeline of deepspeed_stages.py"),),
    )


def deepspeed_config(job: Job) -> dict[str, object]:
    """The configuration, but for the optimizer's own numbers."""
    spread, precision = job.choice.spread, job.question.precision.name
    config: dict[str, object] = {
        "train_batch_size": job.question.global_batch,
        "train_micro_batch_size_per_gpu": spread.microbatch_size,
        "gradient_accumulation_steps": spread.microbatches,
        "zero_optimization": {"stage": 1 if spread.distributed else 0},
        "pipeline": {
            "stages": spread.pipeline,
            "activation_checkpoint_interval": int(job.choice.recompute.granularity == "full"),
        },
        "gradient_clipping": 1.0,
        "optimizer": _OPTIMIZERS[job.question.optimizer],
    }
    if job.question.optimizer == "sgd" and spread.distributed:
        config["zero_allow_untested_optimizer"] = True  # it knows Adam's kind alone
    if precision == "fp32":
        return config
    config[precision] = {"enabled": True}
    if precision == "bf16" and spread.distributed:
        summed = "bf16" if job.question.precision.gradient == _IN_16_BITS else "fp32"
        config["data_types"] = {"grad_accum_dtype": summed}
    return config


def stage_starts(job: Job) -> tuple[int, ...]:
    """Where each stage begins in the list [embedding, layers..., what follows them]."""
    layers = job.choice.layers
    assert layers is not None
    return (0, *(1 + before for before in accumulate(layers[:-1])))


def _json(job: Job) -> str:
    """JSON has no comments, and DeepSpeed passes over a key that it does not know."""
    return json.dumps({"_comment": list(job.head), **deepspeed_config(job)}, indent=2) + "\n"


def _stages(job: Job) -> str:
    layers = job.choice.layers or ()
    starts = ", ".join(map(str, stage_starts(job)))
    last = len(job.question.shape.layers)
    return (
        comment(job.head)
        + f'''"""The stages of the plan, for DeepSpeed 0.19.

Build PlannedPipeline as a PipelineModule, with the layers in this order: the embedding, the model's
{last} layers, the final norm, the head (an embedding that is the head's too: TiedLayerSpec).

    module = PlannedPipeline(layers=[...], num_stages=NUM_STAGES, loss_fn=...)
    engine, *_ = deepspeed.initialize(model=module, config="deepspeed.json", ...)
"""

from deepspeed.pipe import PipelineModule

NUM_STAGES = {job.choice.spread.pipeline}

# The first item of each stage; the model's layers by stage: {", ".join(map(str, layers))}.
STARTS = [{starts}]


class PlannedPipeline(PipelineModule):
    """A pipeline whose stages begin where the plan says."""

    def _partition_layers(self, method="planned"):
        if self.num_stages != NUM_STAGES or len(self._layer_specs) < {last + 2}:
            raise ValueError(
                f"planned were {{NUM_STAGES}} stages of the embedding, {last} layers and a head; "
                f"these are {{self.num_stages}} stages of {{len(self._layer_specs)}} items"
            )
        self.parts = [*STARTS, len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
'''
    )


def _script(job: Job) -> str:
    cluster = job.question.cluster
    start = "" if cluster.nodes == 1 else "HEAD=first-node "
    usage = (
        f"Start it on every node: {start}TRAIN=train.py bash deepspeed.sh [your script's flags]",
        f"or with DeepSpeed's own launcher: deepspeed --num_nodes {cluster.nodes} "
        f"--num_gpus {cluster.device.gpus_per_node} train.py ...",
    )
    program = (
        '"${TRAIN:?your script, which builds PlannedPipeline of deepspeed_stages.py}" \\\n'
        '  --deepspeed --deepspeed_config "$here/deepspeed.json" "$@"'
    )
    return (
        "#!/usr/bin/env bash\n"
        + comment((*job.head, "", *usage))
        + "set -euo pipefail\n"
        + HERE
        + 'export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # finds deepspeed_stages.py\n'
        + torchrun(job, program)
    )
