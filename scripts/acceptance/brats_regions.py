"""Proves that overlapping regions are learnt, scored and written back: four patients of BraTS 2013, three of which train.

    python scripts/acceptance/brats_regions.py --data DIR [--work DIR] [--device cuda] [--least 0.85]

DIR holds imagesTr and labelsTr. Without a GPU a small network is trained at 2 mm; with one, scripts/acceptance/brats2013.yaml as
it stands. The best weights are scored on the patients that trained and on the fourth, each is predicted, and the regions of the
label files that were written are counted by NumPy alone: the scores must be the same, and the whole tumour's mean Dice over the
patients that trained must reach `--least`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPE = CHECKOUT / "scripts/acceptance/brats2013.yaml"
REGIONS = {"whole": (1, 2, 3, 4), "core": (1, 3, 4), "enhancing": (4,)}
SMALL = [
    *("data.spacing=[2,2,2]", "patch.size=[48,48,32]", "patch.foreground=0.7"),
    *("network.init_filters=8", "network.blocks_down=[1,1,1,1]"),
    *("training.batch_size=2", "training.epochs=4", "training.iterations_per_epoch=40", "validation.every=4"),
    *("acceleration.amp=off", "acceleration.channels_last=on"),
]


def command(*arguments: str) -> str:
    """What a command of fasttrain prints on stdout; ends this script where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "fasttrain", *arguments], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"fasttrain {arguments[0]} ended with {done.returncode}")
    return done.stdout


def dice(found: np.ndarray, label: np.ndarray, values: tuple[int, ...]) -> float:
    """Of one region, counted from two label files."""
    ours, theirs = np.isin(found, values), np.isin(label, values)
    return float(2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()))


def disagreement(scored: dict[str, Any], data: Path, out: Path) -> float:
    """The largest difference between a score of `evaluate` and the count of its label files."""
    largest = 0.0
    for name, regions in scored["cases"].items():
        found = np.asarray(nib.load(out / f"{name}.nii.gz").dataobj)
        label = np.rint(np.asarray(nib.load(data / f"labelsTr/{name}.nii.gz").dataobj))
        for region, values in REGIONS.items():
            largest = max(largest, abs(dice(found, label, values) - regions[region]["dice"]))
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=lambda text: Path(text).absolute(), required=True)
    parser.add_argument("--work", type=lambda text: Path(text).absolute())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--least", type=float)
    parser.add_argument("--set", action="append", default=[], help="further values of the recipe")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    least = arguments.least if arguments.least is not None else 0.75 if on_cpu else 0.85
    work = arguments.work or Path(tempfile.mkdtemp(prefix="brats-"))
    run, out, device = work / "run", work / "labels", ("--device", arguments.device)
    began = time.monotonic()
    values = [part for value in [*(SMALL if on_cpu else ()), *arguments.set] for part in ("--set", value)]
    command("train", "--recipe", str(RECIPE), "--data", str(arguments.data), "--run", str(run), *device, *values)
    trained = time.monotonic() - began
    scored = {
        part: json.loads(command("evaluate", str(run), "--part", part, *device, "--json"))
        for part in ("training", "validation")
    }
    command("predict", str(run), str(arguments.data / "imagesTr"), str(out), *device)
    print(f"{trained:.0f} s of training, {time.monotonic() - began:.0f} s in all")
    for part, scores in scored.items():
        told = ", ".join(f"{region} {scores['dice_by_class'][region]:.3f}" for region in REGIONS)
        print(f"{part} ({len(scores['cases'])}): {told}")
    largest = max(disagreement(scores, arguments.data, out) for scores in scored.values())
    agree = largest < 1e-9
    print(f"a count of the label files differs by {largest:.1e}: {'the same' if agree else 'NOT THE SAME'}")
    return 0 if agree and scored["training"]["dice_by_class"]["whole"] >= least else 1


if __name__ == "__main__":
    sys.exit(main())
