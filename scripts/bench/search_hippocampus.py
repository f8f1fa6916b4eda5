"""Measures `fasttrain search` on Hippocampus on one GPU: 20 trials, what the card did meanwhile, and if the winner is better.

    python scripts/bench/search_hippocampus.py --data DIR --out DIR [--stage search|seeds|all] [--trials 20] [--epochs 32]
        [--set search.pruner.patience=0 ...] [--seeds-at-once 3]

The first stage searches and prints wall time, the share in which the card trained, and the pruning rate; called again it goes on
where it ended. The second trains the best trial's recipe and the default one on three further seeds at equal epochs, and prints
both means; runs that are done are not made again. `--set` is for the search alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SEEDS = (101, 102, 103)
EVERY = 4
FASTTRAIN = [sys.executable, "-m", "fasttrain"]


def settings(epochs: int) -> list[str]:
    """What the search and the runs after it have in common."""
    values = {
        "search.epochs": epochs,
        "search.validate_every": EVERY,
        "validation.mirror": "[]",
        "search.sampler.seed": 0,
    }
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def call(words: list[str], folder: Path) -> str:
    """The stdout of a command that must succeed."""
    place = str(Path(__file__).resolve().parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([*FASTTRAIN, *words], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"fasttrain {' '.join(words)} ended with {done.returncode}")
    return done.stdout


def search(arguments: argparse.Namespace, out: Path) -> None:
    """Runs the search and prints its figures."""
    began = time.perf_counter()
    words = [
        "search",
        "run",
        "--recipe",
        "hippocampus",
        "--data",
        str(arguments.data),
        "--trials",
        str(arguments.trials),
    ]
    words += ["--folder", str(out / "search"), "--device", arguments.device, *settings(arguments.epochs)]
    words += ["--parallel", arguments.parallel] if arguments.parallel else []
    words += ["--hours", str(arguments.minutes / 60)] if arguments.minutes else []
    words += [word for text in arguments.set for word in ("--set", text)]
    call(words, out)
    seconds = time.perf_counter() - began
    found = json.loads(call(["search", "status", str(out / "search"), "--json"], out))
    use = found["device"]
    print(
        f"trials {found['trials']} in {seconds:.0f} s; states",
        {key: one["count"] for key, one in found["states"].items()},
    )
    print(
        f"device trained {use['training_share']:.1%}, trained or validated {use['training_or_validating_share']:.1%} of "
        f"{use['wall_seconds']:.0f} s; {use['trials_at_once']:.2f} trials at once"
    )
    print(f"pruning rate {found['pruning_rate']:.0%}, after epochs {found['pruned_after_epochs']}")
    print("best", found["best"][0] if found["best"] else None)
    print("the recipe's own values", found["baseline"])
    print("importance", found["importance"])


def seeds(arguments: argparse.Namespace, out: Path) -> None:
    """Trains winner and default on further seeds."""
    best = out / "best.yaml"
    if not best.exists():
        call(["search", "best", str(out / "search"), "--write", str(best)], out)
    common = [
        "--data", str(arguments.data), "--device", arguments.device, "--json", "--set", f"training.epochs={arguments.epochs}",
        "--set", f"validation.every={EVERY}", "--set", "validation.mirror=[]",
    ]  # fmt: skip
    means = {}
    for name, recipe in (("default", "hippocampus"), ("best", str(best))):
        runs = {seed: out / f"{name}-{seed}" for seed in SEEDS}
        left = [
            ["train", "--recipe", recipe, "--run", str(run), "--set", f"training.seed={seed}", *common]
            for seed, run in runs.items()
            if not (run / "summary.json").exists()
        ]
        with ThreadPoolExecutor(arguments.seeds_at_once) as pool:
            list(pool.map(lambda words: call(words, out), left))
        scores = [json.loads((run / "summary.json").read_text())["best"]["value"] for run in runs.values()]
        means[name] = statistics.fmean(scores)
        print(
            f"{name}: mean Dice {means[name]:.4f} of {', '.join(f'{score:.4f}' for score in scores)} ({arguments.epochs} epochs)"
        )
    print(f"best - default: {means['best'] - means['default']:+.4f}")


def main() -> None:
    """Both stages, or the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=("search", "seeds", "all"), default="all")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--parallel", default=None)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds-at-once", type=int, default=1)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    arguments.data = arguments.data.resolve()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.stage in ("search", "all"):
        search(arguments, out)
    if arguments.stage in ("seeds", "all"):
        seeds(arguments, out)


if __name__ == "__main__":
    main()
