"""Whether `tune-batch` and `tune` keep their word: their time, the pick in a real run, and the pick against a full grid.

    python scripts/bench/tune.py --recipe hippocampus --data DIR [--set KEY=VALUE]… [--hold 0.6] [--epochs 2] [--grid 4,8,16,32]
    python scripts/bench/tune.py --command tune --grid 4,8,16,32 …

The command is run as a user does. Then a real run with its settings trains `--epochs` epochs, whose steady rate is compared with
the table's: both stand in one line, with the bound of 5%. With --hold another process takes that share of the GPU's memory first.

With --grid each of its batch sizes, under each of --workers and --caches where they are given, is measured again beside the
recipe as written and the pick, by trials as the command makes them, five times in turns. Told are the medians, the factor of the
pick over the recipe as written, and its share of the best of the grid, with the bound of 3%. Exit code 1: a bound was not kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from fasttrain.engine.stop import StopRequest  # noqa: E402
from fasttrain.recipe import resolve  # noqa: E402
from fasttrain.studies.lock import applied  # noqa: E402
from fasttrain.studies.measuring import Measuring  # noqa: E402
from fasttrain.studies.options import Options  # noqa: E402
from fasttrain.studies.trials import TrialServer  # noqa: E402

_STEADY, _NEAR = 0.05, 0.03
_REPEATS = 5
_HOLDER = """
import sys, torch
held = torch.empty(int(float(sys.argv[1]) * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def main() -> int:
    options = _options()
    holder = _holding(options.hold) if options.hold else None
    try:
        with tempfile.TemporaryDirectory() as place:
            os.environ["FASTTRAIN_CACHE"] = str(Path(place) / "cache")
            return 0 if _compare(options, Path(place)) else 1
    finally:
        if holder is not None:
            holder.kill()


def _compare(options: argparse.Namespace, place: Path) -> bool:
    more = ("--no-train",) if options.command == "tune" else ()
    began = time.perf_counter()
    answer = _call(options, options.command, "--run", str(place / "swept"), "--json", *_budget(options), *more)
    found, seconds = json.loads(answer), time.perf_counter() - began
    print(f"{options.command} took {seconds:.1f} s")
    for row in found["trials"]:
        held = row["reserved_bytes"]
        memory = f"{held / 2**30:5.1f} GiB" if held else "        "
        rate = f"{row['patches_per_second']:9.1f}" if row["patches_per_second"] else "        –"
        name = f"{row['batch_size']}{' compiled' if row['compiled'] else ''}"
        print(f"  {name:>12} {rate} patches/s {memory} {row['trial_seconds'] or 0:5.1f} s  {row['reason']}")
    for row in found.get("settings_tried", ()):
        print(
            f"  {row['setting']}={row['value']} rate {row['rate']} seconds {row['seconds']} {row['reason']} taken {row['taken']}"
        )
    print(f"settings {found['settings']}, gain {found['gain']}, validation {found['validation']}")
    print(f"limited by {found['limit']['by']}: {found['limit']['why']}")
    kept = _real_run(options, place, found)
    if options.grid:
        kept = _grid(options, place, found) and kept
    return kept


def _real_run(options: argparse.Namespace, place: Path, found: dict[str, Any]) -> bool:
    """Whether the run's rate is the table's: that of the last setting taken for training, which is the pick's."""
    tried = [row for row in found.get("settings_tried", ()) if row["taken"] and row["rate"]]
    table = tried[-1]["rate"] if tried else found["chosen"]["patches_per_second"]
    rate = _trained(options, place / "run", found["settings"])
    near = abs(rate / table - 1) <= _STEADY
    word = "kept" if near else "NOT KEPT"
    print(
        f"real run {rate:.1f} patches/s, table {table:.1f}: {rate / table - 1:+.1%}, bound of {_STEADY:.0%} {word}",
        flush=True,
    )
    return near


def _trained(options: argparse.Namespace, run: Path, settings: dict[str, Any]) -> float:
    """The rate of all epochs but the first, by the run's own log of steps, where nothing but steps is timed."""
    steps = ("--set", f"training.iterations_per_epoch={options.steps}") if options.steps else ()
    # What was tuned is not to be set as well
    kept = [value for value in options.set if value.partition("=")[0] not in settings]
    options = argparse.Namespace(**{**vars(options), "set": kept})
    _call(options, "train", "--tuned", "--run", str(run), "--set", f"training.epochs={options.epochs}", *steps)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = [one["patches_per_second"] for one in events if one["event"] == "StepLogged" and one["epoch"] > 1]
    if not rates:
        sys.exit(
            "the run logged no steps after its first epoch; raise --epochs or --steps, or set output.log_every lower"
        )
    return statistics.median(rates)


def _grid(options: argparse.Namespace, place: Path, found: dict[str, Any]) -> bool:
    """Whether the pick is as good as the best of all settings of the grid, all measured again."""
    settings: dict[str, dict[str, Any]] = {"the recipe as written": {}, "the pick": found["settings"]}
    workers: list[Any] = [("data.workers", int(value)) for value in options.workers.split(",") if value] or [None]
    caches: list[Any] = [("data.cache.kind", value) for value in options.caches.split(",") if value] or [None]
    for size, *more in itertools.product(options.grid.split(","), workers, caches):
        chosen = {"training.batch_size": int(size), **dict(one for one in more if one)}
        settings[", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())] = chosen
    resolved = resolve(options.recipe, options.set)
    server = TrialServer(place / "grid", lambda event: None, StopRequest())
    rates: dict[str, list[float]] = {name: [] for name in settings}
    try:
        measuring = Measuring(options.data, "auto", server, Options())
        measuring.look(resolved)
        for repeat, (number, (name, values)) in itertools.product(range(_REPEATS), enumerate(settings.items())):
            if repeat and not rates[name]:
                continue
            outcome = measuring.steps(applied(resolved, values), f"{number}-{repeat}", found["chosen"]["compiled"])
            if outcome.done:
                rates[name].append(outcome.values["rate"])
            else:
                print(f"  {name:>40} {outcome.status}: {'; '.join(outcome.faults)}")
    finally:
        server.close()
    return _judged(rates)


def _judged(rates: dict[str, list[float]]) -> bool:
    medians = {name: statistics.median(values) for name, values in rates.items() if values}
    for name, value in medians.items():
        print(f"  {name:>40} {value:9.1f} patches/s (median of {len(rates[name])})")
    pick, own = medians["the pick"], medians["the recipe as written"]
    best = max(medians, key=lambda name: medians[name])
    near = pick >= medians[best] * (1 - _NEAR)
    print(f"the pick over the recipe as written: {pick / own:.2f} times the patches/s")
    word = "kept" if near else "NOT KEPT"
    print(f"the pick reaches {pick / medians[best]:.1%} of the best of all ({best}), bound of {_NEAR:.0%} {word}")
    return near


def _budget(options: argparse.Namespace) -> tuple[str, ...]:
    return ("--budget", options.budget) if options.budget else ()


def _call(options: argparse.Namespace, command: str, *more: str) -> str:
    sets = [word for value in options.set for word in ("--set", value)]
    data = ["--data", str(options.data)] if options.data else []
    words = [sys.executable, "-m", "fasttrain", command, "--recipe", options.recipe, *sets, *data, *more]
    answer = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
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
    parser.add_argument("--command", choices=("tune-batch", "tune"), default="tune-batch")
    parser.add_argument("--recipe", default="hippocampus")
    parser.add_argument("--data", type=lambda text: Path(text).absolute())
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--budget", help="handed on; else the command's own")
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="steps an epoch of the real run; else the recipe's")
    parser.add_argument("--grid", default="", metavar="1,2,4")
    parser.add_argument("--workers", default="", metavar="0,4,8")
    parser.add_argument("--caches", default="", metavar="gpu,memory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
