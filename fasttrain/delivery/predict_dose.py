"""Owns the doses predicted for patients: the CSV that the OpenKBP challenge takes, and the same as NIfTI."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fasttrain.data.file_names import as_file_name
from fasttrain.data.openkbp import affine_of, read_patient
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources.openkbp import every_patient, missing_files, patient_at
from fasttrain.data.sparse_csv import write_sparse
from fasttrain.data.writing import write_volume
from fasttrain.delivery.done_before import DoneBefore
from fasttrain.delivery.predictions import Predictions, make_folder_of
from fasttrain.delivery.trained import TrainedRun
from fasttrain.engine.failures import explaining
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.inference import WindowsTold, WithinTold, telling
from fasttrain.errors import DataError, RecipeError
from fasttrain.samples import Case
from fasttrain.whole_files import remove_halves_of

CSV, NIFTI = ".csv", ".nii.gz"


def predict_doses(
    run: TrainedRun,
    given: Path,
    target: Path,
    progress: Callable[[int, int], None],
    stop: StopRequest,
    overwrite: bool = False,
    within: WithinTold | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Predictions:
    """Predicts a patient (folder of CSV files or compact file), or every one of a folder; none needs a dose.

    target: a folder for `NAME.csv` and `NAME.nii.gz` in Gy, or for one patient a file that ends so. Raises as `predict` does.
    """
    one = patient_at(given) if given.exists() else None
    if one is None and not given.is_dir():
        raise DataError(f"{given} is no OpenKBP patient; name a patient's folder, a compact file, or a folder of them")
    cases = every_patient(given) if one is None else (one,)
    endings = [ending for ending in (CSV, NIFTI) if target.name.endswith(ending) and not target.is_dir()]
    if endings and len(cases) > 1:
        raise RecipeError(f"{target} is one file, and {given} holds {len(cases)} patients; name a folder")
    folder = target.parent if endings else target
    if folder.resolve() in {path.parent.resolve() for case in cases for path in case.images if path.suffix == CSV}:
        raise RecipeError(f"{folder} is the folder of a patient that is read; name another for the predictions")
    make_folder_of(folder)
    targets = {
        case.name: [target] if endings else [folder / as_file_name(f"{case.name}{ending}") for ending in (CSV, NIFTI)]
        for case in cases
    }
    remove_halves_of(folder, [path.name for paths in targets.values() for path in paths])
    before = DoneBefore(folder, run)
    made = {path for case in cases if not overwrite for path in targets[case.name] if before.holds(case, path)}
    done = {case.name for case in cases if made.issuperset(targets[case.name])}
    there = [path for paths in targets.values() for path in paths if path not in made and path.exists()]
    if there and not overwrite:
        raise RecipeError(f"{there[0]} is there already ({len(there)} in all); name another folder, or add --overwrite")
    run.predictor.warn = warn
    preprocess = Preprocess(run.recipe, training=False)
    written: list[Path] = []
    faults: list[str] = []
    for number, case in enumerate(cases, start=1):
        stop.check()
        if case.name in done:
            continue
        try:
            told = telling(within, number - 1, len(cases), case.name)
            _predict(run, preprocess, case, targets[case.name], told, before)
            written.extend(targets[case.name])
        except DataError as error:
            faults.extend(error.faults)
        progress(number, len(cases))
    left = tuple(path for case in cases if case.name in done for path in targets[case.name])
    return Predictions(tuple(written), tuple(faults), skipped=left)


def _predict(
    run: TrainedRun,
    preprocess: Preprocess,
    case: Case,
    targets: list[Path],
    told: WindowsTold | None,
    before: DoneBefore,
) -> None:
    if (fault := missing_files(case)) is not None:
        raise DataError(fault)
    names = run.recipe.data.class_names
    patient = read_patient(case, names)
    possible = (patient.structures >> len(names)) & 1 == 1
    if not possible.any():
        raise DataError(f"{case.images[0]}: patient {case.name} has no voxel in its possible dose mask")
    with explaining(run.recipe):
        sample = preprocess.as_sample(preprocess(case))
        dose = run.predictor.dose_map(sample, True, told).cpu().numpy()
    # As the challenge's reference is: nothing outside the mask
    dose = np.where(possible, dose, np.float32(0))
    for path in targets:
        note = partial(before.note, case, path)
        if path.name.endswith(CSV):
            write_sparse(path, dose, note)
        else:
            write_volume(path, dose, affine_of(patient.spacing), note)
