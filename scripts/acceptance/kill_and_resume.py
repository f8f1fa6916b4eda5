"""Proves exact resume: a run that is killed by SIGKILL at random moments and resumed each time has the losses of an unbroken
one, bit for bit, with and without loader workers.

    python scripts/acceptance/kill_and_resume.py [--kills 10] [--workers 0 2] [--seed 0]

Among the moments are some while a checkpoint is written and some while validating: the run saves every few steps and validates
every epoch, and half of the kills wait for one of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = [
    "data.source.cases=8",
    "data.split.validation=3",
    "data.spacing=[3,3,3]",
    "patch.size=[32,32,32]",
    "network.features=[8,16,24]",
    "network.strides=[2,2]",
    "network.dropout=0.1",
    "augment.rotate={probability: 0.5}",
    "augment.flip={probability: 0.5}",
    "training.epochs=8",
    "training.iterations_per_epoch=25",
    "validation.every=1",
    "output.log_every=1",
    "output.checkpoint_every=7 steps",
    "acceleration.amp=off",
    "acceleration.channels_last=on",
    "acceleration.threads=1",
]


def command(folder: Path, data: Path, workers: int, resume: bool) -> list[str]:
    """The command line of a run or of its resume."""
    base = [sys.executable, "-m", "fasttrain"]
    if resume:
        return [*base, "resume", str(folder)]
    sets = [part for setting in [*SETTINGS, f"data.workers={workers}"] for part in ("--set", setting)]
    return [*base, "train", "--recipe", "demo", "--data", str(data), "--run", str(folder), "--device", "cpu", *sets]


def losses(folder: Path) -> dict[int, float]:
    """Step → loss; a step that was taken twice must have the same loss both times."""
    found: dict[int, float] = {}
    for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the line that was being written when the process was killed
        if event["event"] == "StepLogged":
            step, loss = event["step"], event["loss"]
            if found.setdefault(step, loss) != loss:
                raise SystemExit(f"FAULT: step {step} had loss {found[step]!r} and, taken again, {loss!r}")
    return found


def kill_once(folder: Path, process: subprocess.Popen[bytes], wait_for: str, rng: random.Random) -> bool:
    """Kills the process at a moment of the asked kind; False where it ended before."""
    deadline = time.monotonic() + (rng.uniform(4.0, 14.0) if wait_for == "anywhere" else 60.0)
    while process.poll() is None:
        saving = any((folder / "checkpoints").glob(".*.part")) if wait_for == "saving" else False
        validating = wait_for == "validating" and _is_validating(folder)
        if saving or validating or time.monotonic() > deadline:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.0005)
    return False


def _is_validating(folder: Path) -> bool:
    try:
        event = json.loads((folder / "events.jsonl").read_bytes()[-4000:].splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return False
    return bool(event["event"] == "Progress" and event["what"] == "validating")


def proves(base: Path, data: Path, workers: int, kills: int, rng: random.Random) -> None:
    """One unbroken run against one that is killed again and again."""
    unbroken, broken = base / f"unbroken-{workers}", base / f"broken-{workers}"
    subprocess.run(
        command(unbroken, data, workers, False), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    kinds = ["anywhere", "saving", "anywhere", "validating"]
    resume = False
    done = 0
    while True:
        log = open(base / "log.txt", "ab")  # noqa: SIM115 - the process writes into it
        process = subprocess.Popen(command(broken, data, workers, resume), stdout=log, stderr=log)
        if done < kills and kill_once(broken, process, kinds[done % len(kinds)], rng):
            done += 1
            got = max(losses(broken), default=0) if (broken / "events.jsonl").exists() else 0
            print(f"  workers {workers}: kill {done} ({kinds[(done - 1) % len(kinds)]}) at step {got}", flush=True)
            resume = (broken / "recipe.yaml").exists()
            if not resume:
                shutil.rmtree(broken, ignore_errors=True)
            continue
        if process.wait() != 0:
            raise SystemExit(f"FAULT: exit code {process.returncode}; see {base / 'log.txt'}")
        break
    compare(unbroken, broken, workers, done)


def compare(unbroken: Path, broken: Path, workers: int, kills: int) -> None:
    """Losses step by step, and the rows of metrics.csv but for their times."""
    first, second = losses(unbroken), losses(broken)
    differing = [step for step in sorted(first) if first[step] != second.get(step)]
    if differing or first.keys() != second.keys():
        raise SystemExit(f"FAULT: workers {workers}: losses differ from step {differing[:1]} on")
    timed = {"seconds", "patches_per_second", "wait_share"}

    def rows(folder: Path) -> list[dict[str, str]]:
        head, *lines = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
        names = head.split(",")
        return [{n: v for n, v in zip(names, line.split(","), strict=True) if n not in timed} for line in lines]

    if rows(unbroken) != rows(broken):
        raise SystemExit(f"FAULT: workers {workers}: metrics.csv differs")
    print(
        f"workers {workers}: {kills} kills, {len(first)} losses and {len(rows(broken))} rows equal, bit for bit",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    print(f"runs in {base}", flush=True)
    rng = random.Random(options.seed)
    for workers in options.workers:
        proves(base, base / "data", workers, options.kills, rng)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
