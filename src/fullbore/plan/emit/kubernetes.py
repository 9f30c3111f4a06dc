"""A PyTorchJob of Kubeflow's training operator (kubeflow.org/v1) around a launch script.

Three documents: the launch files as a ConfigMap, a claim for checkpoints, and the job. One pod a
node: the first is the operator's Master, whose name the others know, the rest are its Workers.
Before a pod is ended its ranks are asked to save and leave, where they can. Source: Kubeflow
training operator 1.9, `pkg/apis/kubeflow.org/v1`, `pkg/controller.v1/pytorch`.
"""

from __future__ import annotations

import json
import math
from textwrap import indent

from fullbore.cost.hardware import GIB
from fullbore.cost.model import Split
from fullbore.cost.model.layer import pieces
from fullbore.cost.model.totals import totals
from fullbore.plan.choice import NONE
from fullbore.plan.emit.job import Job, Launch, LaunchFile, comment, slug

__all__ = ["kubernetes_manifest"]

_BYTES_A_PARAMETER = 14  # the weights in 16 bits, and in 32 with Adam's two moments
_CHECKPOINTS = 3
_GRACE_S = 600
_PORT = 23456  # the operator's own
_IMAGES = {"fullbore.sh": "fullbore", "megatron.sh": "megatron-lm"}


def kubernetes_manifest(job: Job, launch: Launch) -> LaunchFile:
    """The documents, for `kubectl apply -f`."""
    documents = (_config_map(job, launch), _claim(job), _pytorch_job(job, launch))
    head = comment((*job.head, "", *_usage(job, launch)))
    return LaunchFile(name="k8s.yaml", text=head + "---\n".join(("", *documents)))


def _usage(job: Job, launch: Launch) -> tuple[str, ...]:
    return (
        f"Start it: kubectl apply -f {job.folder}/k8s.yaml",
        "First set the image, and what this says in env:",
        *(f"  {name}: {what}" for name, what in launch.needs),
    )


def _config_map(job: Job, launch: Launch) -> str:
    files = "".join(f"  {file.name}: |\n{indent(file.text, '    ')}" for file in launch.files)
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {slug(job)}-launch\ndata:\n{files}"


def _claim(job: Job) -> str:
    return (
        "apiVersion: v1\nkind: PersistentVolumeClaim\n"
        f"metadata:\n  name: {slug(job)}-checkpoints\n"
        "spec:\n"
        "  accessModes: [ReadWriteMany] # every pod writes its part\n"
        "  resources:\n    requests:\n"
        f"      storage: {_checkpoints_gib(job)}Gi # {_CHECKPOINTS} checkpoints\n"
    )


def _checkpoints_gib(job: Job) -> int:
    """Room for a few checkpoints, in whole tens of GiB."""
    whole = pieces(
        job.question.shape,
        Split(),
        sequence=1,
        microbatch=1,
        recompute=NONE,
        precision=job.question.precision,
        causal=job.question.causal,
    )
    size = totals(whole).parameters * _BYTES_A_PARAMETER * _CHECKPOINTS
    return 10 * math.ceil(size / GIB / 10)


def _pytorch_job(job: Job, launch: Launch) -> str:
    cluster, name = job.question.cluster, slug(job)
    workers = ""
    if cluster.nodes > 1:
        workers = (
            f"    Worker:\n      replicas: {cluster.nodes - 1}\n"
            "      restartPolicy: OnFailure\n      template: *pod\n"
        )
    return (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n"
        f"metadata:\n  name: {name}\n"
        "spec:\n"
        f'  nprocPerNode: "{cluster.device.gpus_per_node}"\n'
        "  runPolicy:\n"
        "    cleanPodPolicy: Running\n"
        "    backoffLimit: 10\n"
        f"    schedulingPolicy:\n      minAvailable: {cluster.nodes} # all pods or none\n"
        "  pytorchReplicaSpecs:\n"
        "    Master:\n      replicas: 1\n      restartPolicy: OnFailure\n"
        f"      template: &pod\n{indent(_pod(job, launch), ' ' * 8)}"
        f"{workers}"
    )


def _pod(job: Job, launch: Launch) -> str:
    name = slug(job)
    return (
        "spec:\n"
        f"  terminationGracePeriodSeconds: {_GRACE_S}\n"
        "  containers:\n"
        "    - name: pytorch\n"
        f"{indent(_container(job, launch), ' ' * 6)}"
        "  volumes:\n"
        f"    - name: launch\n      configMap:\n        name: {name}-launch\n"
        "    - name: checkpoints\n      persistentVolumeClaim:\n"
        f"        claimName: {name}-checkpoints\n"
        "    - name: shm # NCCL and data loaders share memory there\n"
        "      emptyDir:\n        medium: Memory\n"
    )


def _container(job: Job, launch: Launch) -> str:
    image = _IMAGES.get(launch.script, launch.script.removesuffix(".sh"))
    devices = job.question.cluster.device.gpus_per_node
    return (
        f"image: {image}:latest # yours, with all that {launch.script} starts\n"
        f"command: [bash, /launch/{launch.script}]\n"
        "args: [] # more flags\n"
        + _ending(launch)
        + f"ports:\n  - name: pytorchjob-port\n    containerPort: {_PORT}\n"
        f'resources:\n  limits:\n    {_resource(job)}: "{devices}"\n'
        "volumeMounts:\n"
        "  - {name: launch, mountPath: /launch}\n"
        "  - {name: checkpoints, mountPath: /checkpoints}\n"
        "  - {name: shm, mountPath: /dev/shm}\n"
        f"env:\n{_environment(job, launch)}"
    )


def _ending(launch: Launch) -> str:
    """Ranks get the signal themselves: torchrun would give them half a minute."""
    if launch.ranks is None:
        return ""
    script = (
        f"pkill -TERM -f -- '{launch.ranks}'; while pgrep -f -- '{launch.ranks}' > /dev/null; "
        "do sleep 1; done"
    )
    return f"lifecycle:\n  preStop:\n    exec:\n      command: [bash, -c, {json.dumps(script)}]\n"


def _resource(job: Job) -> str:
    title = job.question.cluster.device.title
    kinds = {
        "AMD": "amd.com/gpu",
        "Ascend": "huawei.com/Ascend910",
        "Huawei": "huawei.com/Ascend910",
    }
    return next((kind for name, kind in kinds.items() if name in title), "nvidia.com/gpu")


def _environment(job: Job, launch: Launch) -> str:
    values = {
        "HEAD": f"{slug(job)}-master-0",
        "PORT": str(_PORT),
        "JOB_ID": slug(job),
        "SAVE": f"/checkpoints/{slug(job)}",
    }
    needed = [(name, what) for name, what in launch.needs if name not in values]
    return "".join(
        f"  - {{name: {name}, value: {json.dumps(value)}}}\n" for name, value in values.items()
    ) + "".join(f"  # - {{name: {name}, value: ...}} # {what}\n" for name, what in needed)
