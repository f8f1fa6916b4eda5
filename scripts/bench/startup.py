"""Where the seconds before the first optimiser step go: `fasttrain train` begun anew several times, medians by part.

    python scripts/bench/startup.py --data DIR [--recipe hippocampus] [--set KEY=VALUE]… [--starts 5] [--keep-compiled]
                                    [--keep-check] [--whole] [--json]

Each start is a process of its own with empty cache folders (FASTTRAIN_CACHE, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR), so
that every file is checked and every kernel compiled anew; one start before them, which does not count, warms the files' pages.
`--keep-compiled` keeps what that start compiled, `--keep-check` what it remembered of the files: both together are a second run.
A start is two steps of the recipe and one validation without flips; with `--whole` it is the recipe as it is, and the seconds of
training and validation and the Dice are shown too.

The parts are `seconds.start` of `summary.json`. "process" is from the call to the end of the command, this script's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_TWO_STEPS = {
    "training.epochs": 1,
    "training.iterations_per_epoch": 2,
    "output.plots": "false",
    "output.pictures": "off",
    "validation.mirror": "[]",
}
_CACHES = {"FASTTRAIN_CACHE": "fasttrain", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def main() -> None:
    options = _options()
    base = Path(tempfile.mkdtemp(prefix="startup-bench-"))
    try:
        found = []
        for number in range(options.starts + 1):
            one = _start(options, base, base / f"run-{number}")
            told = f"{one['to_first_step']:.1f} s to the first step, {one['process']:.1f} s in all"
            print(f"{'warming' if number == 0 else f'start {number}'}: {told}", file=sys.stderr, flush=True)
            if number:
                found.append(one)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="hippocampus")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--keep-compiled", action="store_true")
    parser.add_argument("--keep-check", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the recipe's own length")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _start(options: argparse.Namespace, base: Path, run: Path) -> dict[str, Any]:
    _empty_caches(options, base)
    fixed = {} if options.whole else _TWO_STEPS
    command = [sys.executable, "-m", "fasttrain", "train", "--recipe", options.recipe, "--run", str(run)]
    command += ["--data", str(options.data)] if options.data else []
    for one in (*(f"{key}={value}" for key, value in fixed.items()), *options.set):
        command += ["--set", one]
    caches = {name: str(base / folder) for name, folder in _CACHES.items()}
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **caches})
    process = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr.decode(errors="replace"))
    summary = json.loads((run / "summary.json").read_text())
    shutil.rmtree(run)
    seconds = summary["seconds"]
    named = {key: seconds[key] for key in ("to_first_step", "training", "validation")}
    return {**seconds["start"], **named, "process": process, "dice": summary["best"]["value"]}


def _empty_caches(options: argparse.Namespace, base: Path) -> None:
    compiled = [] if options.keep_compiled else [base / "triton", base / "inductor"]
    known = [one for one in (base / "fasttrain").glob("*") if not (options.keep_check and one.name == "checks")]
    for folder in (*compiled, *known):
        shutil.rmtree(folder, ignore_errors=True)


def _print(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    kept = [text for text, on in (("compiled kernels", options.keep_compiled), ("the check", options.keep_check)) if on]
    print(f"{options.recipe}: medians of {len(found)}, {'with ' + ' and '.join(kept) if kept else 'nothing kept'}\n")
    print("| part | s | spread |\n|---|---|---|")
    names = [name for name in found[0] if options.whole or name not in ("training", "validation", "dice")]
    for name in names:
        values = [one[name] for one in found if one.get(name) is not None]
        if values:
            digits = 4 if name == "dice" else 2
            spread = f"{min(values):.{digits}f}–{max(values):.{digits}f}"
            print(f"| {name.replace('_', ' ')} | {statistics.median(values):.{digits}f} | {spread} |")


if __name__ == "__main__":
    main()
