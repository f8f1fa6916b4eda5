"""Owns which slices and curves of a predicted dose are shown."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import torch

from fasttrain.data.grids import spacing_of
from fasttrain.data.restore import to_source_grid
from fasttrain.engine.validating.validation import JudgedDose
from fasttrain.recipe.task import is_target
from fasttrain.scoring import DoseScore
from fasttrain.scoring.dose import dose_volume_curve
from fasttrain.telemetry.dose_pictures import Curve, DosePicture, DosePlane
from fasttrain.telemetry.pictures import Plane

_STEPS = 200
_AROUND = 4
_SHOWN = 2
"""Axial and coronal."""


def dose_picture(
    judged: JudgedDose, score: DoseScore, structures: tuple[str, ...], role: str, epoch: int
) -> DosePicture:
    """The picture of a case: slices through the most of its targets (else of its mask), and the curves of all its structures."""
    bits, doses = judged.bits, np.linspace(0.0, _highest(judged), _STEPS)
    possible = (bits >> len(structures)) & 1 == 1
    targets = np.zeros_like(possible)
    curves = []
    for bit, name in enumerate(structures):
        inside = (bits >> bit) & 1 == 1
        if is_target(name):
            targets |= inside
        if inside.any():
            pair = (np.where(possible, dose, 0)[inside] for dose in (judged.reference, judged.prediction))
            curves.append(Curve(name, *(dose_volume_curve(one, doses) for one in pair)))
    return DosePicture(
        case=score.name,
        role=role,
        epoch=epoch,
        planes=_planes(judged, targets, possible),
        curves=tuple(curves),
        doses=doses,
        dose_score=score.dose_score,
        dvh_score=score.dvh_score,
    )


def _highest(judged: JudgedDose) -> float:
    return max(float(judged.reference.max()), float(judged.prediction.max()), 1.0) * 1.05


def _planes(judged: JudgedDose, targets: np.ndarray, possible: np.ndarray) -> tuple[DosePlane, ...]:
    grid, sample = judged.grid, judged.sample
    image = to_source_grid(sample.image[:1].float(), sample.grid, grid, "linear", 0.0)[0].cpu().numpy()
    axes = nib.orientations.io_orientation(grid.affine)
    toward, spacing = nib.orientations.ornt2axcodes(axes), spacing_of(grid.affine, 3)
    planes = []
    box = _box(possible)
    for axis in sorted(range(3), key=lambda one: -axes[one, 0])[:_SHOWN]:
        index = _fullest(targets if targets.any() else possible, axis)
        first, second = (other for other in range(3) if other != axis)
        cut = lambda volume, axis=axis, index=index: np.take(volume, index, axis)[  # noqa: E731
            tuple(part for other, part in enumerate(box) if other != axis)
        ]
        plane = Plane(
            cut(image),
            cut(judged.reference),
            cut(judged.prediction),
            (float(spacing[first]), float(spacing[second])),
            (toward[first], toward[second]),
        )
        planes.append(DosePlane(plane, cut(targets), cut(possible)))
    return tuple(planes)


def _box(mask: np.ndarray) -> tuple[slice, ...]:
    """Where the mask lies and a few voxels around it: most of a volume is air."""
    spans = []
    for axis, length in enumerate(mask.shape):
        hits = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)))
        first, last = (int(hits[0]), int(hits[-1])) if len(hits) else (0, length - 1)
        spans.append(slice(max(first - _AROUND, 0), last + 1 + _AROUND))
    return tuple(spans)


def _fullest(mask: np.ndarray, axis: int) -> int:
    counts = mask.sum(axis=tuple(other for other in range(3) if other != axis))
    fullest = torch.nonzero(torch.from_numpy(counts == counts.max())).flatten().tolist()
    return int(fullest[len(fullest) // 2])
