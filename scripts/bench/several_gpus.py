"""Trains a recipe on one GPU and on several of one host, in turns in one call, and prints steady patches/s and their ratio.

python scripts/bench/several_gpus.py --recipe spleen --data DIR --gpus 1,2 --repeats 2 --set acceleration.amp=fp16
python scripts/bench/several_gpus.py --recipe hippocampus-fast --data DIR --gpus 1,4 --whole

Without --whole every epoch has as many steps on each number of GPUs (the batch of a GPU stays), nothing is validated before
the last epoch, and the rate is the median over the epochs after the first. With --whole the recipe runs as it is: seconds from
process start to the score, and the score.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--gpus", default="1,2", help="numbers of GPUs, the first of them the base")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="steps an epoch")
    parser.add_argument("--whole", action="store_true", help="the recipe as it is, to its score")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write what was measured here, too")
    given = parser.parse_args()
    counts = [int(text) for text in given.gpus.split(",")]
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(given.repeats):
            for count in counts:
                run = Path(folder) / f"{count}-{repeat}"
                found[count].append(_trained(given, count, run))
                print(count, found[count][-1], file=sys.stderr, flush=True)
    key = "seconds" if given.whole else "patches_per_second"
    base = statistics.median(one[key] for one in found[counts[0]])
    for count in counts:
        value = statistics.median(one[key] for one in found[count])
        ratio = base / value if given.whole else value / base
        scores = ", ".join(f"{one['score']:.4f}" for one in found[count]) if given.whole else ""
        unit = f"s to a score of {scores}" if given.whole else "patches/s"
        print(f"{count} GPUs: {value:.1f} {unit}  {ratio:.3f}×")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


def _trained(given: argparse.Namespace, count: int, run: Path) -> dict[str, Any]:
    sets = list(given.sets)
    if not given.whole:
        sets += [
            f"training.epochs={given.epochs}",
            f"training.iterations_per_epoch={given.steps * count}",
            f"validation.every={given.epochs}",
            "output.report=false",
            "output.plots=false",
            "output.pictures=off",
        ]
    command = [
        sys.executable,
        "-m",
        "fasttrain",
        "train",
        "--recipe",
        given.recipe,
        "--data",
        given.data,
        "--run",
        str(run),
    ]
    command += ["--gpus", str(count)]
    command += [f"--set={text}" for text in sets]
    began = time.time()
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = time.time() - began
    if ended.returncode:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    summary = json.loads((run / "summary.json").read_text())
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    rates = [float(row["patches_per_second"]) for row in rows[1:] or rows]
    return {
        "patches_per_second": statistics.median(rates),
        "of_epochs": rates,
        "seconds": seconds,
        "score": summary["best"]["value"],
        "to_first_step": summary["seconds"]["to_first_step"],
    }


if __name__ == "__main__":
    main()
