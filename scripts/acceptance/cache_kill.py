"""Proves that a cache whose fill is killed never lies: a process that stores volumes is ended by SIGKILL at random moments, and
after every kill each tensor that the cache gives is, bit for bit, the one that the files and the recipe give.

    python scripts/acceptance/cache_kill.py [--kinds disk lmdb] [--kills 10] [--cases 24] [--seed 0] [--data DIR --recipe NAME]

The data are made phantoms where no recipe is named. After a kill the cache is copied and the copy is opened, which builds what
is missing; the next process goes on with what the kill left, and begins anew once all of it is there. Every second kill of
the disk cache waits until a volume is being written.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "data")]

from cache_checks import assert_same, opened_with_lines  # noqa: E402

from fasttrain import load_recipe  # noqa: E402
from fasttrain.data.caches import open_case_source  # noqa: E402
from fasttrain.data.preprocess import Preprocess  # noqa: E402
from fasttrain.data.sources import find_cases  # noqa: E402
from fasttrain.samples import Case, Sample  # noqa: E402

WORKERS = 2


@dataclass(frozen=True)
class Setting:
    """Which volumes are stored."""

    recipe: str
    data: Path
    cases: int

    def open(self) -> tuple[tuple[Case, ...], Preprocess]:
        """The cases, made where they are phantoms, and how they are preprocessed."""
        changed = {"data.source.cases": self.cases, "data.storage_dtype": "float16"} if self.recipe == "demo" else {}
        recipe = load_recipe(self.recipe, changed).recipe
        return find_cases(recipe.data, self.data).cases, Preprocess(recipe)


@dataclass(frozen=True)
class Kill:
    """What one kill left."""

    kind: str
    number: int
    after_seconds: float
    were_there: str
    half_written: int


def fill(setting: Setting, kind: str, cache: Path) -> None:
    """The process that is killed."""
    cases, preprocess = setting.open()
    print("ready", flush=True)
    open_case_source(kind, cases, preprocess, WORKERS, folder=cache).close()
    print("filled", flush=True)


def start(setting: Setting, kind: str, cache: Path) -> subprocess.Popen[str]:
    """A process of its own, at the moment when it begins to fill."""
    command = [sys.executable, __file__, "--fill", str(cache), "--kinds", kind, "--cases", str(setting.cases)]
    command += ["--recipe", setting.recipe, "--data", str(setting.data)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"FAULT: the process ended with {process.wait()} before it began")
    return process


def proves(setting: Setting, kinds: Sequence[str], kills: int, base: Path, rng: random.Random) -> list[Kill]:
    """Kills and compares; AssertionError where a tensor differs."""
    cases, preprocess = setting.open()
    wanted = [preprocess.as_sample(preprocess(case)) for case in cases]
    done: list[Kill] = []
    for kind in kinds:
        cache = base / kind
        begun = time.monotonic()
        process = start(setting, kind, cache)
        ready = time.monotonic()
        assert process.stdout is not None
        process.stdout.readline()
        whole = time.monotonic() - ready  # and not until it has ended: leaving torch takes longer than a short fill
        if process.wait() != 0:
            raise SystemExit(f"FAULT: a fill that nobody kills ends with {process.returncode}")
        print(
            f"{kind}: {len(cases)} cases are stored in {whole:.2f} s, {ready - begun:.1f} s after the start", flush=True
        )
        shutil.rmtree(cache)
        while sum(kill.kind == kind for kill in done) < kills:
            process = start(setting, kind, cache)
            moment = rng.uniform(0.0, whole)
            time.sleep(moment)
            if kind == "disk" and len(done) % 2:
                _wait_for_writing(process, cache)
            process.kill()
            if process.wait() != -signal.SIGKILL:
                shutil.rmtree(cache)  # it was done before: this was no kill
                continue
            half = len(list(cache.rglob("*.part")))
            there = compare(cases, preprocess, wanted, kind, cache, base / "copy")
            done.append(Kill(kind, sum(kill.kind == kind for kill in done) + 1, moment, there, half))
            if there.startswith(f"{len(cases)} of"):
                shutil.rmtree(cache)
    return done


def _wait_for_writing(process: subprocess.Popen[str], cache: Path) -> None:
    """Until a volume is being written, which takes so little of a fill that a moment drawn from it all would seldom be one."""
    while process.poll() is None and not any(cache.rglob("*.part")):
        pass


def compare(
    cases: tuple[Case, ...], preprocess: Preprocess, wanted: list[Sample], kind: str, cache: Path, copy: Path
) -> str:
    """Opens a copy of what the kill left, twice; gives how much of it was there."""
    shutil.rmtree(copy, ignore_errors=True)
    if cache.exists():
        shutil.copytree(cache, copy)
    told = []
    for _ in ("what the kill left", "made whole"):
        source, lines, warnings = opened_with_lines(kind, cases, preprocess, copy)
        assert warnings == [], warnings  # a kill leaves no damaged entry, only fewer of them
        for index, sample in enumerate(wanted):
            assert_same(source[index], sample)
        source.close()
        told.append(lines[0].split(": ", 1)[1].split(" cases", 1)[0])
    assert told[1] == f"{len(cases)} of {len(cases)}"
    assert list(copy.rglob("*.part")) == []
    return told[0]


def main(arguments: Sequence[str] | None = None) -> list[Kill]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["disk", "lmdb"], choices=["disk", "lmdb"])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.fill is not None:
        fill(Setting(options.recipe, options.data, options.cases), options.kinds[0], options.fill)
        return []
    base = Path(tempfile.mkdtemp(prefix="cache-kill-"))
    try:
        setting = Setting(options.recipe, options.data or base / "phantoms", options.cases)
        done = proves(setting, options.kinds, options.kills, base, random.Random(options.seed))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print("| kind | kill | s after the fill began | entries that were there | half-written files | tensors |")
    print("|---|---|---|---|---|---|")
    for kill in done:
        print(
            f"| {kill.kind} | {kill.number} | {kill.after_seconds:.2f} | {kill.were_there} | {kill.half_written} | all equal |"
        )
    return done


if __name__ == "__main__":
    main()
