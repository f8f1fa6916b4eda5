"""Owns predictions for files that have no label: on the input's grid, with its affine and the recipe's label values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fasttrain.data.nifti import is_nifti
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources.unlabelled import find_unlabelled, passed_over
from fasttrain.data.writing import write_label
from fasttrain.delivery.trained import TrainedRun
from fasttrain.engine.failures import explaining
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.samples import Case

ENDING = ".nii.gz"
"""Of predictions in a folder."""


@dataclass(frozen=True)
class Predictions:
    """What was written, one sentence for each input that could not be read, and files that fit no case by their names."""

    written: tuple[Path, ...]
    faults: tuple[str, ...]
    passed_over: tuple[Path, ...] = ()


def predict(
    run: TrainedRun,
    given: Path,
    target: Path,
    progress: Callable[[int, int], None],
    stop: StopRequest,
    overwrite: bool = False,
) -> Predictions:
    """Predicts a file, or every case of a folder (in the file layout of the recipe's source).

    target: a folder, or for one case a file that ends in `.nii.gz` or `.nii`. A faulty input is told and the rest is done. Raises
    DataError where nothing is there to predict, RecipeError where one file is named for several cases or predictions are there
    already (unless `overwrite`), StorageError where nothing can be written, Stopped between cases.
    """
    cases = find_unlabelled(run.recipe.data, given, run.channel_suffixes)
    one_file = is_nifti(target) and not target.is_dir()
    if one_file and len(cases) > 1:
        raise RecipeError(f"{target} is one file, and {given} holds {len(cases)} cases; name a folder")
    folder = target.parent if one_file else target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be made: {error.strerror}; name another folder for the predictions"
        ) from error
    targets = [target if one_file else target / f"{case.name}{ENDING}" for case in cases]
    there = [path for case, path in zip(cases, targets, strict=True) if path.exists() and not _harm(case, path)]
    if there and not overwrite:
        raise RecipeError(
            f"{len(there)} of {len(cases)} predictions are there already, such as {there[0]}; name another folder, or add "
            "--overwrite"
        )
    preprocess = Preprocess(run.recipe, training=False)
    written: list[Path] = []
    faults: list[str] = []
    for number, (case, path) in enumerate(zip(cases, targets, strict=True), start=1):
        stop.check()
        try:
            _predict_case(run, preprocess, case, path)
            written.append(path)
        except DataError as error:
            faults.extend(error.faults)
        progress(number, len(cases))
    return Predictions(tuple(written), tuple(faults), passed_over(run.recipe.data, given, cases))


def _harm(case: Case, path: Path) -> str | None:
    """What a prediction written to `path` would destroy that is no prediction."""
    if any(path.resolve() == image.resolve() for image in case.images):
        return "its own input"
    if path.exists() and path.parent.resolve() == case.images[0].parent.resolve():
        return "a file beside its input"
    return None


def _predict_case(run: TrainedRun, preprocess: Preprocess, case: Case, path: Path) -> None:
    if harm := _harm(case, path):
        raise DataError(f"{path}: the prediction would overwrite {harm}; name another folder")
    with explaining(run.recipe):
        sample = preprocess.as_sample(preprocess(case))
        class_map = run.predictor.class_map(sample, in_source_grid=True).cpu().numpy()
    write_label(path, class_map, case.images[0], run.recipe.data.class_values)
