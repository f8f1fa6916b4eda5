"""Says what a network must beat on OpenKBP: the dose score of a constant, and of a table of dose against distance to the targets.

    python scripts/bench/dose_baselines.py --data DIR

Both are learnt from the patients of `train-pats` and scored on those of `validation-pats`, by the scores that a run has. The
constant is the median dose of all voxels inside the possible dose masks. The table has the median dose by the nearest target
(its prescription; inside of several the highest) and the distance from it in bins of 2 mm, 0 inside. DIR may hold CSV or what
`fasttrain data import openkbp` made of it.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from scipy.ndimage import distance_transform_edt  # noqa: E402

from fasttrain.data.openkbp import STRUCTURES, Patient, read_patient  # noqa: E402
from fasttrain.data.sources import find_cases  # noqa: E402
from fasttrain.data.splits import split_cases  # noqa: E402
from fasttrain.recipe import resolve  # noqa: E402
from fasttrain.recipe.task import is_target  # noqa: E402
from fasttrain.samples import Case  # noqa: E402
from fasttrain.scoring import DoseScore, score_dose, summarise_doses  # noqa: E402

BIN_MM = 2.0
BINS = 200


def possible(patient: Patient) -> np.ndarray:
    """Bool: the possible dose mask."""
    return np.asarray((patient.structures >> len(STRUCTURES)) & 1 == 1)


def places(patient: Patient) -> np.ndarray:
    """The table's place of each voxel inside the mask, int [n]: nearest target × BINS + bin of the distance."""
    targets = [bit for bit, name in enumerate(STRUCTURES) if is_target(name)]
    mask, nearest = possible(patient), None
    best = np.zeros(mask.sum(), dtype=np.int64)
    # Of targets as near the last one, which has the highest prescription
    for bit in targets:
        inside = (patient.structures >> bit) & 1 == 1
        if not inside.any():
            continue
        distance = distance_transform_edt(~inside, sampling=patient.spacing)[mask]
        closer = np.ones_like(distance, dtype=bool) if nearest is None else distance <= nearest
        best[closer] = bit
        nearest = distance if nearest is None else np.minimum(nearest, distance)
    assert nearest is not None, "a patient without a target"
    return best * BINS + np.minimum(nearest / BIN_MM, BINS - 1).astype(np.int64)


def table_of(patients: Iterable[Patient]) -> np.ndarray:
    """Median dose by place; where nothing was seen that of the nearest bin before it."""
    doses: dict[int, list[np.ndarray]] = defaultdict(list)
    for patient in patients:
        assert patient.dose is not None
        where, dose = places(patient), patient.dose[possible(patient)]
        order = np.argsort(where, kind="stable")
        found, starts = np.unique(where[order], return_index=True)
        for place, part in zip(found.tolist(), np.split(dose[order], starts[1:]), strict=True):
            doses[place].append(part)
    table = np.full(len(STRUCTURES) * BINS, np.nan)
    for place, parts in doses.items():
        table[place] = np.median(np.concatenate(parts))
    for row in table.reshape(-1, BINS):
        for place in range(1, BINS):
            row[place] = row[place - 1] if np.isnan(row[place]) else row[place]
    return np.nan_to_num(table)


def scores_of(cases: Sequence[Case], predict: Callable[[Patient], np.ndarray | float]) -> list[DoseScore]:
    """The scores of what `predict` says of the voxels inside each patient's mask."""
    scores = []
    for case in cases:
        patient = read_patient(case, STRUCTURES)
        assert patient.dose is not None
        dose = np.zeros_like(patient.dose)
        dose[possible(patient)] = predict(patient)
        scores.append(score_dose(case.name, dose, patient.dose, patient.structures, STRUCTURES, patient.spacing))
    return scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    data = resolve("openkbp").recipe.data
    split = split_cases(find_cases(data, parser.parse_args().data).cases, data.split)
    training = [read_patient(case, STRUCTURES) for case in split.train]
    constant = float(np.median(np.concatenate([one.dose[possible(one)] for one in training if one.dose is not None])))
    table = table_of(training)
    both = {
        f"constant {constant:.1f} Gy": scores_of(split.validation, lambda patient: constant),
        "dose by distance to targets": scores_of(split.validation, lambda patient: table[places(patient)]),
    }
    for name, scores in both.items():
        summary = summarise_doses(scores, STRUCTURES)
        by_case = ", ".join(f"{score.name} {score.dose_score:.2f}" for score in scores)
        print(f"{name}: dose score {summary.dose_score:.2f} Gy, DVH score {summary.dvh_score:.2f} Gy ({by_case})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
