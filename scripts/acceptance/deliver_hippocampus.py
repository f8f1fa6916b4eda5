"""Proves what is delivered of a run: predictions on the inputs' grids that score as `evaluate` does, and exports that agree.

    python scripts/acceptance/deliver_hippocampus.py --data DIR [--work DIR] [--run RUN] [--steps 80] [--device cpu]

DIR is Task04_Hippocampus; without `--run` a small network is trained for a few steps. The validation cases are copied to a folder
and predicted. Of each file affine, shape and label values are held against the input's and the label's, and its Dice, counted
by NumPy alone, against `evaluate --json`. The bundle is run by `python -m monai.bundle` in a process of its own, and ONNX by
onnxruntime, whose logits must agree to 1e-3.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nibabel as nib
import numpy as np
import onnxruntime
import torch

from fasttrain.delivery.export.plain import open_plain, real_windows

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = [
    *("network.features=[8,16,32]", "network.strides=[2,2]", "optimizer.learning_rate=3e-3", "training.batch_size=4"),
    *("training.epochs=1", "validation.mirror=[]", "output.pictures=off"),
]
CLASSES = {"anterior": 1, "posterior": 2}
MOST_LOGITS, MOST_VOXELS = 1e-3, 1e-3
FEW = 8
"""Cases that monai.bundle runs on."""


def command(*arguments: str, cwd: Path = CHECKOUT) -> str:
    """What a Python module prints on stdout; ends this script where it fails."""
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=cwd, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments[:3])} ended with {done.returncode}")
    return done.stdout


def faults_of_predictions(scores: dict[str, dict[str, dict[str, float]]], data: Path, out: Path) -> list[str]:
    """One sentence for each prediction that is not as it should be."""
    faults = []
    for name, classes in scores.items():
        given, made = nib.load(data / f"imagesTr/{name}.nii.gz"), nib.load(out / f"{name}.nii.gz")
        label, found = np.asarray(nib.load(data / f"labelsTr/{name}.nii.gz").dataobj), np.asarray(made.dataobj)
        if made.shape != given.shape or not np.array_equal(made.affine, given.affine):
            faults.append(f"{name}: another grid than its input's")
        if not set(np.unique(found)) <= {0, *CLASSES.values()}:
            faults.append(f"{name}: label values {np.unique(found)}")
        for one, value in CLASSES.items():
            ours, theirs = found == value, label == value
            dice = 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum())
            if abs(dice - classes[one]["dice"]) > 1e-6:
                faults.append(f"{name}: Dice of {one} is {dice:.6f}, and evaluate has {classes[one]['dice']:.6f}")
    return faults


def logits_apart(run: Path, path: Path) -> float:
    """The largest difference of a logit, ONNX against the run's network."""
    model = open_plain(run, None)
    windows = real_windows(model)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = model.network(windows).numpy()
    return float(np.abs(session.run(None, {session.get_inputs()[0].name: windows.numpy()})[0] - expected).max())


def main() -> int:
    """The exit code: 0 where everything agrees."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--run", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    work = (given.work or Path(tempfile.mkdtemp())).resolve()
    work.mkdir(parents=True, exist_ok=True)
    run, device = (given.run or work / "run").resolve(), ("--device", given.device)
    given.data = given.data.resolve()
    if given.run is None:
        values = [part for one in [*SMALL, f"training.iterations_per_epoch={given.steps}"] for part in ("--set", one)]
        command(
            "fasttrain",
            "train",
            "--recipe",
            "hippocampus",
            "--data",
            str(given.data),
            "--run",
            str(run),
            *device,
            *values,
        )
    scored = json.loads(command("fasttrain", "evaluate", str(run), *device, "--json"))
    (work / "in").mkdir(exist_ok=True)
    for name in scored["cases"]:
        shutil.copy(given.data / f"imagesTr/{name}.nii.gz", work / "in")
    command("fasttrain", "predict", str(run), str(work / "in"), str(work / "out"), *device)
    faults = faults_of_predictions(scored["cases"], given.data, work / "out")
    for format in ("bundle", "onnx"):
        command("fasttrain", "export", str(run), "--format", format, "--overwrite")
    apart = logits_apart(run, run / "export/model.onnx")
    if not apart <= MOST_LOGITS:
        faults.append(f"ONNX is {apart:.2g} of a logit apart")
    configs = ["--config_file", "configs/inference.json", "--meta_file", "configs/metadata.json"]
    (work / "few").mkdir(exist_ok=True)
    few = sorted(scored["cases"])[:FEW]
    for name in few:
        shutil.copy(work / f"in/{name}.nii.gz", work / "few")
    folders = ["--dataset_dir", str((work / "few").resolve()), "--output_dir", str((work / "bundle").resolve())]
    command("monai.bundle", "run", *configs, *folders, cwd=run / "export/bundle")
    differing = [
        float((np.asarray(nib.load(path).dataobj) != np.asarray(nib.load(work / "out" / path.name).dataobj)).mean())
        for path in sorted((work / "bundle").iterdir())
    ]
    # The run may compute in bf16, the bundle does not
    if len(differing) != len(few) or max(differing) > MOST_VOXELS:
        faults.append(
            f"the bundle wrote {len(differing)} files, the worst with {max(differing, default=1):.2%} other voxels"
        )
    print(
        f"{len(scored['cases'])} cases, mean Dice {scored['dice']:.4f}; ONNX within {apart:.1e} of a logit; "
        f"bundle with at most {max(differing, default=1):.3%} other voxels a case"
    )
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
