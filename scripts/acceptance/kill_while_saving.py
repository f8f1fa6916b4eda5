"""Proves that a run killed while it saves goes on: SIGKILL at random moments, while a state of 200 MB is saved after every step.

    python scripts/acceptance/kill_while_saving.py [--kills 20] [--mb 200] [--seed 0]

After each kill `last.pt` is read whole, and `fasttrain resume` goes on with it and says which step it came from, until it is
killed in its turn. In the end the losses are compared, step by step and bit for bit: a step that was taken again after a kill
must have the loss it had before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = [
    "data.source.cases=6",
    "data.split.validation=2",
    "data.spacing=[4,4,4]",
    "patch.size=[16,16,16]",
    "network.strides=[2,2]",
    "training.epochs=1000",
    "training.iterations_per_epoch=1000",
    "training.batch_size=1",
    "optimizer={kind: adamw, learning_rate: 0.0001}",
    "output.log_every=1",
    "output.checkpoint_every=1 step",
    "acceleration.amp=off",
    "acceleration.channels_last=on",
    "acceleration.threads=1",
]
_BYTES_A_STATE_FOR_WIDTH_SQUARED = 440
"""Convolutions of 3×3×3 at the deepest stage hold nearly all; a weight is 4 bytes, and AdamW keeps two values of it."""


def command(folder: Path, data: Path, megabytes: int) -> list[str]:
    """Of a run, or of its resume once it is begun."""
    base = [sys.executable, "-m", "fasttrain"]
    if (folder / "recipe.yaml").exists():
        return [*base, "resume", str(folder)]
    width = round((megabytes * 1e6 / _BYTES_A_STATE_FOR_WIDTH_SQUARED) ** 0.5)
    sets = [part for one in [*SETTINGS, f"network.features=[4,8,{width}]"] for part in ("--set", one)]
    return [*base, "train", "-r", "demo", "--data", str(data), "--run", str(folder), "--device", "cpu", *sets]


def events(folder: Path) -> list[dict]:
    """What the run has written of itself."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def saves(folder: Path) -> int:
    """How many checkpoints were written."""
    return sum(event["event"] == "CheckpointSaved" for event in events(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from fasttrain.checkpoints import read_checkpoint

    base = Path(tempfile.mkdtemp(prefix="kill-while-saving-"))
    folder, rng = base / "run", random.Random(options.seed)
    last = folder / "checkpoints" / "last.pt"
    print(f"run in {base}", flush=True)
    within, came_from = 0, 0
    for number in range(options.kills + 1):
        log_path, before = base / f"{number}.log", saves(folder)
        with log_path.open("wb") as log:
            process = subprocess.Popen(command(folder, base / "data", options.mb), stdout=log, stderr=log)
        began = time.monotonic()
        while saves(folder) < before + 1 or (number < options.kills and not any(last.parent.glob(".*.part"))):
            if process.poll() is not None or time.monotonic() - began > 240:
                raise SystemExit(f"FAULT: the run does not go on; see {log_path}")
            time.sleep(0.001)
        if number < options.kills:
            # A write takes a second or so: this lies anywhere in it, or behind it in the next one
            time.sleep(rng.uniform(0.0, 1.0))
        within += any(last.parent.glob(".*.part"))
        process.send_signal(signal.SIGKILL)
        process.wait()
        told = log_path.read_text(encoding="utf-8")
        if number:
            line = re.search(r"restored from last\.pt .*? ([\d,]+) steps?,", told)
            if line is None or int(line[1].replace(",", "")) != came_from:
                raise SystemExit(f"FAULT: the log does not say that it goes on from step {came_from}; see {log_path}")
        state = read_checkpoint(last)
        came_from = state["progress"]["step"]
        size = os.path.getsize(last) / 1e6
        print(f"  kill {number + 1}: last.pt of {size:.0f} MB is whole and holds step {came_from}", flush=True)
    steps: dict[int, float] = {}
    again = 0
    for event in events(folder):
        if event["event"] == "StepLogged":
            again += event["step"] in steps
            if steps.setdefault(event["step"], event["loss"]) != event["loss"]:
                raise SystemExit(f"FAULT: step {event['step']} had two losses")
    if sorted(steps) != list(range(1, max(steps) + 1)):
        raise SystemExit("FAULT: steps are missing")
    print(
        f"{options.kills} kills, {within} of them within a write, {options.kills} resumes; "
        f"{len(steps)} steps, {again} of them taken again with the same loss"
    )
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
