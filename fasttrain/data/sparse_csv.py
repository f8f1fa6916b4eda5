"""Owns the sparse CSV volumes of OpenKBP: a row a voxel, read by NumPy on the bytes, with the file and row of whatever is wrong.

A file begins with the header `,data`; a row is a flat C-order index and a value, or an index alone in a mask. What is left out
is 0. Rows may stand in any order. Python's csv or a float a row would take longer than the rest of preparing a volume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasttrain.errors import DataError
from fasttrain.whole_files import write_whole
from fasttrain.wording import counted

HEADER = b",data"
_COMMA, _NEWLINE, _ZERO, _DOT = 44, 10, 48, 46
LEAST_MM, MOST_MM = 0.01, 100.0
"""No side of a voxel of a patient is shorter or longer."""
_MOST_DIGITS = 15
"""Of a value that is read as a whole number and a power of ten: both are exact in float64, and so is their quotient rounded."""


@dataclass(frozen=True, eq=False)
class SparseVolume:
    """`indices` int64 [n], flat and C-order, each once; `values` float64 [n], all 1 in a mask."""

    indices: np.ndarray
    values: np.ndarray

    def dense(self, shape: tuple[int, ...], dtype: type[np.generic] = np.float32) -> np.ndarray:
        """The volume [*shape]; voxels that the file leaves out are 0."""
        volume = np.zeros(shape, dtype=dtype)
        volume.reshape(-1)[self.indices] = self.values
        return volume


def read_sparse(path: Path, voxels: int, mask: bool = False) -> SparseVolume:
    """Reads a file of a volume of so many voxels; in a `mask` the value is empty (or 1).

    Raises one DataError with every kind of fault, each with its file and first row: no bytes at all, another header, rows that
    are not `index,value`, indices that are no whole numbers, out of range or there twice, and values that are no finite numbers.
    """
    blob = _read(path)
    header, _, body = blob.partition(b"\n")
    if header.rstrip(b"\r").strip() != HEADER:
        shown = header[:40].decode(errors="replace")
        raise DataError(f"{path} row 1: the header is {shown!r}, and ',data' is expected; get the file anew")
    rows = _Rows(path, body.replace(b"\r", b"") if b"\r" in body else body)
    indices, faults = rows.indices(voxels)
    values, more = (rows.mask_values if mask else rows.values)()
    if faults or more:
        raise DataError([*faults, *more])
    return SparseVolume(indices, values)


def write_sparse(
    path: Path, volume: np.ndarray, before_rename: Callable[[Path], None] = lambda temporary: None
) -> None:
    """Writes a volume [*spatial] as the challenge's files are: the voxels that are not 0 in the order of their indices."""
    flat = np.ascontiguousarray(volume).reshape(-1)
    indices = np.flatnonzero(flat)
    # NumPy spells each with the digits that its type needs, and no more
    lines = [
        f"{index},{value}" for index, value in zip(indices.tolist(), flat[indices].astype(str).tolist(), strict=True)
    ]
    with write_whole(path, before_rename) as stream:
        stream.write("\n".join([HEADER.decode(), *lines, ""]).encode())


def read_numbers(path: Path, count: int) -> tuple[float, ...]:
    """`count` headerless numbers, one a row: a voxel's sides in mm. Raises DataError where one could not be."""
    rows = _read(path).split()
    try:
        spelt = [row.decode("ascii") for row in rows]
        numbers = tuple(float(row) for row in spelt) if all(map(_plainly_spelt, spelt)) else ()
    except ValueError:
        numbers = ()
    if len(numbers) != count or not are_sides(numbers):
        shown = b" ".join(rows)[:60].decode(errors="replace")
        raise DataError(
            f"{path} holds {shown!r}; {count} positive numbers, one a row, are expected (mm along each axis, from "
            f"{LEAST_MM:g} to {MOST_MM:g}); mend the file, or get it anew"
        )
    return numbers


def are_sides(numbers: Iterable[float]) -> bool:
    """Whether these could be the sides of a voxel, in mm."""
    return all(LEAST_MM <= one <= MOST_MM for one in numbers)


def _plainly_spelt(number: str) -> bool:
    """Python takes 1_000 and other alphabets' digits too."""
    return "_" not in number and number.isascii()


def _finite_in_float32(value: float) -> bool:
    """Volumes are float32, in which 1e39 is infinite."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.float32(value)))


def _read(path: Path) -> bytes:
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not blob:
        raise DataError(f"{path} is empty (0 bytes); get the file anew")
    return blob


class _Rows:
    """The rows of a file below its header, as places in its bytes."""

    def __init__(self, path: Path, body: bytes) -> None:
        self.path = path
        body = body.rstrip(b"\n") + b"\n" if body.strip(b"\n") else b""
        self._bytes = np.frombuffer(body, dtype=np.uint8)
        self._ends = np.flatnonzero(self._bytes == _NEWLINE)
        self._starts = np.concatenate([[0], self._ends[:-1] + 1]) if len(self._ends) else self._ends
        commas = np.flatnonzero(self._bytes == _COMMA)
        # Of a row with none the next one's, or the end
        after = np.searchsorted(commas, self._starts)
        padded = np.append(commas, len(body))
        self._commas = np.minimum(padded[after], self._ends)
        self._whole = self._commas < self._ends
        self._extra = np.searchsorted(commas, self._ends) - after > 1

    def indices(self, voxels: int) -> tuple[np.ndarray, list[str]]:
        """The indices, and what is wrong with them."""
        lengths = self._commas - self._starts
        indices, digits = self._digits(self._starts, self._commas)
        faults = []
        malformed = ~self._whole | self._extra
        faults += self._told(malformed, "is {row!r}; an index, a comma and a value are expected")
        worded = ~malformed & (~digits | (lengths == 0))
        faults += self._told(worded, "has the index {index!r}; a whole number is expected")
        sound = ~malformed & ~worded
        outside = sound & ((indices >= voxels) | (lengths > _MOST_DIGITS))
        faults += self._told(outside, f"has the index {{index}}, beyond the last voxel, {voxels - 1}")
        inside = np.flatnonzero(sound & ~outside)
        seen = np.zeros(voxels, dtype=bool)
        seen[indices[inside]] = True
        if int(np.count_nonzero(seen)) != len(inside):
            order = inside[np.argsort(indices[inside], kind="stable")]
            again = np.zeros(len(indices), dtype=bool)
            again[order[1:][indices[order[1:]] == indices[order[:-1]]]] = True
            faults += self._told(again, "has the index {index}, which an earlier row has too")
        return indices, faults

    def values(self) -> tuple[np.ndarray, list[str]]:
        """The values, and what is wrong with them."""
        begin, end = self._commas + 1, self._ends
        dots = np.append(np.flatnonzero(self._bytes == _DOT), len(self._bytes))
        dot = np.minimum(dots[np.searchsorted(dots, begin)], end)
        whole, plain = self._digits(begin, dot)
        part, plain_part = self._digits(np.minimum(dot + 1, end), end)
        decimals = np.maximum(end - dot - 1, 0)
        plain &= plain_part & (dot > begin) & (dot - begin + decimals <= _MOST_DIGITS)
        scale = 10.0 ** np.minimum(decimals, _MOST_DIGITS)
        values = (whole * scale + part) / scale
        wrong = np.zeros(len(values), dtype=bool)
        for row in np.flatnonzero(~plain & self._whole & ~self._extra).tolist():
            spelt = self._text(begin[row], end[row])
            try:
                values[row] = float(spelt)
                wrong[row] = not _finite_in_float32(values[row]) or not _plainly_spelt(spelt)
            except ValueError:
                wrong[row] = True
        return values, self._told(
            wrong, "has the value {value!r}; a finite number is expected (within ±3.4e38, as float32 has it)"
        )

    def mask_values(self) -> tuple[np.ndarray, list[str]]:
        """All 1; what else stands there than nothing or a 1 is wrong."""
        wrong = np.zeros(len(self._ends), dtype=bool)
        for row in np.flatnonzero(self._whole & ~self._extra & (self._ends > self._commas + 1)).tolist():
            wrong[row] = self._text(self._commas[row] + 1, self._ends[row]).strip() not in ("", "1", "1.0")
        told = self._told(wrong, "has the value {value!r}; in a mask an index stands alone")
        return np.ones(len(self._ends)), told

    def _digits(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The whole numbers int64 [n] that the bytes from `begin` to `end` spell, and whether they are digits alone."""
        lengths = np.minimum(end - begin, _MOST_DIGITS)
        numbers, digits = np.zeros(len(begin), dtype=np.int64), np.ones(len(begin), dtype=bool)
        power = 1
        for place in range(int(lengths.max(initial=0))):
            there = lengths > place
            digit = self._bytes[np.maximum(end - 1 - place, 0)].astype(np.int64) - _ZERO
            digits &= ~there | ((digit >= 0) & (digit <= 9))
            numbers += np.where(there, digit * power, 0)
            power *= 10
        return numbers, digits

    def _text(self, begin: int, end: int) -> str:
        return self._bytes[begin:end].tobytes().decode(errors="replace")

    def _told(self, wrong: np.ndarray, sentence: str) -> list[str]:
        rows = np.flatnonzero(wrong)
        return list(self._sentence(rows, sentence)) if len(rows) else []

    def _sentence(self, rows: np.ndarray, sentence: str) -> Iterator[str]:
        first = int(rows[0])
        start, comma, end = (int(ends[first]) for ends in (self._starts, self._commas, self._ends))
        told = sentence.format(
            row=self._text(start, end)[:40], index=self._text(start, comma)[:40], value=self._text(comma + 1, end)[:40]
        )
        more = f" (and {counted(len(rows) - 1, 'more row')} like it)" if len(rows) > 1 else ""
        # The header is row 1
        yield f"{self.path} row {first + 2:,} {told}{more}; mend the row, or get the file anew"
