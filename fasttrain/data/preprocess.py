"""Owns the deterministic path from the files of a case to one training-ready volume, and the record it is kept as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fasttrain.data.centres import background_centres, class_centres, shifted
from fasttrain.data.grids import in_four, spacing_of
from fasttrain.data.intensity import intensity_step
from fasttrain.data.openkbp import affine_of, read_patient
from fasttrain.data.reading import FLOAT16_LIMIT, read_image, read_label
from fasttrain.data.resample import resample
from fasttrain.data.volumes import SAME_SPACING_MM, axes_along, slices_first
from fasttrain.errors import DataError
from fasttrain.ranges import part
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.recipe.recipe import Recipe
from fasttrain.samples import IGNORED, Case, Grid, Sample

_Moved = tuple[list[torch.Tensor], np.ndarray]
"""Image and label [channel, *spatial] and their common affine."""


class Preprocess:
    """Case → record: read, orient, resample, scale intensities, crop to the foreground, slice, pad, find centres, cast.

    With `training=False` volumes are not padded to the patch and no centres are sought: sliding windows pad by themselves.
    Holds no state that a call changes, so threads and worker processes may share it. Moving voxels is done here, since MONAI's
    transforms take several times as long to keep their records.
    """

    def __init__(self, recipe: Recipe, training: bool = True) -> None:
        data = recipe.data
        self.data: DataSpec = data
        self.recipe_name = recipe.name
        self.patch = recipe.patch
        self.box = recipe.box
        self.dimensions = recipe.volume_dimensions
        self.training = training
        self.task = recipe.task
        self._scale = intensity_step(data.intensity)

    def __call__(self, case: Case) -> dict[str, Any]:
        """The record of a case: tensors and plain Python values only, so that it loads with `weights_only=True`.

        Raises DataError with every fault of the case.
        """
        with part("preprocess"):
            return self._made(case)

    def _made(self, case: Case) -> dict[str, Any]:
        image, label, source_grid = self._read(case)
        start = affine = self._local_affine(source_grid)
        steps = [torch.from_numpy(values) for values in (image, label) if values is not None]
        steps, affine = self._oriented(steps, affine)
        steps, affine = self._resampled(steps, affine, source_grid)
        if self._scale is not None:
            self._scale(self._of_files(steps[0]))
        steps, affine = self._cropped(steps, affine)
        steps, affine = self._sliced(steps, affine)
        record: dict[str, Any] = {"name": case.name, "centres": [], "background_centres": None}
        if self.training:
            seen = tuple(steps[0].shape[1:])
            record["filled"] = self._filled(steps)
            centres, background = self._centres(steps)
            steps, affine, before = self._padded(steps, affine)
            padded = tuple(steps[0].shape[1:])
            record["centres"] = [shifted(found, seen, padded, before) for found in centres]
            record["background_centres"] = None if background is None else shifted(background, seen, padded, before)
        grid = self._grid_after(steps[0], affine, source_grid, start)
        record |= {
            "image": self._stored(case, _plain(steps[0])),
            "label": None
            if label is None
            else _plain(steps[1]).to(torch.int16 if self.task == "dose" else torch.uint8),
            "shape": list(grid.shape),
            "affine": torch.from_numpy(grid.affine),
            "source_shape": list(source_grid.shape),
            "source_affine": torch.from_numpy(source_grid.affine.copy()),
        }
        return record

    def as_sample(self, record: dict[str, Any]) -> Sample:
        """The record as a Sample; nothing is copied."""
        return Sample(
            name=record["name"],
            image=record["image"],
            label=record["label"],
            centres=tuple(record["centres"]),
            background_centres=record["background_centres"],
            filled=record.get("filled"),
            grid=Grid(tuple(record["shape"]), record["affine"].numpy()),
            source_grid=Grid(tuple(record["source_shape"]), record["source_affine"].numpy()),
        )

    def _read(self, case: Case) -> tuple[np.ndarray, np.ndarray | None, Grid]:
        """Both are read before anything is raised, so that one pass shows every fault of the case."""
        if self.task == "dose":
            return self._read_dose(case)
        faults: list[str] = []
        image, grid, label = None, None, None
        try:
            image, grid = read_image(case, self.data, self.dimensions)
        except DataError as error:
            faults.extend(error.faults)
        try:
            if case.label is not None:
                label, _ = read_label(case, self.data, self.dimensions, grid)
        except DataError as error:
            faults.extend(error.faults)
        if faults or image is None or grid is None:
            raise DataError(faults)
        return image, label, grid

    def _read_dose(self, case: Case) -> tuple[np.ndarray, np.ndarray, Grid]:
        """CT and dose as two channels (a patient without a dose has none of it), and the bits of its structures."""
        patient = read_patient(case, self.data.class_names)
        dose = np.zeros_like(patient.ct) if patient.dose is None else patient.dose / np.float32(self.data.dose_scale)
        grid = Grid(patient.ct.shape, affine_of(patient.spacing))
        return np.stack([patient.ct, dose]), patient.structures[None], grid

    def _of_files(self, image: torch.Tensor) -> torch.Tensor:
        """The channels of the files, without a dose, as a view."""
        return image[: len(self.data.channels)]

    def _local_affine(self, grid: Grid) -> np.ndarray:
        """What MONAI sees. A plane gets an affine of its spacing alone, since MONAI would drop its third world axis."""
        if self.dimensions == 3:
            return grid.affine
        return np.diag([*spacing_of(grid.affine, 2), 1.0])

    def _grid_after(self, image: torch.Tensor, affine: np.ndarray, source: Grid, start: np.ndarray) -> Grid:
        local = np.asarray(affine, dtype=np.float64)
        if self.dimensions == 2:
            local = source.affine @ in_four(np.linalg.solve(start, local))
        return Grid(tuple(image.shape[1:]), np.array(local))

    def _oriented(self, steps: list[torch.Tensor], affine: np.ndarray) -> _Moved:
        """With the axes in the order and direction of `data.orientation`."""
        order, against = axes_along(affine, self.dimensions, self.data.orientation)
        if not any(against) and order == sorted(order):
            return steps, affine
        flipped = [axis for axis, flip in enumerate(against) if flip]
        lengths = steps[0].shape[1:]
        moves = np.zeros((self.dimensions + 1, self.dimensions + 1))
        moves[-1, -1] = 1.0
        for axis, own in enumerate(order):
            moves[own, axis] = -1.0 if against[own] else 1.0
            moves[own, -1] = lengths[own] - 1 if against[own] else 0.0
        return [_turned(step, order, flipped) for step in steps], affine @ moves

    def _resampled(self, steps: list[torch.Tensor], affine: np.ndarray, source: Grid) -> _Moved:
        spacing = self.data.spacing
        if spacing is None:
            return steps, affine
        own = spacing_of(affine if self.dimensions == 3 else source.affine, self.dimensions)
        if np.abs(own - spacing).max() < SAME_SPACING_MM:
            return steps, affine
        return resample(steps, affine, own, spacing)

    def _cropped(self, steps: list[torch.Tensor], affine: np.ndarray) -> _Moved:
        """A volume with nothing above the threshold is kept whole."""
        spec = self.data.crop_foreground
        if spec is None:
            return steps, affine
        inside = (self._of_files(steps[0]) > spec.above).any(dim=0)
        if not inside.any():
            return steps, affine
        begin, spans = [], [slice(None)]
        for axis, length in enumerate(inside.shape):
            others = tuple(other for other in range(inside.ndim) if other != axis)
            hits = inside.amax(dim=others).nonzero()
            begin.append(max(int(hits[0]) - spec.margin, 0))
            spans.append(slice(begin[-1], min(int(hits[-1]) + 1 + spec.margin, length)))
        return [step[tuple(spans)] for step in steps], _begun_at(affine, begin)

    def _sliced(self, steps: list[torch.Tensor], affine: np.ndarray) -> _Moved:
        """With the axis across which `data.slices` cuts first, so that each slice lies together in memory."""
        if self.data.slices is None:
            return steps, affine
        order = slices_first(affine, self.data.slices.axis)
        return [_turned(step, order, ()) for step in steps], affine[:, [*order, 3]]

    def _filled(self, steps: list[torch.Tensor]) -> torch.Tensor | None:
        """Which slices hold a class, uint8 [slice]; None of a volume that is not sliced or has no label."""
        if self.data.slices is None or len(steps) < 2:
            return None
        label = steps[1].numpy()[0]
        # A sum of what is no background would count ignored voxels
        holds = [bool(((one > 0) & (one != IGNORED)).any()) for one in label]
        return torch.tensor(holds, dtype=torch.uint8)

    def _centres(self, steps: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Found before padding, so that no padded voxel counts as background."""
        above = self.patch.background_above
        if len(steps) < 2:
            return [], None
        label = steps[1].numpy()[0]
        if self.task == "dose":
            label = (label >> len(self.data.classes)) & 1
        background = None if above is None else background_centres(self._of_files(steps[0]).numpy(), label, above)
        if self.task == "dose":
            return class_centres(label, 1), background
        return class_centres(label, self.data.class_count - 1), background

    def _padded(
        self, steps: list[torch.Tensor], affine: np.ndarray
    ) -> tuple[list[torch.Tensor], np.ndarray, tuple[int, ...]]:
        """Filled with zeros to the patch on both sides, where a volume is smaller, and how many voxels came before it."""
        shape, size = tuple(steps[0].shape[1:]), self.box
        before = tuple(max(wanted - length, 0) // 2 for length, wanted in zip(shape, size, strict=True))
        whole = tuple(max(pair) for pair in zip(shape, size, strict=True))
        if whole == shape:
            return steps, affine, before
        spans = (slice(None), *(slice(first, first + length) for first, length in zip(before, shape, strict=True)))
        padded = []
        for step in steps:
            # NumPy's, since a small copy by torch's threads waits for those of other cases
            wide = np.zeros((step.shape[0], *whole), dtype=step.numpy().dtype)
            wide[spans] = step.numpy()
            padded.append(torch.from_numpy(wide))
        return padded, _begun_at(affine, [-first for first in before]), before

    def _stored(self, case: Case, image: torch.Tensor) -> torch.Tensor:
        if self.data.storage_dtype == "float16":
            _refuse_overflow(case, max(-float(image.min()), float(image.max())))
            return image.to(torch.float16)
        return image


def _turned(step: torch.Tensor, order: Sequence[int], flipped: Sequence[int]) -> torch.Tensor:
    """[channel, *spatial] with axes of the file turned round and then permuted; torch has no views that run backwards."""
    values = step.numpy()
    if flipped:
        values = np.flip(values, tuple(axis + 1 for axis in flipped)).copy()
    return torch.from_numpy(values.transpose(0, *(axis + 1 for axis in order)))


def _begun_at(affine: np.ndarray, first: Sequence[int]) -> np.ndarray:
    """The affine of a volume whose voxel 0 is the voxel `first` of that of `affine`."""
    moved = np.array(affine, dtype=np.float64)
    moved[:-1, -1] += moved[:-1, :-1] @ np.array(first, dtype=np.float64)
    return moved


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and owning no more memory than it shows."""
    tensor = tensor.contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _refuse_overflow(case: Case, largest: float) -> None:
    if largest > FLOAT16_LIMIT:
        raise DataError(
            f"{case.images[0]} reaches {largest:.6g} after preprocessing, beyond float16's {FLOAT16_LIMIT:.0f}; set "
            "data.storage_dtype: float32, or scale with data.intensity"
        )
