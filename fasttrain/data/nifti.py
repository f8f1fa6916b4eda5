"""Owns the bytes of NIfTI files: whole-file inflation with its checksum, the header, and one sentence for each fault."""

from __future__ import annotations

import logging
import math
import os
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.file_names import as_text
from fasttrain.data.grids import with_third_axis
from fasttrain.errors import DataError

ENDINGS = (".nii.gz", ".nii")
_GZIP = b"\x1f\x8b"
_APPLE_DOUBLE = b"\x00\x05\x16\x07"
_HIGHEST_RATIO = 1032
"""Deflate cannot pack more bytes than this into one, so a length claimed beyond it is damage, not a size to allocate."""
_HEADER_BYTES = 4096
_SPARE_BYTES = 1 << 20
"""Beyond its voxels a file holds hardly more than this; a length claimed above it is not taken at its word."""
_PIECE_BYTES = 1 << 14
_NO_ZERO = re.compile(rb"[^\0]")
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
            working = part.astype(np.float32 if part.dtype.itemsize <= 2 else np.float64)
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
    blob = _bytes_of(path)
    packed = blob[:2] == _GZIP
    try:
        header = _parse_header(path, _first_bytes(path, blob))
        start, slope, intercept = _layout_of(path, header)
    except DataError:
        if packed:
            _inflate(path, blob, 0)  # a header that makes no sense is no wonder where the checksum is wrong
        raise
    needed = math.prod(header.shape) * header.dtype.itemsize
    plain, length = _inflate(path, blob, start + needed) if packed else (blob, len(blob))
    if start + needed > length:
        raise DataError(
            f"{path} is cut short: its header announces {_shape(header.shape)} voxels of {header.dtype.name}, {needed:,} bytes, "
            f"but {max(length - start, 0):,} are there; get the file anew"
        )
    raw = np.frombuffer(plain, dtype=header.dtype, count=math.prod(header.shape), offset=start)
    raw.flags.writeable = False
    return NiftiFile(header=header, raw=raw.reshape(header.shape, order="F"), slope=slope, intercept=intercept)


def read_header(path: Path) -> NiftiHeader:
    """Reads the first bytes only; the voxels may still be damaged. Raises DataError with one sentence."""
    return _parse_header(path, _first_bytes(path, _bytes_of(path, limit=_HEADER_BYTES)))


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
        raise DataError(f"{path}: DICOM is not read; convert the series to NIfTI first, for example with dcm2niix")
    _refuse_wrong_name(path, blob)
    return blob


def _refuse_wrong_name(path: Path, blob: bytes) -> None:
    if blob[:4] == _APPLE_DOUBLE:
        raise DataError(f"{path} is what macOS left beside a file, not an image; remove it")
    zipped, named = blob[:2] == _GZIP, path.name.lower().endswith(".gz")
    if zipped == named:
        return
    if named:
        found = "plain NIfTI" if _class_of(blob) else "neither gzip nor NIfTI"
        remedy = f"rename it to {path.name[:-3]} or compress it with gzip" if _class_of(blob) else "get the file anew"
        raise DataError(f"{path} ends in .gz but holds {found}; {remedy}")
    raise DataError(f"{path} is gzip-compressed but does not end in .gz; rename it to {path.name}.gz")


def _first_bytes(path: Path, blob: bytes) -> bytes:
    if blob[:2] != _GZIP:
        return blob[:_HEADER_BYTES]
    try:
        # Twice as many, for the name of the file and the tables of the first block
        return zlib.decompressobj(31).decompress(blob[: 2 * _HEADER_BYTES], _HEADER_BYTES)
    except zlib.error as error:
        raise DataError(_damaged(path, error)) from error


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


def _inflate(path: Path, blob: bytes, wanted: int) -> tuple[bytes | bytearray, int]:
    """At least the first `wanted` bytes (fewer where there are no more), and the length of the whole, whose checksum holds."""
    claimed = int.from_bytes(blob[-4:], "little")
    try:
        # One call for the usual single-member file, since growing a buffer piecemeal costs as much as inflating
        if wanted <= claimed <= min(wanted + _SPARE_BYTES, _HIGHEST_RATIO * len(blob)) and wanted:
            plain = zlib.decompress(blob, 31, claimed)
            if len(plain) == claimed:
                return plain, claimed
        return _inflate_members(blob, wanted)
    except (zlib.error, EOFError) as error:
        raise DataError(_damaged(path, error)) from error
    except MemoryError as error:
        raise DataError(f"{path} unpacks to {wanted / 2**30:.3g} GiB, which is more memory than there is") from error


def _inflate_members(blob: bytes, wanted: int) -> tuple[bytearray, int]:
    """Files written in several gzip members (bgzip), with zeros after the end, or longer than their voxels need.

    What lies beyond `wanted` bytes is checked and not kept.
    """
    kept = bytearray()
    view, at, length = memoryview(blob), 0, 0
    while blob[at : at + 2] == _GZIP:
        member = zlib.decompressobj(31)
        while not member.eof:
            if at >= len(blob):
                raise EOFError("the compressed data end too early")
            piece = member.decompress(view[at : at + _PIECE_BYTES])
            at = min(at + _PIECE_BYTES, len(blob))
            if length < wanted:
                kept += piece[: wanted - length]
            length += len(piece)
        at -= len(member.unused_data)
        follows = _NO_ZERO.search(blob, at)
        at = follows.start() if follows else len(blob)
    if at < len(blob):
        raise EOFError(f"{len(blob) - at:,} bytes follow the end of the compressed data")
    return kept, length


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged: gzip says {_gzip_fault(error)}; get the file anew"


def _gzip_fault(error: Exception) -> str:
    text = str(error)
    return "the compressed data end too early" if "incomplete or truncated" in text else text.split(": ")[-1]


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
