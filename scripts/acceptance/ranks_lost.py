"""Proves that several ranks end together: whichever is killed, frozen, told to stop or fails, in time and with one sentence.

    python scripts/acceptance/ranks_lost.py [--only WORD] [--ranks 2]

Each way is tried with `fasttrain train --gpus N` and with torchrun, on the CPU, or on GPUs with RANKS_LOST_DEVICE=cuda. After
each no rank may be left, and the run's `summary.json` must say how it ended.
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
from collections.abc import Callable
from pathlib import Path

MOST_SECONDS = 60.0
DEVICE = os.environ.get("RANKS_LOST_DEVICE", "cpu")
SETTINGS = [
    "data.source.cases=6",
    "data.split.validation=2",
    "data.spacing=[3,3,3]",
    "patch.size=[32,32,32]",
    "network.features=[4,8,8]",
    "network.strides=[2,2]",
    "training.epochs=400",
    "training.iterations_per_epoch=20",
    "validation.every=1",
    "output.log_every=5",
    "output.report=false",
    "output.plots=false",
    "acceleration.amp=off",
    "acceleration.channels_last=on",
]


class Way:
    """One start of so many ranks, by one launcher."""

    def __init__(self, base: Path, name: str, ranks: int, own: bool, sets: tuple[str, ...] = ()) -> None:
        self.run = base / f"{name}-{'gpus' if own else 'torchrun'}".replace(" ", "-")
        words = ["train", "--recipe", "demo", "--data", str(base / "data"), "--run", str(self.run), "--device", DEVICE]
        words += [part for setting in (*SETTINGS, *sets) for part in ("--set", setting)]
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
            "--",
        ]
        command = (
            [sys.executable, "-m", "fasttrain", *words, "--gpus", str(ranks)]
            if own
            else [*launcher, "fasttrain", *words]
        )
        self.err = base / f"{self.run.name}.err"
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)

    def ranks(self) -> dict[int, int]:
        """Process of each rank, by rank; its workers have its words and variables, and are children of it."""
        found: dict[int, dict[int, int]] = {}
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if not name.isdigit() or str(self.run).encode() not in words or b"torch.distributed.run" in words:
                    continue
                environ = dict(
                    part.split(b"=", 1)
                    for part in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                    if b"=" in part
                )
                if b"WORLD_SIZE" in environ:
                    parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                    found.setdefault(int(environ[b"RANK"]), {})[int(name)] = parent
        return {
            rank: next((process for process, parent in processes.items() if parent not in processes), min(processes))
            for rank, processes in found.items()
        }

    def wait_for_epoch(self, epoch: int = 1) -> None:
        """Until a row of the table is written."""
        until = time.monotonic() + 90
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if len((self.run / "metrics.csv").read_text().splitlines()) > epoch:
                    return
            time.sleep(0.05)
        raise SystemExit(f"FAULT: {self.run.name} did not train: {self.err.read_text()[-2000:]}")

    def told(self) -> list[str]:
        """The sentences of fasttrain's own."""
        return [line for line in self.err.read_text(errors="replace").splitlines() if line.startswith("fasttrain: ")]

    def end(self) -> None:
        """Whatever is left of it."""
        for process in (self.process.pid, *self.ranks().values()):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def check(way: Way, what: str, act: Callable[[Way], object], code: set[int], status: str | None, sentence: str) -> None:
    """Acts once the run is under way, and looks at how all of it ends."""
    try:
        way.wait_for_epoch()
        began = time.monotonic()
        act(way)
        try:
            found = way.process.wait(MOST_SECONDS + 20)
        except subprocess.TimeoutExpired:
            found = None
        seconds = time.monotonic() - began
        time.sleep(0.5)
        left = way.ranks()
        told, summary = way.told(), {}
        with contextlib.suppress(OSError, ValueError):
            summary = json.loads((way.run / "summary.json").read_text())
        faults = []
        if found not in code:
            faults.append(f"exit code {found}, not {sorted(code)}")
        if seconds > MOST_SECONDS:
            faults.append("too late")
        if left:
            faults.append(f"ranks {sorted(left)} are left")
        if status is not None and summary.get("status") != status:
            faults.append(f"summary says {summary.get('status')}, not {status}")
        if sentence and (len(told) != 1 or sentence not in told[0]):
            faults.append(f"should be one sentence with {sentence!r}")
        print(
            f"{'FAULT' if faults else 'ok'}: {way.run.name}: {what}: {seconds:.1f} s, exit code {found}, {told}",
            flush=True,
        )
        if faults:
            print(f"  {'; '.join(faults)}; summary {summary.get('error')}\n{way.err.read_text()[-1500:]}", flush=True)
            FAULTS.append(way.run.name)
    finally:
        way.end()


FAULTS: list[str] = []


def to_rank(rank: int, number: int) -> Callable[[Way], object]:
    return lambda way: os.kill(way.ranks()[rank], number)


def to_launcher(*numbers: int) -> Callable[[Way], object]:
    def act(way: Way) -> None:
        for number in numbers:
            os.kill(way.process.pid, number)
            time.sleep(0.4)

    return act


def ways(ranks: int, own: bool) -> list[tuple[str, Callable[[Way], object], set[int], str | None, str]]:
    last = ranks - 1
    named = "was killed by SIGKILL" if own else "ended without a word"
    failed = {137} if own else {1}
    found: list[tuple[str, Callable[[Way], object], set[int], str | None, str]] = [
        (
            "another killed",
            to_rank(last, signal.SIGKILL),
            failed,
            "failed",
            f"rank {last} {named}" if own else f"rank {last} on",
        ),
        ("first killed", to_rank(0, signal.SIGKILL), failed, None, f"rank 0 {named}" if own else "rank 0 on"),
        ("another frozen", to_rank(last, signal.SIGSTOP), failed, "failed", f"rank {last} on"),
        ("first frozen", to_rank(0, signal.SIGSTOP), failed, None, "rank 0 on"),
        ("launcher killed", to_launcher(signal.SIGKILL), {-9}, None, ""),
    ]
    if own:
        found += [
            ("told to stop", to_launcher(signal.SIGTERM), {143}, "stopped", ""),
            ("first told to stop", to_rank(0, signal.SIGTERM), {143}, "stopped", ""),
            ("another told to stop", to_rank(last, signal.SIGTERM), {143}, "stopped", ""),
            ("Ctrl-C", to_launcher(signal.SIGINT), {130}, "stopped", ""),
            ("told twice", to_launcher(signal.SIGTERM, signal.SIGTERM), {143}, None, ""),
        ]
    else:
        found += [
            ("told to stop", to_launcher(signal.SIGTERM), {1, -15, 143}, "stopped", ""),
            ("another told to stop", to_rank(last, signal.SIGTERM), {1}, "stopped", ""),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", choices=["gpus", "torchrun", "both"], default="both")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="ranks-lost-"))
    print(f"runs in {base}", flush=True)
    for own in (True, False):
        if options.launcher not in ("both", "gpus" if own else "torchrun"):
            continue
        for what, act, code, status, sentence in ways(options.ranks, own):
            if options.only in what:
                check(Way(base, what, options.ranks, own), what, act, code, status, sentence)
    if FAULTS:
        raise SystemExit(f"{len(FAULTS)} faults: {', '.join(FAULTS)}; see {base}")
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
