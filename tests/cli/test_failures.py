"""Training that is cut short: what is said and left, and that the next start goes on exactly."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_runs import (
    FULLBORE,
    PATIENCE_S,
    flags,
    metrics,
    ran,
    ranks_of,
    started,
    wait_for_steps,
)

pytestmark = [pytest.mark.slow(35), pytest.mark.timeout(240)]
STEPS = 24


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process of a test outlives it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def options(folder: Path, run: Path, **changes: object) -> list[str]:
    return flags(folder, save=run, train_iters=STEPS, save_interval=8, **changes)


def figures(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, of steps that were done twice the later ones."""
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in metrics(run)}


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks to which nothing happened."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    status, said = ran([*FULLBORE, "train", *options(folder, run), "-p", "2"], timeout_s=150)
    assert status == 0, said
    return run


def test_a_killed_rank_is_named_and_the_next_start_goes_on_to_the_bit(
    folder: Path, undisturbed: Path, tmp_path: Path, fullbore: Callable[..., Any]
) -> None:
    run = tmp_path / "run"
    with started([*FULLBORE, "train", *options(folder, run), "-p", "2"]) as process:
        wait_for_steps(process, run, 10)
        ranks = ranks_of(process)
        os.kill(max(ranks, key=lambda child: child.create_time()).pid, signal.SIGKILL)
        struck_s = time.monotonic()
        said, _ = process.communicate(timeout=PATIENCE_S)
        print(f"killed: over after {time.monotonic() - struck_s:.1f} s")
        assert process.returncode == 2, said
        assert not [child for child in ranks if child.is_running()]
    told = re.findall(r"^fullbore: (.*)$", said, re.MULTILINE)
    assert len(told) == 1, said
    assert re.match(r"rank [01] failed in (.* )?step \d+: it was killed by SIGKILL", told[0])
    assert "last actions of every rank" in said and "Traceback" not in said
    record = re.search(r"^flight records: (.*)$", said, re.MULTILINE)
    if record:  # it was in mid-step, not writing a checkpoint
        assert len(list(Path(record[1]).glob("rank*.json"))) == 1

    status, said = ran(
        [*FULLBORE, "train", *options(folder, run, load=run), "-p", "2"], timeout_s=150
    )
    assert status == 0, said
    assert figures(run) == figures(undisturbed)
    again = fullbore("train", *options(folder, tmp_path / "again", load=run))
    assert again.status == 0
    assert f"nothing is left to train: the checkpoint is of step {STEPS}" in again.out


# -- two hosts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A network namespace that stands for a host."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def pids(self) -> list[int]:
        said = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in said.stdout.split()]

    def kill(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces with a wire between them; skips where the machine does not allow that."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts need network namespaces, and there is no `ip` here")
    here = tuple(Host(f"fullbore-{os.getpid()}-{n}", f"10.77.0.{n}") for n in (1, 2))
    try:
        try:
            for host in here:
                ip("netns", "add", host.namespace)
                ip("-n", host.namespace, "link", "set", "lo", "up")
            one, two = (host.namespace for host in here)
            ip(*f"link add wire netns {one} type veth peer name wire netns {two}".split())
            for host in here:
                ip(*f"-n {host.namespace} addr add {host.address}/24 dev wire".split())
                ip(*f"-n {host.namespace} link set wire up".split())
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield here  # type: ignore[misc]
    finally:
        for host in here:
            with suppress(subprocess.CalledProcessError):
                host.kill()
            with suppress(OSError):
                ip("netns", "del", host.namespace)


@pytest.mark.parametrize("end", ["killed", "cut off"])
def test_of_two_hosts_one_dies_and_the_run_goes_on_elsewhere(
    hosts: tuple[Host, Host],
    end: str,
    folder: Path,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    run, (first, second) = tmp_path / "run", hosts
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(
                    host.command(*_torchrun(host, first), *_patient(options(folder, run))),
                    env={"GLOO_SOCKET_IFNAME": "wire"},
                )
            )
            for host in hosts
        ]
        wait_for_steps(processes[0], run, 10)
        struck_s = time.monotonic()
        if end == "killed":
            second.kill()
        else:
            ip("-n", second.namespace, "link", "set", "wire", "down")
        said, _ = processes[0].communicate(timeout=PATIENCE_S)
        print(f"{end}: the other host is done after {time.monotonic() - struck_s:.1f} s")
        assert processes[0].returncode not in (0, None)
        second.kill()
    assert re.search(r"^fullbore: rank 1 failed in (.* )?step \d+: ", said, re.MULTILINE), said
    why = "the process died without a word" if end == "killed" else "no sign of life within"
    assert why in said and said.count("fullbore: ") == 1
    if end == "cut off":
        assert "has stood still for" in said and "for rank 1" in said

    replicas = "1" if end == "killed" else "2"
    again = [*FULLBORE, "train", *options(folder, run, load=run), "-p", "1"]
    status, said = ran([*again, "--data-parallel-size", replicas], timeout_s=150)
    assert status == 0, said
    progress = json.loads((run / f"iter_{STEPS:07d}" / "run.json").read_text())
    assert progress["ranks"] == progress["replicas"] == int(replicas)
    wanted, found = figures(undisturbed), figures(run)
    assert list(found) == list(range(1, STEPS + 1))
    for step, pair in wanted.items():
        assert found[step] == pytest.approx(pair, rel=1e-4)


def _torchrun(host: Host, first: Host) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
        *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two-hosts"),
        *("--rdzv-endpoint", f"{first.address}:29533", "--local-addr", host.address),
        *("--rdzv-conf", f"is_host={str(host is first).lower()}"),
        *("-m", "fullbore", "train", "-p", "2"),
    ]


def _patient(given: list[str]) -> list[str]:
    return [*given, "--stall-timeout", "2", "--distributed-timeout-minutes", "0.12"]
