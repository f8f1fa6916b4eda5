"""Proves that a run told to stop ends within four seconds in any phase, with the right exit code, and goes on as if it had not.

    python scripts/acceptance/stop_anywhere.py [--only step validation saving filling twice starting compiling first-process]

Each time a real `fasttrain train` on the CPU with loader workers is sent a signal; afterwards no process of it may be left, every
checkpoint in its run must be whole, and its resume must have the losses of an unbroken run, bit for bit: the same samples in the
same order. As the first process of a container it needs `unshare --pid`, without which that one is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

MOST_SECONDS = 4.0
MARK = "FASTTRAIN_ACCEPTANCE"
SETTINGS = [
    "data.source.cases=8",
    "data.split.validation=3",
    "data.spacing=[3,3,3]",
    "data.workers=2",
    "patch.size=[32,32,32]",
    "network.features=[8,16,24]",
    "network.strides=[2,2]",
    "augment.rotate={probability: 0.5}",
    "training.epochs=4",
    "training.iterations_per_epoch=5",
    "validation.every=1",
    "output.log_every=1",
    "acceleration.amp=off",
    "acceleration.channels_last=on",
    "acceleration.threads=1",
]
Ready = Callable[["Run"], bool]


class Run:
    """A `train` or `resume` in a process of its own; every process that comes of it carries a mark in its environment."""

    def __init__(
        self, folder: Path, data: Path, more: tuple[str, ...] = (), resume: bool = False, first: bool = False
    ) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.log = folder.with_name(f"{folder.name}-{self.mark[:6]}.log")
        command = [sys.executable, "-m", "fasttrain"]
        if resume:
            command += ["resume", str(folder)]
        else:
            sets = [part for setting in [*SETTINGS, *more] for part in ("--set", setting)]
            command += ["train", "-r", "demo", "--data", str(data), "--run", str(folder), "--device", "cpu", *sets]
        if first:
            command = ["unshare", "--pid", "--fork", "--mount-proc", *command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, MARK: self.mark})
        self.began = time.monotonic()
        self.first = first

    @property
    def pid(self) -> int:
        """Of fasttrain itself."""
        if not self.first:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def events(self) -> list[dict]:
        """What the run has written of itself so far."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def alive(self) -> list[int]:
        """All processes that carry its mark and are no zombies."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait(self) -> int:
        """Its exit code when it ends by itself."""
        code = self.process.wait()
        if code:
            raise SystemExit(f"FAULT: exit code {code}; see {self.log}")
        return code


def losses(run: Path) -> dict[int, float]:
    """Step → loss of a run and its resumes; a step that was taken twice must have the same loss both times."""
    found: dict[int, float] = {}
    for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event["event"] == "StepLogged" and found.setdefault(event["step"], event["loss"]) != event["loss"]:
                raise SystemExit(f"FAULT: step {event['step']} of {run} had two losses")
    return found


def wait_for(run: Run, ready: Ready, seconds: float = 90.0) -> None:
    """Returns at the moment asked for."""
    while not ready(run):
        if run.process.poll() is not None or time.monotonic() - run.began > seconds:
            raise SystemExit(f"FAULT: the moment never came; see {run.log}")
        time.sleep(0.002)


def stopped(
    run: Run, ready: Ready, numbers: tuple[signal.Signals, ...], code: int, seconds: float = MOST_SECONDS
) -> None:
    """Sends the signals, 0.4 s apart, and checks how the run ends."""
    wait_for(run, ready)
    for count, number in enumerate(numbers):
        time.sleep(0.4 if count else 0.0)
        os.kill(run.pid, number)
        sent = time.monotonic()
    got = run.process.wait(timeout=60)
    took = time.monotonic() - sent
    time.sleep(0.2)
    left = run.alive()
    last = run.log.read_text(encoding="utf-8").strip().splitlines()[-1]
    print(f"    exit code {got} after {took:.1f} s: …{last[-110:]}", flush=True)
    faults = [f"exit code {got}, not {code}"] if got != code else []
    faults += [f"it took {took:.1f} s"] if took > seconds else []
    faults += [f"processes {left} are left"] if left else []
    if (run.folder / "recipe.yaml").exists() and f"fasttrain resume {run.folder}" not in last:
        faults.append("no line to resume")
    if faults:
        raise SystemExit(f"FAULT: {'; '.join(faults)}; see {run.log}")
    check_files(run.folder)


def check_files(folder: Path) -> None:
    """Every checkpoint that has its name is whole."""
    from fasttrain.checkpoints import read_checkpoint

    for path in (folder / "checkpoints").glob("*.pt"):
        read_checkpoint(path)


def goes_on(folder: Path, data: Path, unbroken: dict[int, float]) -> None:
    """Resumes to the end, and compares."""
    if not (folder / "recipe.yaml").exists():
        return
    run = Run(folder, data, resume=True)
    run.wait()
    if losses(folder) != unbroken:
        raise SystemExit(f"FAULT: the losses of {folder} are not those of an unbroken run")


def at_step(step: int) -> Ready:
    """A step was logged."""
    return lambda run: any(event["event"] == "StepLogged" and event["step"] >= step for event in run.events())


def at_progress(what: str) -> Ready:
    """A piece of work has begun, and is still under way."""

    def ready(run: Run) -> bool:
        events = run.events()
        return bool(events) and events[-1]["event"] == "Progress" and what in events[-1]["what"]

    return ready


def while_saving(run: Run) -> bool:
    """A checkpoint is half written."""
    return any((run.folder / "checkpoints").glob(".*.part"))


def after(seconds: float) -> Ready:
    """So long after the process began."""
    return lambda run: time.monotonic() - run.began > seconds


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
FILLING = ("data.source.cases=40", "data.spacing=[1,1,1]", "data.cache.kind=memory")
COMPILING = ("acceleration.compile=on", "data.workers=0")
SAVING = ("network.features=[8,16,320]", "patch.size=[16,16,16]", "output.checkpoint_every=1 step")
MOMENTS: dict[str, list[tuple[str, Ready, tuple[signal.Signals, ...], int, tuple[str, ...]]]] = {
    "step": [
        (f"step 7 of 20, {number.name}", at_step(7), (number,), code, ())
        for number, code in ((TERM, 143), (INT, 130), (USR1, 143))
    ],
    "validation": [("validating", at_progress("validating"), (TERM,), 143, ())],
    "saving": [("saving", while_saving, (TERM,), 143, SAVING)],
    "filling": [("filling the cache", at_progress("reading training"), (TERM,), 143, FILLING)],
    "twice": [
        ("step 7, twice", at_step(7), (TERM, TERM), 143, ()),
        ("saving, twice", while_saving, (TERM, INT), 130, SAVING),
    ],
    "starting": [(f"{seconds} s after the start", after(seconds), (TERM,), 143, ()) for seconds in (0.5, 1.5, 3.0)],
    "compiling": [("the first step compiles", lambda run: at_compiling(run), (TERM,), 143, COMPILING)],
    "first-process": [
        ("first process, step 7", at_step(7), (TERM,), 143, ()),
        ("first process, start", after(1.0), (TERM,), 143, ()),
    ],
}
"""By name: what is told of a moment, when it has come, what is sent, the exit code, further settings."""


def at_compiling(run: Run) -> bool:
    """The first step is under way for a while."""
    text = run.log.read_text(encoding="utf-8")
    return "memory cache: 3 cases" in text and time.time() - run.log.stat().st_mtime > 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stop-anywhere-"))
    print(f"runs in {base}", flush=True)
    unbroken: dict[tuple[str, ...], dict[int, float]] = {}
    for name in options.only:
        first = name == "first-process"
        if first and subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode:
            print("first-process: left out, unshare is not permitted here")
            continue
        for number, (told, ready, numbers, code, more) in enumerate(MOMENTS[name]):
            print(f"  {told}", flush=True)
            run = Run(
                base / f"{name}-{number}", base / f"data-{'big' if more == FILLING else 'small'}", more, first=first
            )
            stopped(run, ready, numbers, code)
            if more in (FILLING, COMPILING):
                continue  # to their ends these would take minutes
            if more not in unbroken:
                whole = Run(base / f"unbroken-{len(unbroken)}", base / "data-small", more)
                whole.wait()
                unbroken[more] = losses(whole.folder)
            goes_on(run.folder, base / "data-small", unbroken[more])
    shutil.rmtree(base)
    print("every moment passed")


if __name__ == "__main__":
    main()
