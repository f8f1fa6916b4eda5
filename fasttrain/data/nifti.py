"""Owns the bytes of NIfTI files: the header, the voxels as they are stored, and one sentence for each fault."""

from __future__ import annotations

import logging
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.file_names import as_text
from fasttrain.data.grids import with_third_axis
from fasttrain.data.inflate import GZIP, first_bytes, inflate
from fasttrain.data.seen_files import SEEN, key_of
from fasttrain.errors import DataError
from fasttrain.ranges import part

ENDINGS = (".nii.gz", ".nii")
_APPLE_DOUBLE = b"\x00\x05\x16\x07"
_HEADER_BYTES = 4096
_LONGEST_HEADER = 540
"""Bytes of NIfTI-2's."""
_WIDEST_KEPT = 4
"""Bytes a voxel of files that are kept for a second reader: no more than preprocessing makes of them."""
_QUIET = logging.getLogger("fasttrain.data.nifti.header")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False


@dataclass(frozen=True, eq=False)
class NiftiHeader:
    """What the first bytes say: `shape` as stored, `affine` 4×4 to RAS mm, and nibabel's own header."""

    path: Path
    shape: tuple[int, ...]
    affine: np.ndarray
    header: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored voxel type, before scaling."""
        return np.dtype(self.header.get_data_dtype())


@dataclass(frozen=True, eq=False)
class NiftiFile:
    """A whole file: `raw` is a view [*shape] in Fortran order of the stored type; value = raw × slope + intercept."""

    header: NiftiHeader
    raw: np.ndarray
    slope: float
    intercept: float

    @property
    def scaled(self) -> bool:
        """Whether the header asks for more than the stored values."""
        return (self.slope, self.intercept) != (1.0, 0.0)

    def values(self) -> np.ndarray:
        """The values as float32 [*shape], read-only where they are stored so; see `scaled_values`."""
        return self.scaled_values(self.raw)

    def scaled_values(self, part: np.ndarray) -> np.ndarray:
        """The values of a part of `raw` as float32; scaling wider than 16-bit integers is done in float64 first."""
        # A float64 beyond float32 becomes infinite, which the reader refuses with its count.
        with np.errstate(over="ignore", invalid="ignore"):
            if not self.scaled:
                return part.astype(np.float32, copy=False)
            working: np.ndarray = part.astype(np.float32 if part.dtype.itemsize <= 2 else np.float64)
            working *= self.slope
            working += self.intercept
            return working.astype(np.float32, copy=False)


def is_nifti(path: Path) -> bool:
    """By the name's ending alone."""
    return path.name.lower().endswith(ENDINGS)


def case_id(path: Path) -> str:
    """The file name less its NIfTI ending, in one Unicode form (`file_names.as_text`)."""
    for ending in ENDINGS:
        if path.name.lower().endswith(ending):
            return as_text(path.name[: -len(ending)])
    return as_text(path.stem)


def read_file(path: Path) -> NiftiFile:
    """Reads the whole file and checks it (gzip checksum, length); raises DataError with one sentence.

    A length that the header or the gzip trailer claims is compared with what the file can hold before memory is taken for it.
    """
    key = key_of(path)
    kept: NiftiFile | None = SEEN.take(key)
    if kept is not None:
        return kept
    with part("read"):
        blob = _bytes_of(path)
    packed = blob[:2] == GZIP
    try:
        header = _parse_header(path, _first_bytes(path, blob))
        start, slope, intercept = _layout_of(path, header)
    except DataError:
        if packed:
            inflate(path, blob, 0)  # a header that makes no sense is no wonder where the checksum is wrong
        raise
    needed = math.prod(header.shape) * header.dtype.itemsize
    with part("decode"):
        plain, length = inflate(path, blob, start + needed) if packed else (blob, len(blob))
    if start + needed > length:
        raise DataError(
            f"{path} is cut short: its header announces {_shape(header.shape)} voxels of {header.dtype.name}, {needed:,} bytes, "
            f"but {max(length - start, 0):,} are there; get the file anew"
        )
    raw = np.frombuffer(plain, dtype=header.dtype, count=math.prod(header.shape), offset=start)
    raw.flags.writeable = False
    file = NiftiFile(header=header, raw=raw.reshape(header.shape, order="F"), slope=slope, intercept=intercept)
    SEEN.note_header(key, header)
    if header.dtype.itemsize <= _WIDEST_KEPT:
        SEEN.note_file(key, file, length if plain is blob else len(plain))
    return file


def read_header(path: Path) -> NiftiHeader:
    """Reads the first bytes only; the voxels may still be damaged. Raises DataError with one sentence."""
    key = key_of(path)
    known: NiftiHeader | None = SEEN.header(key)
    if known is None:
        known = _parse_header(path, _beginning_of(path))
        SEEN.note_header(key, known)
    return known


def _beginning_of(path: Path) -> bytes:
    """Enough for any header, of no more of the file than that takes: a long name or an empty member may stand before it."""
    limit = _HEADER_BYTES
    while True:
        blob = _bytes_of(path, limit)
        beginning = _first_bytes(path, blob)
        if len(beginning) >= _LONGEST_HEADER or len(blob) < limit:
            return beginning
        limit *= 8


def _bytes_of(path: Path, limit: int = -1) -> bytes:
    try:
        # Without waiting: a pipe has no end to wait for
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(f"{path} is no regular file; a NIfTI file is expected")
        with open(path, "rb") as stream:
            blob = stream.read(limit)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not blob:
        raise DataError(f"{path} is empty (0 bytes); get the file anew")
    if blob[128:132] == b"DICM" or path.suffix.lower() == ".dcm":
        raise DataError(
            f"{path}: DICOM is not read here; set data.source.kind: dicom, or convert the series to NIfTI first"
        )
    _refuse_wrong_name(path, blob)
    return blob


def _refuse_wrong_name(path: Path, blob: bytes) -> None:
    if blob[:4] == _APPLE_DOUBLE:
        raise DataError(f"{path} is what macOS left beside a file, not an image; remove it")
    zipped, named = blob[:2] == GZIP, path.name.lower().endswith(".gz")
    if zipped == named:
        return
    if named:
        found = "plain NIfTI" if _class_of(blob) else "neither gzip nor NIfTI"
        remedy = f"rename it to {path.name[:-3]} or compress it with gzip" if _class_of(blob) else "get the file anew"
        raise DataError(f"{path} ends in .gz but holds {found}; {remedy}")
    raise DataError(f"{path} is gzip-compressed but does not end in .gz; rename it to {path.name}.gz")


def _first_bytes(path: Path, blob: bytes) -> bytes:
    return first_bytes(path, blob, _HEADER_BYTES) if blob[:2] == GZIP else blob[:_HEADER_BYTES]


def _layout_of(path: Path, header: NiftiHeader) -> tuple[int, float, float]:
    """Where the voxels begin, the slope and the intercept; a slope that is 0, NaN or absent is none."""
    from nibabel.spatialimages import HeaderDataError

    try:
        start = int(header.header.get_data_offset())
        slope, intercept = header.header.get_slope_inter()
    except (HeaderDataError, ValueError, OverflowError) as error:
        raise DataError(f"{path} has a damaged NIfTI header ({error}); get the file anew") from error
    if start < 0:
        raise DataError(f"{path} has a damaged NIfTI header (voxels from byte {start}); get the file anew")
    return start, 1.0 if slope is None else float(slope), 0.0 if intercept is None else float(intercept)


def _class_of(blob: bytes) -> Any:
    """nibabel's header class for single-file NIfTI-1 or -2, None for anything else."""
    # Where a whole set is remembered no file is opened, and nibabel takes a tenth of a second to load
    import nibabel as nib

    sizes = {int.from_bytes(blob[:4], order) for order in ("little", "big")}
    if 348 in sizes and blob[344:347] == b"n+1":
        return nib.Nifti1Header
    if 540 in sizes and blob[4:7] == b"n+2":
        return nib.Nifti2Header
    return None


def _parse_header(path: Path, blob: bytes) -> NiftiHeader:
    from nibabel.spatialimages import HeaderDataError, HeaderTypeError

    header_class = _class_of(blob)
    if header_class is None:
        pair = blob[344:347] == b"ni1" or blob[4:7] == b"ni2"
        found = "is the header of a .hdr/.img pair" if pair else "is not a NIfTI file"
        raise DataError(f"{path} {found}; single-file NIfTI (.nii or .nii.gz) is expected")
    if len(blob) < header_class.sizeof_hdr:
        raise DataError(
            f"{path} is cut short: {len(blob)} bytes are there and its header alone takes {header_class.sizeof_hdr}; "
            "get the file anew"
        )
    try:
        header = header_class(binaryblock=blob[: header_class.sizeof_hdr], check=False)
        header.check_fix(logger=_QUIET)
        shape = tuple(int(length) for length in header.get_data_shape())
        affine = np.asarray(header.get_best_affine(), dtype=np.float64)
        if len(shape) < 3 or shape[2] == 1:
            affine = with_third_axis(affine)
        dtype = np.dtype(header.get_data_dtype())
    except (HeaderDataError, HeaderTypeError, ValueError, KeyError, TypeError,
            OverflowError, np.linalg.LinAlgError) as error:  # fmt: skip
        raise DataError(f"{path} has a damaged NIfTI header ({error}); get the file anew") from error
    if not shape or any(length < 1 for length in shape):
        raise DataError(f"{path} holds no voxels: its header gives the shape {_shape(shape) or 'of no axes'}")
    if dtype.kind not in "iuf":
        kind = "complex" if dtype.kind == "c" else "colour (RGB)" if dtype.fields else dtype.name
        raise DataError(f"{path} holds {kind} voxels; one number a voxel is expected, so convert it to a scalar image")
    scale = np.abs(affine[:3, :3]).max() if np.isfinite(affine).all() else 0.0
    if scale == 0.0 or abs(np.linalg.det(affine[:3, :3] / scale)) < 1e-9:
        raise DataError(f"{path} has an affine without a volume (a zero spacing or parallel axes); mend its header")
    return NiftiHeader(path=path, shape=shape, affine=affine, header=header)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
