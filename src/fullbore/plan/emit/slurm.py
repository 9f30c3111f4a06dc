"""A batch script for Slurm around a launch script: every node starts it, and time limits are met.

Ten minutes before its time is up the job is told so: where ranks can save and leave, one of them is
asked to (they agree on it), and the job is queued again, to go on from its newest checkpoint.
"""

from __future__ import annotations

from fullbore.plan.emit.job import Job, Launch, LaunchFile, comment, slug

__all__ = ["slurm_script"]

_WARNING_S = 600


def slurm_script(job: Job, launch: Launch) -> LaunchFile:
    """The batch script that starts a launch's script on every node."""
    return LaunchFile(
        name="slurm.sbatch",
        text="#!/usr/bin/env bash\n"
        + comment((*job.head, "", *_usage(job, launch)))
        + _options(job)
        + "set -euo pipefail\n"
        + _meeting(job)
        + _stop(launch)
        + _start(launch)
        + _end(),
    )


def _usage(job: Job, launch: Launch) -> tuple[str, ...]:
    return (
        f"Submit it: sbatch {job.folder}/slurm.sbatch [more flags for {launch.script}]",
        "from the folder that paths are relative to. Of the environment it hands on:",
        *(f"  {name}: {what}" for name, what in launch.needs),
        "Add --account and --partition as your cluster asks, here or on the command line.",
    )


def _options(job: Job) -> str:
    cluster = job.question.cluster
    options = (
        f"--job-name={slug(job)}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={cluster.device.gpus_per_node}",
        "--exclusive",
        "--time=24:00:00",
        "--requeue",
        f"--signal=B:USR1@{_WARNING_S}",
        "--open-mode=append",
        "--output=%x-%j.log",
    )
    return "".join(f"#SBATCH {option}\n" for option in options)


def _meeting(job: Job) -> str:
    return (
        f'LAUNCH="${{LAUNCH:-{job.folder}}}"\n'
        'HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"\n'
        'PORT="${PORT:-$((20000 + SLURM_JOB_ID % 10000))}"\n'
        'JOB_ID="$SLURM_JOB_ID"\n'
        "export HEAD PORT JOB_ID\n\n"
    )


def _stop(launch: Launch) -> str:
    if launch.ranks is None:
        body = '  echo "the time is nearly up: queued again, from the newest checkpoint"\n'
    else:
        body = (
            '  echo "the time is nearly up: saving, then queued again"\n'
            '  srun --overlap --nodes=1 --ntasks=1 --nodelist="$HEAD" '
            f"pkill -TERM -f -- '{launch.ranks}' || true\n"
        )
    ending = "" if launch.ranks is not None else '  exec scontrol requeue "$SLURM_JOB_ID"\n'
    return (
        "stopping=\n# shellcheck disable=SC2317,SC2329 # the trap calls it\n"
        f"stop() {{\n  stopping=1\n{body}{ending}}}\ntrap stop USR1\n\n"
    )


def _start(launch: Launch) -> str:
    return (
        "# One task a node, with all of its cores; torchrun starts a process a device.\n"
        'srun --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 \\\n'
        f'  bash "$LAUNCH/{launch.script}" "$@" &\n'
        "ranks=$!\n"
    )


def _end() -> str:
    """A signal ends a wait early; what counts is how the ranks end."""
    return (
        "status=0\n"
        'wait "$ranks" || status=$?\n'
        'while [ -n "$stopping" ] && kill -0 "$ranks" 2>/dev/null; do\n'
        "  status=0\n"
        '  wait "$ranks" || status=$?\n'
        "done\n"
        'if [ -n "$stopping" ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi\n'
        'exit "$status"\n'
    )
