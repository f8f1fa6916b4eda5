"""Owns the voxels of a series: pixels decoded slice by slice, and their rescale slope and intercept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from fasttrain.data.dicom.library import load, missing_decoder
from fasttrain.data.dicom.slices import Slice
from fasttrain.data.dicom.stack import Stack, stack_of
from fasttrain.data.nifti import NiftiFile, NiftiHeader
from fasttrain.errors import DataError, FasttrainError


def read_series_header(path: Path) -> NiftiHeader:
    """The grid of the series that a file belongs to, as the header that a NIfTI file of it would have. Raises as `stack_of`."""
    return _header(path, stack_of(path))


def read_series(path: Path) -> NiftiFile:
    """All slices of the series that a file belongs to, [column, row, slice], as a NIfTI file of it would hold them.

    Where slices differ in slope or intercept, as those of PET do, each is scaled by its own and the voxels are float32. Raises
    DataError for what `stack_of` refuses and for every slice whose pixels cannot be decoded, MachineError for compressed pixels
    that no installed package decodes.
    """
    stack = stack_of(path)
    header = _header(path, stack)
    volume = np.empty(stack.shape[::-1], dtype=header.dtype)
    faults: list[str] = []
    opened: tuple[Path, Any] | None = None
    for number, one in enumerate(stack.slices):
        try:
            if opened is None or opened[0] != one.path:
                opened = one.path, decoded(one.path)
            volume[number] = _scaled(_plane(one, opened[1], stack), one, stack)
        except DataError as error:
            opened = None
            faults.extend(fault for fault in error.faults if fault not in faults)
    if faults:
        raise DataError(faults)
    slope, intercept = next(iter(stack.scales)) if len(stack.scales) == 1 else (1.0, 0.0)
    raw = volume.transpose(2, 1, 0)
    raw.flags.writeable = False
    return NiftiFile(header=header, raw=raw, slope=slope, intercept=intercept)


def decoded(path: Path) -> np.ndarray:
    """The pixels of a file, [row, column] or [frame, row, column], unscaled.

    Raises DataError where they are cut short or damaged, MachineError where no installed package decompresses them.
    """
    pydicom = load("pydicom", f"{path}, a DICOM file,")
    try:
        dataset = pydicom.dcmread(path)
        if "PixelData" not in dataset:
            raise DataError(f"{path} has no pixels, or is cut short before their end; get the file anew")
        syntax = dataset.file_meta.TransferSyntaxUID
        _check_length(path, dataset, syntax)
        if syntax.is_compressed and not _can_decode(pydicom, syntax):
            raise missing_decoder(path, syntax.name)
        return np.asarray(dataset.pixel_array)
    except FasttrainError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # pydicom and the decoders raise whatever they come across in damaged bytes
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} has pixels that cannot be decoded ({reason}); get the file anew") from error


def nifti_header(path: Path, shape: tuple[int, ...], affine: np.ndarray, dtype: Any) -> NiftiHeader:
    """The header of a NIfTI file of that grid in mm, placed by its sform and qform; `affine` itself stays float64."""
    header = nib.Nifti1Header()
    header.set_data_shape(shape)
    header.set_data_dtype(dtype)
    header.set_xyzt_units("mm", "sec")
    header.set_sform(affine, code="scanner")
    header.set_qform(affine, code="scanner")
    return NiftiHeader(path=path, shape=shape, affine=affine, header=header)


def _header(path: Path, stack: Stack) -> NiftiHeader:
    dtype = np.dtype(np.float32) if len(stack.scales) > 1 else _stored_type(stack.slices[0])
    return nifti_header(path, stack.shape, stack.affine, dtype)


def _stored_type(one: Slice) -> np.dtype[Any]:
    """By the header; float pixels (Parametric Map Storage) announce 32 or 64 bits and no sign."""
    bits = int(one.header.get("BitsAllocated") or 16)
    if "PixelRepresentation" not in one.header:
        return np.dtype(np.float64 if bits == 64 else np.float32)
    kind = "i" if int(one.header["PixelRepresentation"]) else "u"
    return np.dtype(f"{kind}{max(bits, 8) // 8}")


def _plane(one: Slice, pixels: np.ndarray, stack: Stack) -> np.ndarray:
    plane = pixels[one.frame] if pixels.ndim == 3 else pixels
    if plane.shape != stack.shape[1::-1]:
        raise DataError(
            f"{one.path} holds pixels of {'×'.join(map(str, plane.shape))}, but its header says {stack.shape[1]} rows of "
            f"{stack.shape[0]}; get the file anew"
        )
    return np.asarray(plane)


def _scaled(plane: np.ndarray, one: Slice, stack: Stack) -> np.ndarray:
    if len(stack.scales) == 1:
        return plane
    return plane.astype(np.float64) * one.slope + one.intercept


def _check_length(path: Path, dataset: Any, syntax: Any) -> None:
    """Plain pixels that are fewer than the header announces; pydicom would tell it in words of its own."""
    if syntax.is_compressed:
        return
    frames, samples = int(dataset.get("NumberOfFrames") or 1), int(dataset.get("SamplesPerPixel") or 1)
    bits = math.prod((int(dataset.Rows), int(dataset.Columns), frames, samples, int(dataset.BitsAllocated)))
    needed, there = (bits + 7) // 8, len(dataset.PixelData)
    if there < needed:
        raise DataError(
            f"{path} is cut short: its header announces {needed:,} bytes of pixels, but {there:,} are there; get the file anew"
        )


def _can_decode(pydicom: Any, syntax: Any) -> bool:
    """Whether one of the decoder's plugins has its package; RLE is decoded by pydicom itself."""
    try:
        return bool(pydicom.pixels.get_decoder(syntax).is_available)
    except NotImplementedError:
        return False
