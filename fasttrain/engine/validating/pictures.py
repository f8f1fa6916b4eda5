"""Owns which cases of a validation become pictures, when, and which of their slices are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import nibabel as nib
import numpy as np
import torch
from torch import Tensor

from fasttrain.data.grids import spacing_of
from fasttrain.data.restore import to_source_grid
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.dose_pictures import dose_picture
from fasttrain.engine.validating.validation import Judged, Scores, Validator
from fasttrain.errors import EXIT_DONE
from fasttrain.recipe import Recipe
from fasttrain.recipe.regions import Regions
from fasttrain.samples import IGNORED, Grid
from fasttrain.scoring import CaseScore, DoseScore
from fasttrain.telemetry.dose_pictures import write_dose_picture
from fasttrain.telemetry.events import Event, Message, Progress
from fasttrain.telemetry.pictures import CasePicture, Plane, drop_pictures, write_picture


class Pictures:
    """Draws the worst, the median and the best case of a validation into `folder`, as `output.pictures` says.

    Only after the scores are known are these cases predicted again (unless the validator has kept the predictions of all,
    since they are few), so that a validation holds no volumes and takes no longer. Whatever fails is one warning; the rest
    of the run then goes without pictures.
    """

    def __init__(
        self, folder: Path, recipe: Recipe, validator: Validator, emit: Callable[[Event], None], stop: StopRequest
    ) -> None:
        self.folder = folder
        self.recipe = recipe
        self.validator = validator
        self.emit = emit
        self.stop = stop
        self._failed = False

    def draw(self, epoch: int, scores: Scores, last: bool, is_best: bool) -> None:
        """Draws where the validation of `epoch`, with the weights as they still are, is the last one or a best one wanted.

        A run that was told to stop is to end soon: it draws nothing, or no more. One that ends by itself (early stopping)
        has seen its last validation.
        """
        wanted = self.recipe.output.pictures
        last = last or (self.stop.asked and not self._in_haste())
        if wanted == "off" or not (last or (is_best and wanted == "best")) or self._failed:
            return
        cases = pick_cases(scores.cases)
        drop_pictures(self.folder, epoch, epoch)
        for done, (role, index) in enumerate(cases.items(), start=1):
            if self._in_haste():
                return
            fault = self._try_to_draw(epoch, role, index, scores.cases[index])
            if fault is not None:
                self._failed = True
                self.emit(
                    Message(
                        f"no picture of case {scores.cases[index].name} was drawn, nor will more be: {fault}", "warning"
                    )
                )
                return
            self.emit(Progress("drawing pictures", done, len(cases)))

    def _in_haste(self) -> bool:
        return self.stop.asked and self.stop.exit_code != EXIT_DONE

    def _try_to_draw(self, epoch: int, role: str, index: int, score: CaseScore | DoseScore) -> str | None:
        """Draws one case; what went wrong, where something did. Tells nobody: what a listener raises is not ours to catch."""
        try:
            if isinstance(score, DoseScore):
                names = self.recipe.data.class_names
                write_dose_picture(
                    dose_picture(self.validator.judge_dose(index), score, names, role, epoch), self.folder
                )
                return None
            judged = self.validator.judge(index)
            planes = planes_of(judged if self.recipe.regions is None else as_regions(judged, self.recipe.regions))
            dice = tuple(one.dice for one in score.classes)
            names = tuple(self.recipe.data.scored_names)
            write_picture(CasePicture(score.name, role, epoch, planes, names, dice), self.folder)
        except Exception as error:
            return str(error) or type(error).__name__
        return None


def pick_cases(scores: Sequence[CaseScore | DoseScore]) -> dict[str, int]:
    """The index in `scores` of the `worst`, `median` and `best` case by mean Dice over the classes that count in it, or by dose
    score.

    Two cases are the worst and the best, one is `only`; cases in which no class counts are none. Equal ones keep their order.
    """
    means = {index: mean for index, score in enumerate(scores) if (mean := _goodness(score)) is not None}
    order = sorted(means, key=means.__getitem__)
    if len(order) < 2:
        return dict(zip(["only"], order, strict=False))
    middle = {"median": order[(len(order) - 1) // 2]} if len(order) > 2 else {}
    return {"worst": order[0], **middle, "best": order[-1]}


def _goodness(score: CaseScore | DoseScore) -> float | None:
    if isinstance(score, DoseScore):
        return -score.dose_score
    counted = [one.dice for one in score.classes if one.dice is not None]
    return fmean(counted) if counted else None


def as_regions(judged: Judged, regions: Regions) -> Judged:
    """With the number of the last region that holds it, from 1 on, in the place of each voxel's class."""
    table = torch.tensor([regions.last_of(index) for index in range(IGNORED)] + [IGNORED], dtype=torch.uint8)
    table = table.to(judged.label.device)
    return replace(judged, prediction=table[judged.prediction.long()], label=table[judged.label.long()])


def planes_of(judged: Judged) -> tuple[Plane, ...]:
    """Axial, coronal and sagittal slices through the most foreground of label and prediction; a plane image as it is.

    They are cut along the voxel axes, each named by the world axis nearest to it. Of several channels the first is shown.
    Ignored voxels are no foreground, and what is predicted there is left out, as it is from the scores.
    """
    grid, label, prediction = judged.grid, judged.label, judged.prediction
    dimensions = len(grid.shape)
    ignored = label == IGNORED if judged.ignores else None
    if ignored is not None:
        prediction = prediction.masked_fill(ignored, 0)
    marked = (prediction > 0) | (label > 0 if ignored is None else (label > 0) & ~ignored)
    axes = nib.orientations.io_orientation(grid.affine[:, [*range(dimensions), 3]])
    toward = nib.orientations.ornt2axcodes(axes)
    spacing = [float(mm) for mm in spacing_of(grid.affine, dimensions)]
    # A slice across the patient's S-I axis is the axial one
    across: list[int | None] = [None] if dimensions == 2 else sorted(range(3), key=lambda axis: -axes[axis, 0])
    planes = []
    for axis in across:
        index = 0 if axis is None else _fullest_slice(marked, axis)
        first, second = (other for other in range(dimensions) if other != axis)
        planes.append(
            Plane(
                image=_image_on(judged, grid if axis is None else _slice_grid(grid, axis, index), axis),
                label=_slice(label, axis, index).cpu().numpy(),
                prediction=_slice(prediction, axis, index).cpu().numpy(),
                ignored=None if ignored is None else _slice(ignored, axis, index).cpu().numpy(),
                spacing_mm=(spacing[first], spacing[second]),
                toward=(toward[first], toward[second]),
            )
        )
    return tuple(planes)


def _fullest_slice(marked: Tensor, axis: int) -> int:
    """The middle one of those with the most marked voxels, so that a box is not cut at its side, nor an empty volume."""
    counts = marked.sum(dim=[other for other in range(marked.ndim) if other != axis])
    fullest = torch.nonzero(counts == counts.max()).flatten().tolist()
    return int(fullest[len(fullest) // 2])


def _slice(volume: Tensor, axis: int | None, index: int) -> Tensor:
    return volume if axis is None else volume.select(axis, index)


def _slice_grid(grid: Grid, axis: int, index: int) -> Grid:
    affine = grid.affine.copy()
    affine[:3, 3] += index * affine[:3, axis]
    return Grid(tuple(1 if other == axis else length for other, length in enumerate(grid.shape)), affine)


def _image_on(judged: Judged, grid: Grid, axis: int | None) -> np.ndarray:
    """The image where `grid` lies (of length 1 along `axis`), the only part of it that is ever resampled."""
    image = judged.sample.image[:1]
    values = to_source_grid(image, judged.sample.grid, grid, "linear", float(image.min()))[0]
    return np.asarray(_slice(values, axis, 0).float().cpu())
