"""Signals from the first moment of a command to its last: one sentence or none, the right exit code, never a traceback."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fasttrain.cli import main

ENDS = {
    signal.SIGINT: (130, "Ctrl-C"),
    signal.SIGTERM: (143, "SIGTERM"),
    signal.SIGUSR1: (143, "SIGUSR1"),
    signal.SIGHUP: (143, "SIGHUP"),
}
MODULE = [sys.executable, "-m", "fasttrain"]
SCRIPT = [str(Path(sys.executable).with_name("fasttrain"))]
EARLIER = re.compile(
    r"Fatal Python error: init_"
    r"|\A(?!.* in run\n).*\nKeyboardInterrupt\n\Z"
    r"|\A.* in run\n +(def run|alone|if alone|end_on_signals)[^\n]*\n[ ^~]*\n?KeyboardInterrupt\n\Z",
    re.DOTALL,
)
ENTRIES = [
    pytest.param(MODULE, id="module"),
    pytest.param(
        SCRIPT,
        id="script",
        marks=pytest.mark.skipif(
            not os.path.exists(SCRIPT[0]), reason="fasttrain is not installed beside this interpreter"
        ),
    ),
]


@contextmanager
def started(command: list[str], folder: Path, **more: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=folder, **more
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def slow(tmp_path: Path) -> dict[str, str]:
    """An environment in which a package that every command needs says when it is being loaded, and takes a minute for it."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "typer.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path / 'slow'}:{Path(main.__file__).parents[2]}"}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("number", list(ENDS))
def test_a_signal_while_modules_are_loaded_is_one_sentence(
    entry: list[str], number: signal.Signals, slow: dict[str, str], tmp_path: Path
) -> None:
    with started([*entry, "train", "-r", "demo"], tmp_path, env=slow) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    code, name = ENDS[number]
    assert (process.returncode, err, out) == (code, f"fasttrain: stopped by {name}\n", "")


def test_a_ctrl_c_that_the_shell_has_ignored_stays_ignored(slow: dict[str, str], tmp_path: Path) -> None:
    with started(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *MODULE, "--help"], tmp_path, env=slow) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[1] == "fasttrain: stopped by SIGTERM\n"
    assert process.returncode == 143


@pytest.mark.parametrize("number", list(ENDS))
@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["trian"], 2)])
def test_a_signal_after_all_is_done_changes_nothing(
    number: signal.Signals, arguments: list[str], code: int, tmp_path: Path
) -> None:
    late = (
        "import atexit, sys, time\n"
        "from fasttrain.cli import main\n"
        "carried_out = main._guarded\n"
        # As torch does, which is loaded by commands
        "late = lambda: (print('late', flush=True), time.sleep(60))\n"
        "main._guarded = lambda *given: (atexit.register(late), carried_out(*given))[1]\n"
        "main.run()\n"
    )
    with started([sys.executable, "-c", late, *arguments], tmp_path) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "late\n":
            pass
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err.count("\n")) == (code, int(code > 0))
    assert "stopped by" not in err


def test_ctrl_c_leaves_out_what_on_finish_asks_for(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from fasttrain.cli.main import run\n"
        "from fasttrain.cli.on_finish import ON_FINISH\n"
        "ON_FINISH.ask('echo finishing; exec sleep 60')\n"
        "run()\n"
    )
    with started([sys.executable, "-c", program, "--version"], tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "finishing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "fasttrain: --on-finish was interrupted\n")


@pytest.mark.parametrize("number", list(ENDS))
def test_what_unwinds_ends_all_that_it_started(number: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "from fasttrain.cli.interruption import Unwound, end_on_signals, unwinding\n"
        "end_on_signals()\n"
        "try:\n"
        "    with unwinding():\n"
        "        subprocess.run(['sh', '-c', 'setsid sleep 60 & echo begun; sleep 60'])\n"
        "except Unwound as signalled:\n"
        "    print(signalled.name, flush=True)\n"
        "    sys.exit(signalled.exit_code)\n"
    )
    with started([sys.executable, "-c", program], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.2)
        process.send_signal(number)
        # What was left running would hold the pipes open
        out, err = process.communicate(timeout=30)
    code, name = ENDS[number]
    assert (process.returncode, out, err) == (code, f"{name}\n", "")


def test_a_second_signal_ends_what_does_not_unwind(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from fasttrain.cli.interruption import end_on_signals, unwinding\n"
        "end_on_signals()\n"
        "with unwinding():\n"
        "    while True:\n"
        "        try:\n"
        "            print('again', flush=True)\n"
        "            time.sleep(60)\n"
        "        except BaseException:\n"
        "            pass\n"
    )
    with started([sys.executable, "-c", program], tmp_path) as process:
        assert process.stdout is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            assert process.stdout.readline() == "again\n"
            process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "fasttrain: stopped by SIGTERM\n")


def test_a_signal_while_what_is_half_made_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, shutil, signal\n"
        "from pathlib import Path\n"
        "from fasttrain.cli import commands, main\n"
        "from fasttrain.cli.interruption import unwinding\n"
        "from fasttrain.whole_files import half_made\n"
        "removes = shutil.rmtree\n"
        "def signalled(*given, **more):\n"
        "    shutil.rmtree = removes\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "def command(*given, **more):\n"
        "    with unwinding(), half_made(Path('bundle.part')):\n"
        "        os.makedirs('bundle.part/configs')\n"
        "        shutil.rmtree = signalled\n"
        "commands.tree = lambda: command\n"
        "main.run()\n"
    )
    with started([sys.executable, "-c", program], tmp_path) as process:
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "fasttrain: stopped by SIGTERM\n")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_when_all_is_made_changes_nothing_and_a_second_ends_it(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from fasttrain.cli.interruption import end_on_signals, unwinding\n"
        "end_on_signals()\n"
        "with unwinding() as made:\n"
        "    made()\n"
        "    print('made', flush=True)\n"
        "    for _ in range(int(sys.argv[1])):\n"
        "        time.sleep(0.02)\n"
        "print('done')\n"
    )
    for numbers, seconds, expected in (
        ([signal.SIGTERM], 1, (0, "done\n", "")),
        ([signal.SIGTERM, signal.SIGINT], 60, (130, "", "fasttrain: stopped by Ctrl-C\n")),
    ):
        with started([sys.executable, "-c", program, str(50 * seconds)], tmp_path) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "made\n"
            for number in numbers:
                process.send_signal(number)
                time.sleep(0.2)
            out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == expected


@pytest.mark.parametrize("number", list(ENDS))
def test_what_ends_at_once_leaves_no_half_of_a_file(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("former")
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from fasttrain.cli.interruption import end_on_signals\n"
        "from fasttrain.whole_files import half_made, write_whole\n"
        "end_on_signals()\n"
        "with half_made(Path('bundle.part')), write_whole(Path('report.html')) as stream:\n"
        "    os.makedirs('bundle.part/configs')\n"
        "    stream.write(b'half')\n"
        "    stream.flush()\n"
        # A forked process ends by itself, and the files are not its own
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.kill(os.getpid(), int(sys.argv[1]))\n"
        "    os.waitpid(child, 0)\n"
        "    print(len(os.listdir()), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with started([sys.executable, "-c", program, str(int(number))], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "3\n"
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == ENDS[number][0]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "former"


def test_a_caller_in_python_keeps_its_own_answers(capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in ENDS]
    with pytest.raises(SystemExit):
        main.run(["--version"])
    assert [signal.getsignal(number) for number in ENDS] == before


def ended_early(command: list[str], number: signal.Signals, seconds: float, folder: Path) -> str:
    """How a command ended that got a signal so many seconds after its start; raises AssertionError where it ended badly."""
    with started(command, folder) as process:
        time.sleep(seconds)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    code, _ = ENDS[number]
    told = f"after {seconds:.3f} s: {process.returncode}, {err!r}"
    if number == signal.SIGINT and re.search(EARLIER, err):
        # Before the interpreter had come to the first line of `run`, which nothing of ours can change
        return "before"
    assert "Traceback" not in err, told
    if process.returncode in (0, -number):
        # In silence by the signal itself (130 and 143 to a shell) where the interpreter does not answer any: at its very ends
        assert not err, told
        return "done" if out else "before"
    assert process.returncode == code, told
    assert re.fullmatch(r"(fasttrain: [^\n]+\n)?", err), told
    return "stopped"


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_at_random_moments_of_the_start(entry: list[str], number: signal.Signals, tmp_path: Path) -> None:
    draw = random.Random(f"{number} {entry[1:]}")
    ends = []
    for arguments in (["--help"], ["recipes", "list"], ["train", "-r", "demo"], ["doctor"]):
        for most in (0.15, 0.6):
            ends.append(ended_early([*entry, *arguments], number, draw.uniform(0.02, most), tmp_path))
    assert ends.count("stopped") >= 2, ends
    assert not (tmp_path / "runs").exists()
