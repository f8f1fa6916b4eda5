"""Proves that a command that is interrupted while it starts ends with one sentence or none, the right exit code and no traceback.

    python scripts/acceptance/interrupted_start.py [--signals 200] [--seed 0]

Real processes, by `python -m fasttrain` and by the console script where it is installed, get SIGINT or SIGTERM 0.02 to 0.6 s
after their start. `before` counts those that had not come to fasttrain's first line, where the interpreter itself answers (SIGINT
with a traceback of its own), `done` those that had ended.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "cli")]

from test_cli_interrupted import MODULE, SCRIPT, ended_early  # noqa: E402

COMMANDS = (
    ["--help"],
    ["train", "--help"],
    ["recipes", "list"],
    ["data", "cache"],
    ["doctor"],
    ["train", "-r", "demo"],
)


def main() -> int:
    """1 where any ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, counts, latest = random.Random(given.seed), Counter[str](), 0.0
    entries = [MODULE, SCRIPT] if Path(SCRIPT[0]).exists() else [MODULE]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.signals):
            command = [*draw.choice(entries), *draw.choice(COMMANDS)]
            number, seconds = draw.choice([signal.SIGINT, signal.SIGTERM]), draw.uniform(0.02, 0.6)
            try:
                end = ended_early(command, number, seconds, Path(folder))
            except AssertionError as error:
                end = "bad"
                print(f"{' '.join(command)}, {number.name} {str(error).splitlines()[0]}")
            counts[end] += 1
            latest = max(latest, seconds if end == "before" else 0.0)
    told = ", ".join(f"{count} {end}" for end, count in sorted(counts.items()))
    print(
        f"{given.signals} signals: {told}; fasttrain's first line was reached {latest:.3f} s after the start at the latest"
    )
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
