"""The plain view: lines a log file can hold, a heartbeat in silence, and a stream that may go away."""

import io
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from fasttrain.cli.plain_view import PlainView
from fasttrain.telemetry.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    FirstStep,
    Message,
    Progress,
    RunEnded,
    RunStarted,
    StepLogged,
    ValidationFigures,
)

STARTED = RunStarted(
    *("runs/hippocampus-1", "hippocampus", "cpu", 60, 40, 208, 52),
    decisions=(("amp", "bf16", "this CPU runs bf16 convolutions 2.1x faster"), ("compile", "off", "")),
)
SCORES = ValidationFigures(0.871, {"anterior": 0.881, "posterior": 0.861}, {"anterior": 52, "posterior": 52})
EPOCH = EpochEnded(3, 120, 9.5, 0.4121, 2.1e-3, 54.23, 0.031, validation=SCORES, seconds_left=121.0)
DONE = RunEnded("done", None, 0, "dice", 0.88374, 43, 242.0, "runs/hippocampus-1")
STOPPED = RunEnded(
    *("stopped", "SIGTERM", 143, "dice", 0.85, 2, 30.0, "runs/x"), resume_command="fasttrain resume runs/x"
)


def lines_of(*events: Event, heartbeat_seconds: float = 30.0) -> list[str]:
    stream = io.StringIO()
    view = PlainView(stream, heartbeat_seconds)
    for event in events:
        view.on_event(event)
    view.close()
    return stream.getvalue().splitlines()


def test_an_epoch_is_one_line() -> None:
    *_, line = lines_of(STARTED, EPOCH)
    assert line == (
        "epoch 3/60  step 120  loss 0.412  dice 0.871 (anterior 0.88, posterior 0.86)  lr 2.1e-3  "
        "54.2 patches/s  waiting 3%  left 2 min"
    )


def test_an_epoch_without_validation_on_a_gpu() -> None:
    (line,) = lines_of(
        EpochEnded(4, 160, 9.5, 0.4, 2e-3, 1280.0, 0.0, gpu_utilisation=0.934, gpu_gib=41.24, is_best=True)
    )
    assert (
        line == "epoch 4  step 160  loss 0.400  lr 2.0e-3  1280 patches/s  waiting 0%  GPU 93%, 41.2 GiB  best so far"
    )


def test_the_start_names_the_run_and_each_decision_with_its_reason() -> None:
    assert lines_of(STARTED) == [
        "hippocampus on cpu: 60 epochs of 40 steps, 208 training and 52 validation cases",
        "run folder: runs/hippocampus-1",
        "amp: bf16 (this CPU runs bf16 convolutions 2.1x faster)",
        "compile: off",
    ]


def test_the_first_step_tells_where_its_seconds_went() -> None:
    parts = {"import": 3.14, "device": 0.04, "check": 0.5, "read": 1.96, "first_step": 0.36}
    assert lines_of(FirstStep(6.0, parts)) == [
        "first step after 6.0 s: import 3.1, check 0.5, read 2.0, first step 0.4"
    ]


def test_the_last_line_tells_how_it_ended_and_how_to_go_on() -> None:
    assert lines_of(DONE) == ["done after 4 min: best dice 0.8837 in epoch 43; run folder runs/hippocampus-1"]
    assert lines_of(STOPPED) == [
        "stopped by SIGTERM (exit code 143) after 30 s: best dice 0.8500 in epoch 2; run folder runs/x; "
        "go on with: fasttrain resume runs/x"
    ]
    failed = RunEnded("failed", None, 5, None, None, None, 3.0, "runs/x")
    assert lines_of(failed) == ["failed (exit code 5) after 3 s: no score yet; run folder runs/x"]


def test_what_the_whole_takes_and_costs_stands_beside_what_is_left() -> None:
    (line,) = lines_of(replace(EPOCH, projected_hours=1.5, projected_cost=3.75))
    assert "left 2 min  in all 1 h 30 min, 3.75 USD" in line
    (line,) = lines_of(replace(EPOCH, projected_hours=1.5))
    assert "in all 1 h 30 min" in line
    assert "USD" not in line


def test_the_end_says_what_all_attempts_took_where_that_is_news() -> None:
    assert lines_of(replace(DONE, run_hours=242 / 3600)) == lines_of(DONE)
    (line,) = lines_of(replace(DONE, run_hours=3.0, run_cost=7.5))
    assert line.startswith("done after 4 min, in all 3 h 00 min, 7.50 USD: best dice 0.8837")
    (line,) = lines_of(replace(STOPPED, run_hours=3.0))
    assert "after 30 s, in all 3 h 00 min: " in line


def test_limits_are_told_at_the_start() -> None:
    lines = lines_of(replace(STARTED, limits="ends at the latest by --max-hours 2"))
    assert "ends at the latest by --max-hours 2" in lines


def test_a_whole_run_has_no_control_codes_and_few_lines() -> None:
    hostile = Message("could not read \x1b[31m/data/a\rb.nii\x1b[0m\nsecond line", "warning")
    caching = [Progress("caching", done, 208) for done in range(209)]
    steps = [StepLogged(1, step, step, 0.5, 1e-3, 50.0, 0.0) for step in range(1, 41)]
    saved = CheckpointSaved("runs/x/last.pt", 3, 120, 0.1, 12.0)
    stream = io.StringIO()
    view = PlainView(stream)
    for event in (STARTED, *caching, hostile, *steps, EPOCH, saved, DONE):
        view.on_event(event)
    view.close()
    assert not any(char < " " and char != "\n" for char in stream.getvalue())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 + 1 + 1 + 1
    assert lines[4].startswith("warning: could not read")


def test_silence_is_broken_from_a_thread_and_says_how_long_nothing_was_heard() -> None:
    stream = io.StringIO()
    view = PlainView(stream, heartbeat_seconds=0.1)
    view.on_event(Progress("caching", 34, 208))
    end = time.monotonic() + 5
    while stream.getvalue().count("\n") < 3 and time.monotonic() < end:
        time.sleep(0.02)
    view.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 3
    assert all("caching: 34 of 208" in line for line in lines)
    assert "nothing new for" in lines[-1]


def test_silence_is_broken_on_events_too() -> None:
    stream = io.StringIO()
    view = PlainView(stream, heartbeat_seconds=0.05)
    view._over.set()
    view._beat.join()
    view._over.clear()
    time.sleep(0.06)
    view.on_event(StepLogged(2, 50, 10, 0.5, 1e-3, 50.0, 0.0))
    view.on_event(StepLogged(2, 51, 11, 0.5, 1e-3, 50.0, 0.0))
    view.close()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("still running after 0 s: epoch 2  step 50  loss 0.500")
    assert "nothing new" not in line


def test_no_heartbeat_while_lines_come_and_none_after_the_end() -> None:
    stream = io.StringIO()
    view = PlainView(stream, heartbeat_seconds=0.2)
    for _ in range(8):
        view.on_event(Message("busy"))
        time.sleep(0.05)
    view.on_event(DONE)
    time.sleep(0.4)
    view.close()
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[:-1] == ["busy"] * 8
    assert lines[-1].startswith("done")
    assert not any(thread.name == "plain-view-heartbeat" for thread in threading.enumerate())


def test_every_line_is_flushed_as_it_is_written() -> None:
    raw = io.BytesIO()
    view = PlainView(io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8"))
    view.on_event(Message("first"))
    assert raw.getvalue() == b"first\n"
    view.close()


def test_a_stream_that_knows_ascii_only_gets_its_line() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    view = PlainView(stream)
    view.on_event(Message("préparation"))
    view.close()
    assert raw.getvalue() == b"pr?paration\n"


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        view = PlainView(stream)
        os.close(reading)
        for _ in range(3):
            view.on_event(EPOCH)
        view.close()
        # The buffer still holds what nobody read; closing it here would raise in the test itself.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_a_closed_stream_does_not_end_the_run() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    stream.close()
    view.on_event(EPOCH)
    view.close()


@pytest.mark.parametrize("heavy", ["torch", "rich", "matplotlib"])
def test_the_plain_view_loads_nothing_heavy(heavy: str) -> None:
    script = f"import sys, fasttrain.cli.plain_view, fasttrain.cli.views; assert {heavy!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
