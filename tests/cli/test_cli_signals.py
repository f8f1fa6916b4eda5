"""Signals to a command at work: whoever looks at them ends in order, whoever does not is ended, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BUSY = """
import hashlib, os, signal, subprocess, sys, threading, time
from fasttrain.cli.signals import stop_on_signals

def busy(rounds):
    # In C, where Python answers no signal; another thread may work meanwhile
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", rounds)

def say(*words):
    print(*words, flush=True)
"""


def started(program: str, folder: Path, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", BUSY + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def ended(process: subprocess.Popen[str], *numbers: signal.Signals, apart: float = 0.0) -> tuple[int, str, str, float]:
    """Once it has said a line: exit code, output, messages, and seconds since the last signal."""
    assert process.stdout is not None
    try:
        said, sent = process.stdout.readline(), time.monotonic()
        for number in numbers:
            process.send_signal(number)
            sent = time.monotonic()
            time.sleep(apart)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, said + out, err, time.monotonic() - sent


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_cannot_look_is_saved_and_ended_at_rest_with_all_its_processes(tmp_path: Path) -> None:
    process = started(
        """
with stop_on_signals() as stop:
    stop.begun, stop.goes_on_with = True, "fasttrain resume x"
    shell = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
    with stop.at_rest(lambda: open("saved", "w").write(str(stop.reason))):
        say(shell.pid, int(shell.stdout.readline()))
        busy(10**9)
""",
        tmp_path,
    )
    code, out, err, seconds = ended(process, signal.SIGTERM)
    assert code == 143
    assert (
        err == "fasttrain: stopped where it was, with all that it had trained saved; go on with: fasttrain resume x\n"
    )
    assert (tmp_path / "saved").read_text() == "SIGTERM"
    assert seconds < 3.5
    time.sleep(0.1)
    assert not any(alive(int(pid)) for pid in out.split())


def test_what_cannot_be_saved_is_told_with_exit_code_6(tmp_path: Path) -> None:
    process = started(
        """
from fasttrain.errors import StorageError

def full():
    raise StorageError("no room")

with stop_on_signals() as stop:
    stop.begun = True
    with stop.at_rest(full):
        say("here")
        busy(10**9)
""",
        tmp_path,
    )
    code, _, err, _ = ended(process, signal.SIGTERM)
    assert code == 6
    assert err == ("fasttrain: stopped where it was; nothing newer than the last checkpoint could be saved: no room\n")


def test_a_second_signal_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    process = started(
        """
from pathlib import Path
from fasttrain.whole_files import write_whole
with stop_on_signals() as stop, write_whole(Path("prediction.nii.gz")) as stream:
    stop.begun = True
    say(len(os.listdir()))
    while True:
        time.sleep(0.1)
""",
        tmp_path,
    )
    code, out, err, _ = ended(process, signal.SIGINT, signal.SIGINT, apart=0.5)
    assert (code, out, err) == (130, "1\n", "fasttrain: stopped at once, by a second signal\n")
    assert list(tmp_path.iterdir()) == []


def test_what_changes_its_state_is_waited_for(tmp_path: Path) -> None:
    """Longer than the grace; once the scope at rest is over there is no ending from beside any more."""
    process = started(
        """
with stop_on_signals() as stop:
    stop.begun = True
    with stop.at_rest():
        pass
    say("busy")
    begun = time.monotonic()
    while time.monotonic() - begun < 2.5:
        busy(200_000)
    say("looked", stop.reason)
    sys.exit(stop.exit_code)
""",
        tmp_path,
    )
    code, out, err, seconds = ended(process, signal.SIGUSR1)
    assert (code, out, err) == (143, "busy\nlooked SIGUSR1\n", "")
    assert seconds > 2


@pytest.mark.parametrize("apart", [0.0, 0.5])
def test_a_signal_to_process_and_group_is_one_and_a_later_one_is_a_second(apart: float, tmp_path: Path) -> None:
    process = started(
        """
with stop_on_signals() as stop:
    stop.begun = True
    say("here")
    begun = time.monotonic()
    while time.monotonic() - begun < 1.5:
        busy(20_000)
    say("in order")
    sys.exit(stop.exit_code)
""",
        tmp_path,
    )
    code, out, err, _ = ended(process, signal.SIGTERM, signal.SIGINT, apart=apart)
    if apart:
        assert (code, out, err) == (130, "here\n", "fasttrain: stopped at once, by a second signal\n")
    else:
        # Of two that come together the system may deliver either first
        assert (code in (130, 143), out, err) == (True, "here\nin order\n", "")


def test_the_first_process_of_a_container_answers_too(tmp_path: Path) -> None:
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("a namespace of processes is not permitted here")
    process = started(
        """
assert os.getpid() == 1
with stop_on_signals() as stop:
    stop.begun = True
    child = subprocess.Popen(["sleep", "300"])
    with stop.at_rest():
        say("here")
        busy(10**9)
""",
        tmp_path,
        prefix,
    )
    assert process.stdout is not None
    process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert err.startswith("fasttrain: stopped where it was")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    process = started(
        """
signal.signal(signal.SIGINT, signal.SIG_IGN)
with stop_on_signals() as stop:
    stop.begun = True
    say("here")
    time.sleep(0.5)
    say(stop.asked)
""",
        tmp_path,
    )
    code, out, _, _ = ended(process, signal.SIGINT)
    assert (code, out) == (0, "here\nFalse\n")


def test_a_forked_child_answers_for_itself_alone(tmp_path: Path) -> None:
    """A signal to a child, which shares the parent's descriptors, is none to the parent."""
    process = started(
        """
with stop_on_signals() as stop:
    stop.begun = True
    child = os.fork()
    if child == 0:
        time.sleep(60)
    say("here")
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    time.sleep(0.5)
    say(stop.asked)
    os.kill(child, signal.SIGKILL)
    say(os.waitpid(child, 0)[1])
""",
        tmp_path,
    )
    code, out, _, _ = ended(process)
    assert (code, out) == (0, "here\nFalse\n9\n")


SLOW_TO_UNLOAD = """
import os, sys, time
from fasttrain.cli.main import run

class Slow:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(2, b"unloading\\n")
        sleep(0.5)

kept = Slow()
sys.argv = ["fasttrain", *sys.argv[1:]]
run()
"""


@pytest.mark.parametrize(("words", "code"), [(["recipes", "list"], 0), (["recipes", "show", "dem"], 2)])
def test_a_signal_while_the_interpreter_unloads_takes_no_exit_code_away(words: list[str], code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_UNLOAD, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line == "unloading\n":
            process.send_signal(signal.SIGTERM)
    assert process.wait(20) == code
