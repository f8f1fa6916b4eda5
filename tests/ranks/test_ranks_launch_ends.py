"""`--gpus N`: what the process that started the ranks makes of their ends, an exit code and at most one sentence."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fasttrain.cli import launching
from fasttrain.cli.several import Several
from fasttrain.errors import LostRankError, OtherRankError, RecipeError
from fasttrain.machine.own_launcher import VARIABLE


class _Failure:
    def __init__(self, local_rank: int, exitcode: int, timestamp: int = 0) -> None:
        self.local_rank, self.exitcode, self.timestamp = local_rank, exitcode, timestamp


def _ended(failures: dict[int, int], **notes: object) -> launching._Launch:
    launch = launching._Launch(4)
    error = RuntimeError("failed")
    error.failures = {rank: _Failure(rank, code, rank) for rank, code in failures.items()}  # type: ignore[attr-defined]
    launch._ended.append(error)
    launch._notes.tell(**notes)
    return launch


def test_the_end_of_the_ranks_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert _ended({2: 5, 0: 3})._code() == 3
    assert _ended({2: 5, 1: 6}, said=True)._code() == 6
    with pytest.raises(
        LostRankError, match=r"rank 2 was killed by SIGKILL; the system .* `fasttrain resume /r --gpus 4` goes on"
    ):
        _ended({2: -9}, run="/r", lost=["rank 2 on h ended without a word"])._code()
    with pytest.raises(LostRankError, match="rank 3 was killed by SIGSEGV"):
        _ended({3: -11})._code()
    with pytest.raises(LostRankError, match="not been heard of"):
        _ended({0: 137, 2: -9}, lost=["rank 2 has not been heard of"], silent=True)._code()
    with pytest.raises(OtherRankError, match="no such card") as caught:
        _ended({1: 4}, lost=["no such card"])._code()
    assert caught.value.exit_code == 4
    stopped = _ended({0: 143, 1: 143}, lost=["rank 0 ended"])
    stopped._asked = signal.SIGTERM
    assert stopped._code() == 143
    frozen = _ended({0: 137, 1: -9}, lost=["rank 1 has not been heard of"], silent=True)
    frozen._asked = signal.SIGTERM
    with pytest.raises(LostRankError, match="rank 1 has not been heard of"):
        frozen._code()


@pytest.mark.parametrize(("command", "way"), [("tune-batch", "leave torchrun out, and say --gpus 4"), ("check", "out")])
def test_a_command_that_works_alone_is_no_rank(command: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=rf"`fasttrain {command}` works in one process.*{way} \(RANK 0 of 4\)"):
        Several().begin([command])
    Several().begin(["train"])


@pytest.mark.parametrize("asked", [True, False])
def test_a_stop_before_the_first_rank_can_speak_is_told(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a batch system, which signals every process of a job at once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch = launching._Launch(2)
    environ = {**os.environ, VARIABLE: launch._notes.variable, "RANK": "0", "WORLD_SIZE": "2"}
    words = "import os, signal; from fasttrain.cli.interruption import end_on_signals; end_on_signals(); "
    ended = subprocess.run(
        [sys.executable, "-c", words + "os.kill(os.getpid(), signal.SIGTERM)"], env=environ, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (143, b"")
    error = RuntimeError("failed")
    error.failures = {0: _Failure(0, 143)}  # type: ignore[attr-defined]
    launch._ended.append(error)
    launch._asked = signal.SIGTERM if asked else None
    assert launch._code() == 143
    assert capsys.readouterr().err == "fasttrain: stopped by SIGTERM\n"
    # Where another failed before, and the launcher ended the first, that one is told
    error.failures[1] = _Failure(1, 4)  # type: ignore[attr-defined]
    launch._notes.tell(lost=["no such card"])
    launch._asked = None
    with pytest.raises(OtherRankError, match="no such card") as caught:
        launch._code()
    assert caught.value.exit_code == 4
    del error.failures[1]  # type: ignore[attr-defined]
    (launch._notes.folder / "lost.json").unlink()
    # One that is signalled with the word given on says nothing twice
    (launch._notes.folder / "unsaid").unlink()
    assert launch._code() == 143
    assert capsys.readouterr().err == ""


FROZEN_AT_THE_START = """
import os, signal, subprocess
from fasttrain.cli import launching

launching._SECONDS_FOR_A_FROZEN_ONE = 0.3
launch = launching._Launch(2)

def start():
    rank = subprocess.Popen(["sleep", "60"])
    os.kill(rank.pid, signal.SIGSTOP)
    launch._notes.tell(silent=True)
    print(rank.wait(), flush=True)

launch._start = start
launch.run()
"""


def test_a_frozen_rank_is_not_waited_for() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FROZEN_AT_THE_START], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.stdout == "-9\n", ended.stderr
