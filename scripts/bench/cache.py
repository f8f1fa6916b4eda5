"""What stored volumes take, what `data.storage_dtype` does to them, and when the first step comes with a cold and a warm cache.

    python scripts/bench/cache.py --recipe hippocampus --data DIR [--set KEY=VALUE]… [--starts 3] [--kinds none memory disk lmdb]

Three tables. Sizes: the training volumes in memory and in the files of each kind, as float32 and as float16; "int32 lists" is
memory as it was when lists of foreground voxels were int32 in every volume. Change: of crops cut from float16 volumes against
the same crops of float32, the largest of any voxel (against that voxel, in float16's normal range) and of any crop (the norm of
the difference against the crop's). First step: `fasttrain train` as a process of its own, `--starts` times a row, medians of the
seconds from the call to the end of the first step, which `summary.json` has. "Cold" is an empty cache folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FLOAT16_NORMAL = 2.0**-14


def main() -> None:
    options = _options()
    base = Path(tempfile.mkdtemp(prefix="cache-bench-"))
    try:
        _print_sizes(options, base)
        if options.starts:
            _print_first_steps(options, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="hippocampus")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--kinds", nargs="+", default=["none", "memory", "disk", "lmdb"])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--crops", type=int, default=4, help="a case")
    return parser.parse_args()


def _opened(options: argparse.Namespace, dtype: str, kind: str, folder: Path) -> tuple[Any, Any]:
    import os

    from fasttrain import load_recipe
    from fasttrain.data.caches import open_case_source
    from fasttrain.data.location import data_root
    from fasttrain.data.preprocess import Preprocess
    from fasttrain.data.sources import find_cases
    from fasttrain.recipe import yaml_text

    given = {key: yaml_text.parse(value, key) for key, _, value in (text.partition("=") for text in options.set)}
    recipe = load_recipe(options.recipe, {**given, "data.storage_dtype": dtype}).recipe
    cases = find_cases(recipe.data, data_root(recipe, options.data, os.environ)).cases
    return recipe, open_case_source(kind, cases, Preprocess(recipe), 2, folder=folder)


def _print_sizes(options: argparse.Namespace, base: Path) -> None:
    kept, rows = {}, [("stored as", "memory MiB", "int32 lists MiB", "disk MiB", "lmdb MiB")]
    for dtype in ("float32", "float16"):
        recipe, kept[dtype] = _opened(options, dtype, "memory", base)
        now, before = 0, 0
        for sample in (kept[dtype][index] for index in range(len(kept[dtype]))):
            lists = [one for one in (*sample.centres, sample.background_centres) if one is not None]
            volumes = sample.image.nbytes + sample.label.nbytes
            now += volumes + sum(one.nbytes for one in lists)
            before += volumes + sum(4 * one.numel() for one in lists)
        stored = []
        for kind in ("disk", "lmdb"):
            _opened(options, dtype, kind, base / dtype)[1].close()
            stored.append(sum(path.stat().st_size for path in (base / dtype / kind).rglob("*") if path.is_file()))
        rows.append((dtype, *(f"{count / (1 << 20):.1f}" for count in (now, before, *stored))))
    print(f"{options.recipe}: {len(kept['float32'])} cases, padded to {'×'.join(map(str, recipe.patch.size))}")
    _print(rows)
    voxel, crop = _largest_changes(recipe, kept["float32"], kept["float16"], options.crops)
    print(f"\ncrops of float16 against float32: a voxel changes by at most {voxel:.2e}, a crop by at most {crop:.2e}\n")


def _largest_changes(recipe: Any, full: Any, half: Any, crops: int) -> tuple[float, float]:
    import torch

    from fasttrain.augment import Chances
    from fasttrain.batches.crop import CaseCentres, CentreTables, cut

    voxel, whole = 0.0, 0.0
    for index in range(len(full)):
        tables = CentreTables((CaseCentres.of(full[index]),))
        corners = tables.corners([0] * crops, recipe.patch, Chances(index, torch.arange(crops)))
        for corner in corners.tolist():
            wanted = cut(full[index].image, corner, recipe.patch.size).double()
            change = (cut(half[index].image, corner, recipe.patch.size).double() - wanted).abs()
            voxel = max(voxel, float((change / wanted.abs().clamp(min=FLOAT16_NORMAL)).max()))
            whole = max(whole, float(change.norm() / wanted.norm().clamp(min=FLOAT16_NORMAL)))
    return voxel, whole


def _print_first_steps(options: argparse.Namespace, base: Path) -> None:
    rows = [("cache", "s to first step", "spread")]
    for kind in options.kinds:
        stores = kind in ("disk", "lmdb")
        for name in (f"{kind}, cold", f"{kind}, warm") if stores else (kind,):
            found = []
            for number in range(options.starts):
                if name.endswith("cold"):
                    shutil.rmtree(base / "volumes", ignore_errors=True)
                found.append(_seconds_to_first_step(options, kind, base, base / f"run-{kind}-{len(rows)}-{number}"))
            rows.append((name, f"{statistics.median(found):.1f}", f"{min(found):.1f}–{max(found):.1f}"))
            print(f"{name}: {found}", file=sys.stderr, flush=True)
    _print(rows)


def _seconds_to_first_step(options: argparse.Namespace, kind: str, base: Path, run: Path) -> float:
    fixed = {
        "training.epochs": 1,
        "training.iterations_per_epoch": 2,
        "data.cache.kind": kind,
        "data.cache.folder": base / "volumes",
        "output.plots": "false",
        "output.pictures": "off",
        # What is measured is over when it comes; few volumes end the run soon, and fold 0 has as many to read
        "validation.mirror": "[]",
    }
    command = [sys.executable, "-m", "fasttrain", "train", "--recipe", options.recipe, "--run", str(run)]
    command += ["--data", str(options.data)] if options.data else []
    sets = [*options.set, *(f"{key}={value}" for key, value in fixed.items())]
    done = subprocess.run(
        [*command, *(part for one in sets for part in ("--set", one))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if done.returncode:
        raise SystemExit(done.stderr.decode(errors="replace"))
    seconds = json.loads((run / "summary.json").read_text())["seconds"]["to_first_step"]
    shutil.rmtree(run)
    return float(seconds)


def _print(table: list[tuple[str, ...]]) -> None:
    for number, row in enumerate(table):
        print("| " + " | ".join(row) + " |")
        if number == 0:
            print("|" + "---|" * len(row))


if __name__ == "__main__":
    main()
