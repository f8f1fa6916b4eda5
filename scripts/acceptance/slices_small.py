"""Proves that a 2D network learns from the slices of volumes without a GPU: BraTS at 2 mm with a small network.

    python scripts/acceptance/slices_small.py --data DIR [--work DIR] [--epochs 3]

DIR holds imagesTr and labelsTr in nnU-Net's layout, two channels (FLAIR, T1c), labels 1 to 4 of which any is tumour. All
cases but the last train; its volume is scored, predicted, and the Dice of the written file, as a volume and slice by
slice, is taken by hand and must be what `evaluate` says. Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel as nib
import numpy as np

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = [
    *("data.source.kind=nnunet", "data.channels=[FLAIR,T1c]", "data.label_map={2: 1, 3: 1, 4: 1}"),
    *("data.split.kind=last", "data.split.validation=1", "data.intensity.background=lowest"),
    *("data.spacing=[2,2,2]", "patch.size=[128,128]", "network.features=[16,32,64,96]", "network.strides=[2,2,2]"),
    *("optimizer.learning_rate=3e-3", "training.iterations_per_epoch=40", "training.batch_size=8"),
    *("acceleration.threads=auto", "validation.every=3"),
]
LEAST_DICE = 0.8


def command(*arguments: str) -> str:
    """What a command of fasttrain prints on stdout; ends this script where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "fasttrain", *arguments], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"fasttrain {arguments[0]} ended with {done.returncode}")
    return done.stdout


def dice(prediction: np.ndarray, label: np.ndarray) -> float | None:
    """Of two masks; None where both are empty."""
    total = int(prediction.sum()) + int(label.sum())
    return 2.0 * int((prediction & label).sum()) / total if total else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=lambda text: Path(text).absolute(), required=True)
    parser.add_argument("--work", type=lambda text: Path(text).absolute())
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="slices-"))
    run, given, out = work / "run", work / "given", work / "out"
    began = time.monotonic()
    values = [part for value in (*SMALL, f"training.epochs={arguments.epochs}") for part in ("--set", value)]
    train = ("--recipe", "brain-tumor-2d", "--data", str(arguments.data), "--device", "cpu", "--run", str(run))
    command("train", *train, *values)
    scores = json.loads(command("evaluate", str(run), "--device", "cpu", "--json"))
    (name,) = scores["cases"]
    given.mkdir(parents=True)
    for path in arguments.data.glob(f"imagesTr/{name}_*"):
        (given / path.name).symlink_to(path.resolve())
    command("predict", str(run), str(given), str(out), "--device", "cpu")
    seconds = time.monotonic() - began
    written = nib.load(out / f"{name}.nii.gz")
    (path,) = arguments.data.glob(f"labelsTr/{name}.nii*")
    label = nib.load(path)
    assert np.allclose(written.affine, label.affine)
    predicted, expected = (np.asanyarray(one.dataobj) > 0 for one in (written, label))
    ends = nib.orientations.io_orientation(label.affine)[:, 0].tolist()
    slices = zip(np.moveaxis(predicted, ends.index(2), 0), np.moveaxis(expected, ends.index(2), 0), strict=True)
    counted = [value for one, other in slices if (value := dice(one, other)) is not None]
    mine = dice(predicted, expected), float(np.mean(counted))
    agree = np.allclose(mine, (scores["dice"], scores["slice_dice"]), atol=1e-6)
    with (run / "metrics.csv").open() as file:
        paces = [float(row["patches_per_second"]) for row in csv.DictReader(file)]
    print(
        f"{name}: Dice {scores['dice']:.4f} as a volume, {scores['slice_dice']:.4f} slice by slice, {seconds:.0f} s in all"
    )
    print(f"{np.median(paces):.0f} slices a second")
    print(
        f"by hand {mine[0]:.4f} and {mine[1]:.4f} of {len(counted)} slices: {'the same' if agree else 'NOT THE SAME'}"
    )
    return 0 if agree and scores["dice"] > LEAST_DICE else 1


if __name__ == "__main__":
    sys.exit(main())
