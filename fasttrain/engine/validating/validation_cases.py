"""Owns the cases of a validation with what they are scored against, and which of them stay in the GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fasttrain.data.grids import exact_moves
from fasttrain.data.openkbp import read_patient
from fasttrain.data.reading import read_label
from fasttrain.data.restore import to_source_grid
from fasttrain.engine.validating.inference import sent
from fasttrain.errors import DataError
from fasttrain.recipe import Recipe
from fasttrain.samples import Case, CaseSource, Grid, Sample


@dataclass(frozen=True, eq=False)
class ValidationCase:
    """A case as validation needs it: `image` [channel, *spatial] on `grid`, and `reference`, uint8 class indices [*spatial] on
    the grid that is scored; `source_grid` is that of the file. The two tensors lie together, on the host or on the GPU. Of a dose
    `label` lies with the image and holds the structures on `grid`, and `reference` is float32 [2, *spatial]: Gy, and the bits
    of the structures.
    """

    name: str
    image: Tensor
    reference: Tensor
    grid: Grid
    source_grid: Grid
    label: Tensor | None = None


class ValidationCases:
    """Cases by index. Against the grid of the file the reference is the file's own label, kept as uint8 where `keep_labels` says
    that the cases are kept in memory anyway.

    resident_bytes: what may stay on `device`, where that is a GPU; the first cases that fit do.
    """

    def __init__(
        self, source: CaseSource, cases: Sequence[Case], recipe: Recipe, device: torch.device, keep_labels: bool
    ) -> None:
        self.source = source
        self.cases = cases
        self.recipe = recipe
        self.device = device
        self.keep_labels = keep_labels
        self.resident_bytes = 0
        self._resident: dict[int, ValidationCase] = {}
        self._under_way: dict[int, ValidationCase] = {}
        self._labels: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> ValidationCase:
        """The case, which is the same one until it is `finished`."""
        case = self._resident.get(index) or self._under_way.get(index)
        if case is None:
            case = self._under_way[index] = self._read(index)
        return case

    def finished(self, index: int) -> ValidationCase:
        """The case for the last time in this validation."""
        case = self[index]
        self._under_way.pop(index, None)
        return case

    def _read(self, index: int) -> ValidationCase:
        sample = self.source[index]
        case = ValidationCase(sample.name, sample.image, self.reference(index, sample), sample.grid, sample.source_grid)
        dose = self.recipe.task == "dose"
        if dose:
            case = replace(case, label=sample.label)
        beside = case.label if dose else case.reference
        assert beside is not None
        wanted = case.image.nbytes + beside.nbytes
        if wanted <= self.resident_bytes:
            image, beside = sent(case.image, self.device), sent(beside, self.device)
            # A dose is scored in the host's memory, where its reference stays
            case = replace(case, image=image, label=beside) if dose else replace(case, image=image, reference=beside)
            self.resident_bytes -= wanted
            self._resident[index] = case
        return case

    @property
    def resident(self) -> int:
        """How many stay on the device."""
        return len(self._resident)

    def reference(self, index: int, sample: Sample) -> Tensor:
        """uint8 class indices [*spatial] on the grid that is scored, in the host's memory; of a dose see ValidationCase."""
        assert sample.label is not None
        if self.recipe.task == "dose":
            return self._dose(index, sample)
        if self.recipe.validation.grid != "original":
            return sample.label[0]
        if self.recipe.data.crop_foreground is None and exact_moves(sample.source_grid, sample.grid) is not None:
            # Nothing was resampled or cut away: the label is the file's in another order
            return to_source_grid(sample.label, sample.grid, sample.source_grid, "nearest", 0)[0]
        label = self._labels.get(index)
        if label is None:
            array, _ = read_label(
                self.cases[index], self.recipe.data, self.recipe.volume_dimensions, sample.source_grid
            )
            label = torch.from_numpy(np.ascontiguousarray(array[0]))
            if self.keep_labels:
                self._labels[index] = label
        return label

    def _dose(self, index: int, sample: Sample) -> Tensor:
        """As the files have it, since what is kept for training is rounded to the storage type."""
        assert sample.label is not None
        if self.recipe.validation.grid != "original":
            return torch.stack([sample.image[-1].float() * self.recipe.data.dose_scale, sample.label[0].float()])
        dose = self._labels.get(index)
        if dose is None:
            patient = read_patient(self.cases[index], self.recipe.data.class_names)
            if patient.dose is None:
                raise DataError(f"case {sample.name} has no dose to be scored against")
            dose = torch.from_numpy(np.stack([patient.dose, patient.structures.astype(np.float32)]))
            if self.keep_labels:
                self._labels[index] = dose
        return dose

    def scored_grid(self, case: ValidationCase | Sample) -> Grid:
        """The grid of its reference."""
        return case.source_grid if self.recipe.validation.grid == "original" else case.grid

    def let_go(self) -> None:
        """Gives the GPU's memory back, and takes none again."""
        self._resident.clear()
        self._under_way.clear()
        self.resident_bytes = 0

    def close(self) -> None:
        """Gives up the cases."""
        self.let_go()
        self.source.close()
