"""Owns the deterministic path from the files of a case to one training-ready volume, and the record it is kept as."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Orientation, Spacing, SpatialCrop, SpatialPad, Transform

from fasttrain.data.centres import background_centres, class_centres, shifted
from fasttrain.data.grids import in_four, spacing_of
from fasttrain.data.intensity import intensity_step
from fasttrain.data.reading import FLOAT16_LIMIT, read_image, read_label
from fasttrain.data.volumes import SAME_SPACING_MM
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec
from fasttrain.recipe.recipe import Recipe
from fasttrain.samples import Case, Grid, Sample

_RAS_LABELS = (("L", "R"), ("P", "A"), ("I", "S"))


class Preprocess(Transform):
    """Case → record: read, orient, resample, scale intensities, crop to the foreground, pad, find centres, cast.

    With `training=False` volumes are not padded to the patch and no centres are sought: sliding windows pad by themselves.
    Holds no state that a call changes, so threads and worker processes may share it.
    """

    def __init__(self, recipe: Recipe, training: bool = True) -> None:
        data = recipe.data
        self.data: DataSpec = data
        self.recipe_name = recipe.name
        self.patch = recipe.patch
        self.dimensions = recipe.dimensions
        self.training = training
        self._orient = (
            Orientation(axcodes=data.orientation, labels=_RAS_LABELS)
            if data.orientation and self.dimensions == 3
            else None
        )
        self._resample_image = _spacing(data.spacing, "bilinear")
        self._resample_label = _spacing(data.spacing, "nearest")
        self._scale = intensity_step(data.intensity)

    def __call__(self, case: Case) -> dict[str, Any]:
        """The record of a case: tensors and plain Python values only, so that it loads with `weights_only=True`.

        Raises DataError with every fault of the case.
        """
        image, label, source_grid = self._read(case)
        start = self._local_affine(source_grid)
        steps = [MetaTensor(torch.from_numpy(image), affine=start)]
        if label is not None:
            steps.append(MetaTensor(torch.from_numpy(label), affine=start))
        steps = self._orient_and_resample(steps, source_grid)
        steps[0] = self._scale(steps[0]) if self._scale else steps[0]
        steps = self._crop(steps)
        record: dict[str, Any] = {"name": case.name, "centres": [], "background_centres": None}
        if self.training:
            seen = tuple(steps[0].shape[1:])
            centres, background = self._centres(steps)
            steps, before = self._pad(steps)
            padded = tuple(steps[0].shape[1:])
            record["centres"] = [shifted(found, seen, padded, before) for found in centres]
            record["background_centres"] = None if background is None else shifted(background, seen, padded, before)
        grid = self._grid_after(steps[0], source_grid, start)
        record |= {
            "image": self._stored(case, _plain(steps[0])),
            "label": _plain(steps[1]).to(torch.uint8) if label is not None else None,
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
            grid=Grid(tuple(record["shape"]), record["affine"].numpy()),
            source_grid=Grid(tuple(record["source_shape"]), record["source_affine"].numpy()),
        )

    def _read(self, case: Case) -> tuple[np.ndarray, np.ndarray | None, Grid]:
        """Both are read before anything is raised, so that one pass shows every fault of the case."""
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

    def _local_affine(self, grid: Grid) -> np.ndarray:
        """What MONAI sees. A plane gets an affine of its spacing alone, since MONAI would drop its third world axis."""
        if self.dimensions == 3:
            return grid.affine
        return np.diag([*spacing_of(grid.affine, 2), 1.0])

    def _grid_after(self, image: MetaTensor, source: Grid, start: np.ndarray) -> Grid:
        local = np.asarray(image.affine, dtype=np.float64)
        if self.dimensions == 2:
            local = source.affine @ in_four(np.linalg.solve(start, local))
        return Grid(tuple(image.shape[1:]), np.array(local))

    def _orient_and_resample(self, steps: list[MetaTensor], source: Grid) -> list[MetaTensor]:
        if self._orient is not None:
            steps = [self._orient(step) for step in steps]
        if self._resample_image is None or self.data.spacing is None:
            return steps
        affine = np.asarray(steps[0].affine) if self.dimensions == 3 else source.affine
        if np.abs(spacing_of(affine, self.dimensions) - self.data.spacing).max() < SAME_SPACING_MM:
            return steps
        return [
            resample(step) for resample, step in zip((self._resample_image, self._resample_label), steps, strict=False)
        ]

    def _crop(self, steps: list[MetaTensor]) -> list[MetaTensor]:
        """A volume with nothing above the threshold is kept whole."""
        spec = self.data.crop_foreground
        if spec is None:
            return steps
        inside = (steps[0].as_tensor() > spec.above).any(dim=0)
        if not inside.any():
            return steps
        begin, end = [], []
        for axis, length in enumerate(inside.shape):
            others = tuple(other for other in range(inside.ndim) if other != axis)
            hits = inside.amax(dim=others).nonzero()
            begin.append(max(int(hits[0]) - spec.margin, 0))
            end.append(min(int(hits[-1]) + 1 + spec.margin, length))
        crop = SpatialCrop(roi_start=begin, roi_end=end)
        return [crop(step) for step in steps]

    def _centres(self, steps: list[MetaTensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Found before padding, so that no padded voxel counts as background."""
        above = self.patch.background_above
        if len(steps) < 2:
            return [], None
        label = np.asarray(steps[1].as_tensor())[0]
        background = None if above is None else background_centres(np.asarray(steps[0].as_tensor()), label, above)
        return class_centres(label, self.data.class_count - 1), background

    def _pad(self, steps: list[MetaTensor]) -> tuple[list[MetaTensor], tuple[int, ...]]:
        shape, size = steps[0].shape[1:], self.patch.size
        if all(length >= wanted for length, wanted in zip(shape, size, strict=True)):
            return steps, (0,) * len(size)
        pad = SpatialPad(spatial_size=[max(pair) for pair in zip(shape, size, strict=True)], method="symmetric")
        before = tuple(max(wanted - length, 0) // 2 for length, wanted in zip(shape, size, strict=True))
        return [pad(step) for step in steps], before

    def _stored(self, case: Case, image: torch.Tensor) -> torch.Tensor:
        if self.data.storage_dtype == "float16":
            _refuse_overflow(case, max(-float(image.min()), float(image.max())))
            return image.to(torch.float16)
        return image


def _spacing(spacing: tuple[float, ...] | None, mode: str) -> Spacing | None:
    # float32 is exact to 1e-4 voxel at 1000 voxels an axis, at half the time and memory of MONAI's float64.
    return None if spacing is None else Spacing(pixdim=spacing, mode=mode, padding_mode="border", dtype=np.float32)


def _plain(values: MetaTensor) -> torch.Tensor:
    """Contiguous, and owning no more memory than it shows."""
    tensor = values.as_tensor().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _refuse_overflow(case: Case, largest: float) -> None:
    if largest > FLOAT16_LIMIT:
        raise DataError(
            f"{case.images[0]} reaches {largest:.6g} after preprocessing, beyond float16's {FLOAT16_LIMIT:.0f}; set "
            "data.storage_dtype: float32, or scale with data.intensity"
        )
