"""Proves that dose prediction learns without a GPU: OpenKBP at 8 mm with a small network, from import to predictions.

    python scripts/acceptance/openkbp_small.py --data DIR [--work DIR] [--epochs 24]

DIR holds train-pats and validation-pats in CSV. They are imported, a run is trained on the compact files, its best
weights are scored again and predict each validation patient, and the CSV of each is scored by itself: it must give
the same dose score, and that must be far below the 21 Gy of a constant. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from fasttrain.data.openkbp import GRID, STRUCTURES, VOXELS, read_patient  # noqa: E402
from fasttrain.data.sources.openkbp import every_patient  # noqa: E402
from fasttrain.data.sparse_csv import read_sparse  # noqa: E402
from fasttrain.scoring import score_dose  # noqa: E402

SMALL = [
    *("data.spacing=[8,8,8]", "patch.size=[48,48,32]", "patch.foreground=1.0"),
    *("network.features=[16,32,64,64]", "network.dropout=0", "optimizer.learning_rate=3e-3", "schedule.warmup=0.05"),
    *(
        "training.iterations_per_epoch=20",
        "training.ema.decay=0.98",
        "validation.every=12",
        "validation.window.batch_size=4",
    ),
]
MOST_GY = 10.0
"""Half of what a constant is off by."""


def command(*arguments: str) -> str:
    """What a command of fasttrain prints on stdout; ends this script where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "fasttrain", *arguments], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"fasttrain {arguments[0]} ended with {done.returncode}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=lambda text: Path(text).absolute(), required=True)
    parser.add_argument("--work", type=lambda text: Path(text).absolute())
    parser.add_argument("--epochs", type=int, default=24)
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="openkbp-"))
    compact, run, out = work / "compact", work / "run", work / "doses"
    began = time.monotonic()
    imported = json.loads(command("data", "import", "openkbp", str(arguments.data), str(compact), "--json"))
    values = [part for value in (*SMALL, f"training.epochs={arguments.epochs}") for part in ("--set", value)]
    command("train", "--recipe", "openkbp", "--data", str(compact), "--device", "cpu", "--run", str(run), *values)
    scores = json.loads(command("evaluate", str(run), "--device", "cpu", "--json"))
    command("predict", str(run), str(compact / "validation-pats"), str(out), "--device", "cpu")
    seconds = time.monotonic() - began
    mine = []
    for case in every_patient(compact / "validation-pats"):
        patient = read_patient(case, STRUCTURES)
        assert patient.dose is not None
        dose = read_sparse(out / f"{case.name}.csv", VOXELS).dense(GRID)
        mine.append(
            score_dose(case.name, dose, patient.dose, patient.structures, STRUCTURES, patient.spacing).dose_score
        )
    print(f"{imported['csv_bytes'] / 1e6:.0f} MB of CSV became {imported['compact_bytes'] / 1e6:.0f} MB")
    print(
        f"dose score {scores['dose_score_gy']:.2f} Gy, DVH score {scores['dvh_score_gy']:.2f} Gy, {seconds:.0f} s in all"
    )
    agree = abs(float(np.mean(mine)) - scores["dose_score_gy"]) < 1e-3
    print(f"the predicted CSV files score {np.mean(mine):.2f} Gy: {'the same' if agree else 'NOT THE SAME'}")
    return 0 if agree and scores["dose_score_gy"] < MOST_GY else 1


if __name__ == "__main__":
    sys.exit(main())
