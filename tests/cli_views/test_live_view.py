"""The live view on a real pseudo-terminal, watched through a small screen that obeys the codes it is sent."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from fasttrain.cli.live_view import LiveView
from fasttrain.cli.plain_view import PlainView
from fasttrain.cli.views import open_view

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"

RUN = """
import sys, time
from fasttrain.cli.views import open_view
from fasttrain.telemetry.events import *
view = open_view(sys.stderr)
try:
    view.on_event(RunStarted("runs/x", "hippocampus", "cuda:0", 60, 40, 208, 52, (("amp", "bf16", "[fast]"),)))
    view.on_event(Progress("caching", 100, 208))
    time.sleep(0.4)
    scores = ValidationFigures(0.871, {"anterior": 0.881, "posterior": 0.861}, {}, hd95=1.8)
    view.on_event(EpochEnded(2, 80, 9.0, 0.45, 2e-3, 54.2, 0.03, 0.93, 41.2, scores, True, 130.0))
    view.on_event(FirstStep(4.5, {"import": 2.71, "first_step": 1.8}))
    view.on_event(StepLogged(3, 90, 10, 0.412, 2.1e-3, 54.2, 0.03, 0.93, 41.2, 121.0))
    view.on_event(Message("case a[1].nii was skipped", "warning"))
    print("data for a script")
    print("from a library", file=sys.stderr)
    time.sleep(0.6)
    BODY
finally:
    view.close()
    view.close()
"""


class Screen:
    """What a terminal of that width shows: enough of its codes for what rich sends, anything else is an error."""

    def __init__(self, columns: int) -> None:
        self.columns, self.row, self.column, self.lines, self.cursor_shown = columns, 0, 0, [""], True

    def feed(self, text: str) -> None:
        for code, char in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|(.)", text, re.DOTALL):
            if code:
                self._obey(code)
            elif char == "\r":
                self.column = 0
            elif char == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            else:
                assert char != "\x1b"
                if self.column == self.columns:
                    self.feed("\n")
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
                self.column += 1

    def _obey(self, code: str) -> None:
        if code in (HIDE, SHOW):
            self.cursor_shown = code == SHOW
        elif code == "\x1b[2K":
            self.lines[self.row] = ""
        elif code.endswith("A"):
            self.row -= int(code[2:-1])
            assert self.row >= 0
        else:
            assert code.endswith("m"), code

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def watch(body: str = "pass", columns: int = 60, **environ: str) -> tuple[Screen, str, subprocess.Popen]:
    """Runs RUN with a pseudo-terminal as stderr only; returns the screen, all that was sent, and the process, ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN.replace("BODY", body)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**kept, "TERM": "xterm-256color", **environ},
    )
    os.close(theirs)
    sent, end = b"", time.monotonic() + 30
    while time.monotonic() < end:
        if not select.select([ours], [], [], 0.2)[0]:
            continue
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
        sent += part
    os.close(ours)
    process.wait(timeout=10)
    screen = Screen(columns)
    screen.feed(sent.decode())
    return screen, sent.decode(), process


@pytest.mark.parametrize("columns", [60, 140])
def test_figures_of_a_run_fit_and_the_cursor_comes_back(columns: int) -> None:
    screen, sent, process = watch(
        "view.on_event(RunEnded('done', None, 0, 'dice', 0.88, 43, 242.0, 'runs/x'))", columns
    )
    assert process.returncode == 0
    assert process.stdout is not None
    assert process.stdout.read() == b"data for a script\n"
    assert sent.count(HIDE) >= 1
    assert screen.cursor_shown
    words = " ".join(screen.text.replace("\N{NO-BREAK SPACE}", " ").split())
    for figure in (
        *("epoch 3/60", "10/40", "step 90", "loss 0.412", "lr 2.1e-3", "54.2 patches/s", "waiting 3%"),
        *("GPU 93%, 41.2 GiB", "left 2 min", "dice 0.871", "best 0.871 in epoch 2", "hd95 1.8 mm", "anterior 0.88"),
        *("posterior 0.86", "amp: bf16 ([fast])", "warning: case a[1].nii was skipped", "from a library"),
        "first step after 4.5 s: import 2.7, first step 1.8",
        "done after 4 min: best dice 0.8800 in epoch 43; run folder runs/x",
    ):
        assert figure in words, figure
    assert words.count("epoch 3/60") == 1, "the block is drawn over itself, not once more below"
    assert "caching" not in words
    assert "caching" in sent


def test_it_draws_at_most_four_times_a_second() -> None:
    drawing = "for n in range(400): view.on_event(StepLogged(3, n, n % 40, 0.4, 1e-3, 50.0, 0.0)); time.sleep(0.005)"
    began = time.monotonic()
    _, sent, _ = watch(drawing)
    seconds = time.monotonic() - began
    # Besides the refreshes: one drawing for each line printed above the block (5) and one at the end.
    assert sent.count("epoch 3/60") <= 4 * seconds + 6
    assert sent.count("epoch 3/60") >= 5


@pytest.mark.parametrize(
    ("body", "code"), [("raise RuntimeError('a bug')", 1), ("raise KeyboardInterrupt", -2), ("sys.exit(7)", 7)]
)
def test_the_cursor_comes_back_after_any_ending(body: str, code: int) -> None:
    screen, sent, process = watch(body)
    assert process.returncode == code
    assert sent.rindex(SHOW) > sent.rindex(HIDE)
    assert screen.cursor_shown


def test_a_terminal_resized_midway_is_drawn_at_its_new_width() -> None:
    resize = "import fcntl, struct, termios; fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 40, 0, 0)); "
    _, sent, process = watch(resize + "time.sleep(0.6)", columns=60)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", sent)
    bars = [len(line) for line in re.split(r"[\r\n]+", plain) if line.startswith("epoch 3/60")]
    assert max(bars) == 60
    assert bars[-1] == 40


def test_no_color_is_honoured_and_a_dumb_terminal_gets_plain_lines() -> None:
    colours = re.compile(r"\x1b\[[\d;]*3[0-7]|\x1b\[38")
    assert colours.search(watch()[1])
    _, plain, _ = watch(NO_COLOR="1")
    assert HIDE in plain
    assert not colours.search(plain)
    _, dumb, _ = watch(TERM="dumb")
    assert "\x1b" not in dumb
    assert "epoch 2/60  step 80" in dumb


def test_a_lost_terminal_silences_the_view_and_not_the_run() -> None:
    # A print of the script's own to a lost terminal fails with or without a view.
    script = RUN.replace('print("from a library", file=sys.stderr)', "").replace(
        "BODY", "time.sleep(1); view.on_event(Message('unseen')); print('went on')"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    os.read(ours, 100)
    os.close(ours)
    out, _ = process.communicate(timeout=30)
    assert b"went on" in out
    assert process.returncode == 0


def test_the_choice_of_view(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        for stream in (file, io.StringIO()):
            view = open_view(stream, {"TERM": "xterm"})
            assert isinstance(view, PlainView)
            view.close()
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        for environ, kind in (({"TERM": "xterm"}, LiveView), ({"TERM": "dumb"}, PlainView), ({}, PlainView)):
            view = open_view(terminal, environ)
            assert isinstance(view, kind)
            view.close()
    os.close(ours)


def test_the_live_view_loads_no_torch() -> None:
    script = "import sys, fasttrain.cli.live_view; assert not {'torch', 'monai', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
