"""Errors, exit statuses and the frame of the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fullbore import __version__
from fullbore.cli import main as cli


def test_version(fullbore):
    assert fullbore("--version").out == f"fullbore {__version__}\n"


def test_help_lists_every_command_with_its_summary(fullbore):
    said = fullbore("--help").out
    for command in cli.COMMANDS:
        assert f"\n  {command.__name__} " in said
    assert "..." not in said.partition("Commands:")[2], "a summary is too long for a line"


def test_help_groups_the_options_of_a_command(fullbore):
    said = fullbore("simulate", "--help").out
    order = ["\nArguments:", "\nSchedule:", "  -p,", "\nCosts, in seconds", "\nOptions:", "--json"]
    assert [said.index(part) for part in order] == sorted(said.index(part) for part in order)


def test_help_writes_megatrons_flags_whole(fullbore):
    said = fullbore("simulate", "--help").out
    for flag in (
        "-p, --pipeline-model-parallel-size",
        "-m, --num-microbatches",
        "-v, --num-virtual-stages-per-pipeline-rank, --virtual-stages",
        "-g, --microbatch-group-size-per-virtual-pipeline-stage",
    ):
        assert flag in said


def test_no_arguments_show_the_help(fullbore):
    assert "Usage: fullbore" in "".join((ran := fullbore()).out + ran.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "nosuch", "-p", 2, "-m", 2], "no schedule or CSV file is called 'nosuch'"),
        (["simulate", "gpipe", "-p", 2], "gpipe needs -p (pipeline ranks) and -m (microbatches)"),
        (["simulate", "gpipe", "-p", 0, "-m", 2], "ranks"),
        (["simulate", "gpipe", "-p", 2, "-m", 2, "-v", 2], "virtual_stages"),
        (["simulate", "interleaved", "-p", 4, "-m", 8, "-v", 0], "virtual_stages"),
        (["simulate", "interleaved", "-p", 4, "-m", 8, "-g", 3], "4"),
        (["simulate", "gpipe", "-p", 2, "-m", 2, "--forward-s", -1], "forward_s"),
        (["simulate", "gpipe", "-p", 2, "-m", 2, "--input-grad-s", 1], "weight_grad_s"),
        (["simulate", "missing.csv"], "cannot read missing.csv"),
        (["simulate", "gpipe", "-p", 2, "-m", 2, "--costs", "missing.json"], "missing.json"),
        (["simulate", "gpipe", "-p", 2, "-m", 2, "--forward-s", 1e308], "not between 1e-12 s"),
        (["show", "gpipe", "-p", 2, "-m", 2, "--backward-s", 1e300, "-o", "a.pftrace"], "1e+09 s"),
        (
            ["simulate", "gpipe", "--backward-s", 2, "--input-grad-s", 1, "-p", 2, "-m", 2],
            "--backward-s is the sum",
        ),
        (["show", "gpipe", "-p", 2, "-m", 2, "-o", "-", "--json"], "leave one of the two out"),
        (["show", "gpipe", "-p", 2, "-m", 2, "-o", "-", "--hop-s", 1], "leave --hop-s out"),
        (["show", "gpipe", "-p", 2, "-m", 2, "-o", "a.csv", "--costs", "x"], "leave --costs out"),
        (["show", "gpipe", "-p", 2, "-m", 2, "--communication"], "is for CSV"),
        (["show", "gpipe", "-p", 2, "-m", 2, "-o", "picture.gif"], ".svg, .html"),
        (["show", "gpipe", "-p", 2, "-m", 2, "-o", "no/such/folder.svg"], "cannot write"),
        (["check", "missing.csv"], "cannot read missing.csv"),
    ],
)
def test_bad_input_is_one_clear_message_and_status_2(
    fullbore, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    ran = fullbore(*arguments)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("fullbore: ")
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_an_unknown_option_is_refused_with_status_2(fullbore):
    ran = fullbore("simulate", "gpipe", "--no-such-option")
    assert ran.status == 2
    assert "No such option" in ran.err


def _start(*arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fullbore", *arguments], stderr=subprocess.PIPE, **options
    )


def test_a_closed_pipe_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    child = _start("show", "gpipe", "-p", "64", "-m", "256", "-o", "-", stdout=write)
    os.close(write)
    _, said = child.communicate(timeout=50)
    assert child.returncode != 0
    assert b"Traceback" not in said
    assert b"Exception" not in said


def test_ctrl_c_exits_with_130_and_no_traceback(tmp_path):
    fifo = tmp_path / "schedule.csv"
    os.mkfifo(fifo)  # reading it blocks until somebody writes, so the command surely still runs
    child = _start("check", str(fifo), stdout=subprocess.DEVNULL)
    writer = _open_when_read(fifo, child)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=50)
    os.close(writer)
    assert child.returncode == 130
    assert b"Traceback" not in said


def _open_when_read(fifo, child: subprocess.Popen) -> int:
    for _ in range(2000):
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            assert child.poll() is None, "the command ended early"
            time.sleep(0.01)
    child.kill()
    raise AssertionError("the command never opened its file")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a Linux device")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_told_with_status_2(unbuffered):
    with open("/dev/full", "wb") as full:
        child = _start("schedules", stdout=full, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
        _, said = child.communicate(timeout=50)
    assert child.returncode == 2
    assert said == b"fullbore: cannot write the output: No space left on device\n"


def test_a_reader_that_left_at_once_is_no_error():
    read, write = os.pipe()
    os.close(read)
    child = _start("schedules", stdout=write)
    os.close(write)
    _, said = child.communicate(timeout=50)
    assert (child.returncode, said) == (1, b"")


def test_a_terminal_that_knows_ascii_only_gets_question_marks():
    child = _start(
        *("show", "interleaved", "-p", "2", "-m", "2"),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    printed, said = child.communicate(timeout=50)
    assert (child.returncode, said) == (0, b"")
    assert printed.startswith(b"interleaved: 2 ranks ? 2 stages")


INTERRUPTED = """
import os, signal, sys
import fullbore.__main__ as command

class Interrupts:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts)
sys.argv[1:] = ["simulate", "gpipe", "-p", "2", "-m", "2"]
command.run()
"""


@pytest.mark.parametrize("name", ["fullbore.cli.main", "typer", "fullbore.sim.engine"])
def test_ctrl_c_is_quiet_from_the_first_moment(name):
    """While the command line is loaded, while its libraries are, and while it works."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(name=name)], capture_output=True, timeout=50
    )
    assert ended.returncode == 130
    assert b"Traceback" not in ended.stderr
