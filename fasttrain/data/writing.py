"""Owns label files that go back to the user: the grid, header codes and label values of the input, written whole."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import nibabel as nib
import numpy as np
import torch

from fasttrain.data.nifti import NiftiHeader
from fasttrain.data.volume_files import read_header
from fasttrain.whole_files import write_whole


def write_label(
    path: Path,
    class_map: np.ndarray | torch.Tensor,
    source: Path,
    class_values: Sequence[int],
    before_rename: Callable[[Path], None] = lambda temporary: None,
) -> None:
    """Writes class indices [*spatial] as the label values `class_values[index]` (at most 255), uint8, on the grid of `source`.

    `source` is the case's image file, from which affine, sform and qform codes, units and the stored shape (less a channel
    axis) come. `path` ends in .nii.gz or .nii. Raises DataError where `source` cannot be read, StorageError where `path`
    cannot be written; the file appears whole or not at all. before_rename: see `write_whole`.
    """
    indices = class_map.cpu().numpy() if isinstance(class_map, torch.Tensor) else np.asarray(class_map)
    header = read_header(source)
    values = np.asarray(class_values, dtype=np.uint8)[indices].reshape(
        _stored_shape(header.shape, indices.shape), order="C"
    )
    _write(path, _nifti_bytes(values, header), before_rename)


def write_volume(
    path: Path,
    values: np.ndarray,
    affine: np.ndarray,
    before_rename: Callable[[Path], None] = lambda temporary: None,
) -> None:
    """Writes float32 [*spatial] with an affine to RAS mm; the file appears whole or not at all, else StorageError."""
    image = nib.Nifti1Image(np.asarray(values, dtype=np.float32), affine)
    image.header.set_xyzt_units("mm")
    _write(path, image.to_bytes(), before_rename)


def _write(path: Path, blob: bytes, before_rename: Callable[[Path], None]) -> None:
    if path.name.lower().endswith(".gz"):
        blob = gzip.compress(blob, compresslevel=3, mtime=0)
    with write_whole(path, before_rename) as stream:
        stream.write(blob)


def _stored_shape(source: tuple[int, ...], spatial: tuple[int, ...]) -> tuple[int, ...]:
    """The source's shape with its channel axis taken out; (X, Y, 1) stays what it was."""
    if math.prod(source) == math.prod(spatial):
        return source
    rest = list(source[len(spatial) :])
    while rest and (len(rest) > 1 or rest[-1] != 1):
        rest.pop()
    return (*spatial, *rest) if len(spatial) == 2 and rest else spatial


def _nifti_bytes(values: np.ndarray, source: NiftiHeader) -> bytes:
    header = source.header.copy()
    header.set_data_dtype(np.uint8)
    header.set_slope_inter(1.0, 0.0)
    header["cal_max"] = header["cal_min"] = 0.0
    header["descrip"] = b"fasttrain"
    image_class = nib.Nifti2Image if isinstance(header, nib.Nifti2Header) else nib.Nifti1Image
    header.set_data_offset(0)
    # The header's own affine goes in, not the completed one, so that nibabel has no cause to rewrite sform and qform.
    return bytes(image_class(values, header.get_best_affine(), header).to_bytes())
