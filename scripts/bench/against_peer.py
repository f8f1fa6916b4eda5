"""fasttrain's `spleen` recipe against a peer's script on the same data and card, one after the other, in one run.

    python scripts/bench/against_peer.py --data DIR --peer SCRIPT [--epochs 8] [--undetermined] [--set KEY=VALUE]…

SCRIPT is called as `SCRIPT DIR fast EPOCHS`, prints a line that begins with `epoch 2` at the end of its third epoch, and last
a line of JSON with `patches_per_s`, its steady rate. Two measures are printed for each, with the ratio: steady patches/s, and
the seconds from the start of the process to the end of epoch 3. fasttrain trains with mirroring and four changes of intensity
on top, which the peer has not. `--undetermined` runs the peer a second time without MONAI's `set_determinism`, which makes
cuDNN choose repeatable algorithms.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AUGMENTED = [
    "augment.flip.probability=0.5",
    "augment.noise={probability: 0.15, std: 0.1}",
    "augment.shift_intensity={probability: 0.3, offset: 0.1}",
    "augment.scale_intensity={probability: 0.3, low: 0.9, high: 1.1}",
    "augment.gamma={probability: 0.3, low: 0.7, high: 1.5}",
]
OURS = [
    "acceleration.amp=fp16",
    "data.cache.kind=gpu",
    "data.storage_dtype=float16",
    "output.plots=false",
    "output.pictures=off",
]
FREE = (
    "import sys, runpy, monai.utils as u; u.set_determinism = lambda *a, **k: None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
STEADY = ["training.iterations_per_epoch=40", "training.epochs=6", "validation.every=6"]
Row = tuple[str, float, float]


def main() -> None:
    options = _options()
    rows: list[Row] = [_peer("peer", [sys.executable, str(options.peer)], options)]
    if options.undetermined:
        rows.append(_peer("peer, cuDNN free", [sys.executable, "-c", FREE, str(options.peer)], options))
    folder = Path(tempfile.mkdtemp(prefix="against-peer-"))
    try:
        rows.append(_ours(folder, options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    import torch

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print("| | patches/s | ratio | seconds to the end of epoch 3 | ratio |\n|---|---|---|---|---|")
    _, rate, seconds = rows[-1]
    for name, theirs, took in rows:
        print(f"| {name} | {theirs:.1f} | {rate / theirs:.2f} | {took:.1f} | {took / seconds:.2f} |")


def _peer(name: str, command: list[str], options: argparse.Namespace) -> Row:
    seconds, output = _until([*command, str(options.data), "fast", str(options.epochs)], "epoch 2", go_on=True)
    found = json.loads(next(line for line in reversed(output) if line.startswith("{")))
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    return name, float(found["patches_per_s"]), seconds


def _ours(folder: Path, options: argparse.Namespace) -> Row:
    """Two runs: one of epochs as the peer has them, up to the end of the third, and one of longer epochs for the steady rate."""
    command = [sys.executable, "-m", "fasttrain", "train", "--recipe", "spleen", "--data", str(options.data)]
    for assignment in [*OURS, *AUGMENTED, *options.set]:
        command += ["--set", assignment]
    steady = [*command, "--run", str(folder / "steady")]
    for assignment in STEADY:
        steady += ["--set", assignment]
    _until(steady, "done", go_on=True)
    with open(folder / "steady" / "metrics.csv", newline="") as stream:
        rate = statistics.median([float(row["patches_per_second"]) for row in csv.DictReader(stream)][2:])
    short = [*command, "--run", str(folder / "short"), "--set", "training.epochs=600"]
    seconds, _ = _until(short, "epoch 3/", go_on=False)
    return "fasttrain", rate, seconds


def _until(command: list[str], mark: str, go_on: bool) -> tuple[float, list[str]]:
    """Seconds until a line begins with `mark`, and all lines; the process is ended then unless it is to go on."""
    began = time.perf_counter()
    seconds = float("nan")
    lines: list[str] = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            print(f"  {time.perf_counter() - began:6.1f} {line.rstrip()[:180]}", file=sys.stderr, flush=True)
            if line.startswith(mark) and seconds != seconds:
                seconds = time.perf_counter() - began
                if not go_on:
                    process.kill()
    if go_on and process.returncode:
        raise SystemExit(f"{' '.join(command[:3])} ended with {process.returncode}: {lines[-1] if lines else ''}")
    return seconds, lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--undetermined", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
