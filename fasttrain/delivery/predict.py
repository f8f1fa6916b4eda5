"""Owns predictions for files that have no label: on the input's grid, with its affine and the recipe's label values.

The values written are those of `data.classes` and 0: a label map is not undone (with `{255: 1}` the class is written as 1, since
several values may have become one), and no voxel is written as the ignore label, since a network answers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fasttrain.data.file_names import as_file_name
from fasttrain.data.nifti import is_nifti
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources.found import listed
from fasttrain.data.sources.unlabelled import channels_of_one_case, find_unlabelled, label_files, passed_over
from fasttrain.data.writing import write_label
from fasttrain.delivery.done_before import DoneBefore
from fasttrain.delivery.predict_dose import predict_doses
from fasttrain.delivery.predictions import Predictions, make_folder_of
from fasttrain.delivery.room import refuse_beyond_memory
from fasttrain.delivery.trained import TrainedRun
from fasttrain.delivery.window_memory import fit_windows, with_fewer_windows
from fasttrain.engine.failures import explaining
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.inference import WindowsTold, WithinTold, telling
from fasttrain.errors import DataError, RecipeError
from fasttrain.recipe.data_spec import FoldersSource
from fasttrain.samples import Case
from fasttrain.whole_files import remove_halves_of
from fasttrain.wording import counted

ENDING = ".nii.gz"
"""Of predictions in a folder."""


def predict(
    run: TrainedRun,
    given: Path,
    target: Path,
    progress: Callable[[int, int], None],
    stop: StopRequest,
    overwrite: bool = False,
    within: WithinTold | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Predictions:
    """Predicts a file, or every case of a folder (in the file layout of the recipe's source); doses as `predict_dose` has it.

    target: a folder, or for one case a file that ends in `.nii.gz` or `.nii`. within: hears of the windows of large cases.
    warn: hears, before anything is predicted, what the names of the files leave in doubt. A faulty input is told and the rest is
    done. Predictions that are done (`DoneBefore`) are skipped. Raises DataError where nothing is there to predict, RecipeError
    where one file is named for several cases or other files lie where predictions go (unless `overwrite`), StorageError where
    nothing can be written, Stopped between cases.
    """
    if run.recipe.task == "dose":
        return predict_doses(run, given, target, progress, stop, overwrite, within, warn)
    faults: list[str] = []
    cases = find_unlabelled(run.recipe.data, given, run.channel_suffixes, faults)
    one_file = is_nifti(target) and not target.is_dir()
    if one_file and len(cases) > 1:
        raise RecipeError(f"{target} is one file, and {given} holds {len(cases)} cases; name a folder")
    folder = target.parent if one_file else target
    make_folder_of(folder)
    targets = [target if one_file else target / as_file_name(f"{case.name}{ENDING}") for case in cases]
    remove_halves_of(folder, [path.name for path in targets])
    before = DoneBefore(folder, run)
    done = [not overwrite and before.holds(case, path) for case, path in zip(cases, targets, strict=True)]
    there = [
        path
        for case, path, one in zip(cases, targets, done, strict=True)
        if path.exists() and not one and not _harm(case, path)
    ]
    if there and not overwrite:
        raise RecipeError(
            f"{len(there)} of {len(cases)} predictions are there already, such as {there[0]}, and were not made of these inputs "
            "by these weights, or were changed since; name another folder, or add --overwrite"
        )
    labels = label_files(run.recipe.data, given, run.channel_suffixes)
    over = passed_over(given, cases, labels)
    for sentence in _doubts(run, cases, labels, over):
        warn(sentence)
    run.predictor.warn = warn
    preprocess = Preprocess(run.recipe, training=False)
    written: list[Path] = []
    if not all(done):
        with explaining(run.recipe):
            fit_windows(run, warn)
    for number, (case, path, skipped) in enumerate(zip(cases, targets, done, strict=True), start=1):
        stop.check()
        if skipped:
            continue
        try:
            told = telling(within, number - 1, len(cases), case.name)
            _predict_case(run, preprocess, case, path, told, warn, partial(before.note, case, path))
            written.append(path)
        except DataError as error:
            faults.extend(error.faults)
        progress(number, len(cases))
    left = tuple(path for path, skipped in zip(targets, done, strict=True) if skipped)
    return Predictions(tuple(written), tuple(faults), over, labels, left)


def _doubts(run: TrainedRun, cases: Sequence[Case], labels: Sequence[Path], over: Sequence[Path]) -> Iterator[str]:
    """One sentence for each way in which files may not be what they were taken for."""
    source = run.recipe.data.source
    if labels and isinstance(source, FoldersSource):
        many = len(labels) > 1
        yield (
            f"{counted(len(labels), 'file')} {'end' if many else 'ends'} in {source.label_suffix} as the run's labels do, and "
            f"{'were' if many else 'was'} not predicted ({listed(path.name for path in labels)})"
        )
    if over:
        many = len(over) > 1
        yield (
            f"{counted(len(over), 'NIfTI file')} {'do' if many else 'does'} not end as the recipe's data.source says and "
            f"{'were' if many else 'was'} passed over ({listed(path.name for path in over)})"
        )
    if len(run.recipe.data.channels) == 1 and (groups := channels_of_one_case(cases)):
        more = f" (and {counted(len(groups) - 1, 'group')} more)" if len(groups) > 1 else ""
        yield (
            f"{' and '.join(groups[0]) if len(groups[0]) == 2 else listed(groups[0])}{more} look like channels of one case, "
            "but the run has one channel, so that each file is predicted as a case of its own"
        )


def _harm(case: Case, path: Path) -> str | None:
    """What a prediction written to `path` would destroy that is no prediction."""
    if any(path.resolve() == image.resolve() for image in case.images):
        return "its own input"
    if path.exists() and path.parent.resolve() == case.images[0].parent.resolve():
        return "a file beside its input"
    if path.exists() and path.parent.resolve() / path.name.removesuffix(ENDING) in case.images[0].resolve().parents:
        # Beside the folder of a DICOM case, where its mask may lie
        return "a file beside its input"
    return None


def _predict_case(
    run: TrainedRun,
    preprocess: Preprocess,
    case: Case,
    path: Path,
    told: WindowsTold | None,
    warn: Callable[[str], None],
    note: Callable[[Path], None],
) -> None:
    if harm := _harm(case, path):
        raise DataError(f"{path}: the prediction would overwrite {harm}; name another folder")
    refuse_beyond_memory(case, run.recipe)
    with explaining(run.recipe):
        sample = preprocess.as_sample(preprocess(case))
        class_map = with_fewer_windows(run, lambda: run.predictor.class_map(sample, True, told), warn).cpu().numpy()
    write_label(path, class_map, case.images[0], run.recipe.data.class_values, note)
