"""Whether `tune-batch` keeps its word: its time, its choice in a real run, and the run's steady rate against the table's.

    python scripts/bench/tune.py --recipe hippocampus --data DIR [--set KEY=VALUE]… [--hold 0.6] [--grid 1,2,4,8,…] [--epochs 2]

`tune-batch` is run as a user does. Then a real run with its settings trains `--epochs` epochs, whose rate from the second on is
compared with the table's. With --hold another process takes that share of the GPU's memory first. With --grid every size is
measured five times, in turns, and the choice compared with the best of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_HOLDER = """
import sys, torch
held = torch.empty(int(float(sys.argv[1]) * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def main() -> None:
    options = _options()
    holder = _holding(options.hold) if options.hold else None
    try:
        with tempfile.TemporaryDirectory() as place:
            os.environ["FASTTRAIN_CACHE"] = str(Path(place) / "cache")
            _compare(options, Path(place))
    finally:
        if holder is not None:
            holder.kill()


def _compare(options: argparse.Namespace, place: Path) -> None:
    found, seconds = _swept(options, place / "swept")
    print(f"tune-batch took {seconds:.1f} s")
    for row in found["trials"]:
        held = row["reserved_bytes"]
        memory = f"{held / 2**30:5.1f} GiB" if held else "        "
        rate = f"{row['patches_per_second']:9.1f}" if row["patches_per_second"] else "        –"
        name = f"{row['batch_size']}{' compiled' if row['compiled'] else ''}"
        print(f"  {name:>12} {rate} patches/s {memory} {row['trial_seconds'] or 0:5.1f} s  {row['reason']}")
    chosen = found["chosen"]
    print(
        f"chosen: {chosen['batch_size']}, gain {found['gain']}, limit {found['limit']}, validation {found['validation']}"
    )
    rate = _trained(options, place / "run")
    table = chosen["patches_per_second"]
    print(f"real run: {rate:.1f} patches/s, {rate / table - 1:+.1%} against the table's {table:.1f}")
    if options.grid:
        _grid(options, place, chosen["batch_size"])


def _swept(options: argparse.Namespace, run: Path, *more: str) -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    answer = _call(options, "tune-batch", "--run", str(run), "--json", *more)
    return json.loads(answer), time.perf_counter() - began


def _trained(options: argparse.Namespace, run: Path) -> float:
    """The rate of all epochs but the first, by the run's own log of steps, where nothing but steps is timed."""
    _call(options, "train", "--tuned", "--run", str(run), "--set", f"training.epochs={options.epochs}")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = [one["patches_per_second"] for one in events if one["event"] == "StepLogged" and one["epoch"] > 1]
    return statistics.median(rates)


def _grid(options: argparse.Namespace, place: Path, chosen: int) -> None:
    rates: dict[int, list[float]] = {}
    for repeat in range(5):
        found, _ = _swept(options, place / f"grid-{repeat}", "--batch-sizes", options.grid, "--budget", "9m")
        for row in found["trials"]:
            if row["patches_per_second"] and not row["compiled"]:
                rates.setdefault(row["batch_size"], []).append(row["patches_per_second"])
    medians = {size: statistics.median(values) for size, values in rates.items()}
    for size, value in sorted(medians.items()):
        print(f"  grid {size:>5} {value:9.1f} patches/s (median of {len(rates[size])})")
    best = max(medians.values())
    near = min(medians, key=lambda size: abs(size - chosen))
    print(f"chosen {chosen}: {medians[near] / best:.1%} of the grid's best (by batch {near})")


def _call(options: argparse.Namespace, command: str, *more: str) -> str:
    sets = [word for value in options.set for word in ("--set", value)]
    data = ["--data", str(options.data)] if options.data else []
    words = [sys.executable, "-m", "fasttrain", command, "--recipe", options.recipe, *sets, *data, *more]
    answer = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if answer.returncode:
        sys.exit(f"{command} ended with {answer.returncode}: {answer.stdout}")
    return answer.stdout


def _holding(share: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _HOLDER, str(share)]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    if holder.stdout.readline().strip() != "held":
        sys.exit("the memory could not be held")
    return holder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="hippocampus")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--grid", default="")
    parser.add_argument("--epochs", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
