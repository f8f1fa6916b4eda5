"""Makes OpenKBP patients of a few blocks, in the challenge's own files."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

GRID = (128, 128, 128)
PLACE, INDEX = (3, 5, 7), 49799
"""A voxel and its index in the files."""
PLACE_DOSE = 12.345


def write_patient(folder: Path, seed: int = 0, dose: bool = True) -> Path:
    """A body of CT values, a target with a dose that falls with distance, both parotids and a brainstem; shuffled rows.

    The voxel (3, 5, 7) lies inside the mask and has a dose of its own.
    """
    folder.mkdir(parents=True)
    for name, text in _files(seed).items():
        if dose or name != "dose.csv":
            (folder / name).write_text(text)
    return folder


@functools.lru_cache(maxsize=8)
def _files(seed: int) -> dict[str, str]:
    rng = np.random.default_rng(seed)
    ct = np.zeros(GRID)
    ct[44:86, 38:90, 42:86] = 1000 + 50 * rng.integers(0, 5)
    ct[50:60, 50:60, 50:60] = 19798
    target = np.zeros(GRID, dtype=bool)
    middle = rng.integers(55, 70, 3)
    target[tuple(slice(one - 8, one + 8) for one in middle)] = True
    mask = np.zeros(GRID, dtype=bool)
    mask[46:84, 46:84, 46:84] = True
    mask[PLACE] = True
    away = np.sqrt(sum((axis - one) ** 2 for axis, one in zip(np.ogrid[:128, :128, :128], middle, strict=True)))
    given = np.where(mask, np.round(np.maximum(70 - 1.5 * np.maximum(away - 8, 0), 0.5), 3), 0)
    given[PLACE] = PLACE_DOSE
    left, right, stem = (np.zeros(GRID, dtype=bool) for _ in range(3))
    left[60:66, 80:86, 60:70], right[60:66, 40:46, 60:70], stem[66:72, 60:66, 45:55] = True, True, True
    masks = {"possible_dose_mask": mask, "PTV70": target, "LeftParotid": left, "RightParotid": right, "Brainstem": stem}
    files = {"ct.csv": _values(ct, rng), "dose.csv": _values(given, rng), "voxel_dimensions.csv": "4.0\n4.0\n2.5\n"}
    for name, inside in masks.items():
        indices = rng.permutation(np.flatnonzero(inside)).tolist()
        files[f"{name}.csv"] = ",data\n" + "".join(f"{index},\n" for index in indices)
    return files


def _values(volume: np.ndarray, rng: np.random.Generator) -> str:
    indices = rng.permutation(np.flatnonzero(volume.reshape(-1)))
    rows = zip(indices.tolist(), volume.reshape(-1)[indices].tolist(), strict=True)
    return ",data\n" + "".join(f"{index},{value}\n" for index, value in rows)
