"""Runs the test suite in several pytest processes at once, each with a few files of one folder, and sums up what they say.

    python scripts/run_tests.py [--jobs 2] [--files 12] [PYTEST ARGUMENT]…

Most tests keep one core busy or wait for another process, so that two at a time take little more than half as long. A process
takes the next group when it has ended one, the largest folders first, so that all cores are busy until the end. The output of a
group is printed whole once it is over, the slowest groups at the end. Exit code 1 where any group failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)")
_NO_TESTS = 5
_SLOWEST = 5


def groups(files: int) -> list[list[Path]]:
    """Test files by folder, at most so many a group, the folders with most files first."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folders.setdefault(path.parent, []).append(path)
    found = []
    for inside in sorted(folders.values(), key=len, reverse=True):
        parts = -(-len(inside) // files)
        found += [inside[number::parts] for number in range(parts)]
    return found


class Runner:
    """Starts pytest for one group after another; `end` ends those that still run."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def run(self, group: list[Path]) -> tuple[int, str, float]:
        """(exit code, output, seconds) of a group."""
        words = [sys.executable, "-m", "pytest", *self.arguments, *(str(path.relative_to(ROOT)) for path in group)]
        began = time.monotonic()
        with self._lock:
            if self._ended:
                return 1, "", 0.0
            # A group of its own, so that all of it can be ended
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        output, _ = process.communicate()
        with self._lock:
            self._running.discard(process)
        return process.returncode, output, time.monotonic() - began

    def end(self) -> None:
        """Ends every pytest under way."""
        with self._lock:
            self._ended = True
            for process in self._running:
                os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    options = _options()
    # A shell that put this into the background would have every test ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runner, began = Runner(options.arguments), time.monotonic()
    counts, failed, taken = Counter[str](), list[str](), dict[str, float]()
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            waiting = {pool.submit(runner.run, group): group for group in groups(options.files)}
            for done in as_completed(waiting):
                code, output, seconds = done.result()
                name = _name(waiting[done])
                print(f"-- {name}: {seconds:.0f} s, exit code {code}\n{output}", flush=True)
                counts.update(
                    {noun: int(number) for number, noun in _COUNT.findall(output.rstrip().rpartition("\n")[2])}
                )
                taken[name] = seconds
                if code not in (0, _NO_TESTS):
                    failed += [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))] or [name]
        except BaseException:
            runner.end()
            raise
    for name in sorted(taken, key=lambda one: -taken[one])[:_SLOWEST]:
        print(f"{taken[name]:6.0f} s  {name}")
    print("\n".join(failed))
    told = ", ".join(f"{number} {noun}" for noun, number in sorted(counts.items()))
    print(f"{told or 'no tests'} in {time.monotonic() - began:.0f} s, {options.jobs} at a time")
    return 1 if failed else 0


def _name(group: list[Path]) -> str:
    return f"{group[0].relative_to(ROOT)} and {len(group) - 1} more"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    )
    parser.add_argument("--files", type=int, default=12, help="Most files a group.")
    options, arguments = parser.parse_known_args()
    options.arguments = arguments
    return options


if __name__ == "__main__":
    sys.exit(main())
