"""Owns the facts of one file: what reading it in full shows of grid, values and classes, whatever a recipe makes of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fasttrain.data.labels import whole_values
from fasttrain.data.nifti import NiftiFile
from fasttrain.data.reading import split_shape
from fasttrain.data.volume_files import read_file
from fasttrain.data.volumes import picked_indices
from fasttrain.errors import DataError
from fasttrain.samples import Drawn

MOST_VALUES = 300
"""A label with more distinct values than this holds something else than classes."""
_SLAB_VOXELS = 1 << 20
_WIDEST_TABLE = 1 << 16


@dataclass(frozen=True)
class View:
    """How a file is looked at: the axes of the recipe for a label, the grid that it will be resampled to and `Case.drawn`."""

    dimensions: int
    label: bool = False
    spacing: tuple[float, ...] | None = None
    orientation: str | None = None
    drawn: Drawn | None = None

    @property
    def key(self) -> str:
        """Two views with one key see the same facts."""
        resampled = self.label and self.spacing is not None
        grid = f" {','.join(map(repr, self.spacing or ()))} {self.orientation}" if resampled else ""
        drawn = f" {self.drawn}" if self.drawn is not None else ""
        return f"{'label' if self.label else 'image'} {self.dimensions}{grid}{drawn}"


@dataclass(frozen=True)
class ChannelFacts:
    """`minimum` and `maximum` of the finite voxels, None where there are none; counts of the others."""

    minimum: float | None
    maximum: float | None
    nans: int = 0
    infinite: int = 0

    @property
    def constant(self) -> float | None:
        """The one value of all voxels, None where there are several or some are not finite."""
        return self.minimum if self.minimum == self.maximum and not self.nans + self.infinite else None


@dataclass(frozen=True)
class FileFacts:
    """One file, read to its last byte.

    faults: why it cannot be used under any recipe; where it could not be decoded the rest is empty. shape as stored; affine:
    16 numbers, row by row. channels: of an image, [1] where it has too few axes to have any. digest: of all voxels (of an
    image as float32) in the order of the file, so that type, compression and name make no difference. values: of a label,
    {class value: voxels} before any mapping, None where there are too many to be classes or they are no whole numbers. resampled:
    those of the voxels that nearest resampling to the view's spacing keeps, None where it keeps all.
    """

    faults: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    affine: tuple[float, ...] = ()
    dtype: str = ""
    scale: tuple[float, float] = (1.0, 0.0)
    channels: tuple[ChannelFacts, ...] = ()
    digest: str = ""
    values: tuple[tuple[int, int], ...] | None = None
    resampled: tuple[int, ...] | None = None

    @property
    def decoded(self) -> bool:
        """Whether the voxels could be read."""
        return bool(self.shape)

    @property
    def matrix(self) -> np.ndarray:
        """The affine, 4×4 to RAS mm."""
        return np.array(self.affine, dtype=np.float64).reshape(4, 4)

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> FileFacts:
        """The facts that `record` gave. Raises KeyError, TypeError or ValueError for anything else."""
        values, resampled = record["values"], record["resampled"]
        facts = cls(
            faults=_all_of(record["faults"], str),
            shape=_all_of(record["shape"], int),
            affine=_all_of(record["affine"], float),
            dtype=str(np.dtype(record["dtype"])) if record["dtype"] != "" else "",
            scale=_pair_of(record["scale"], float),
            channels=tuple(ChannelFacts(**_channel_of(channel)) for channel in record["channels"]),
            digest=_all_of([record["digest"]], str)[0],
            values=None if values is None else tuple(_pair_of(pair, int) for pair in values),
            resampled=None if resampled is None else _all_of(resampled, int),
        )
        if len(facts.affine) != (16 if facts.decoded else 0) or min(facts.shape, default=1) < 1:
            raise ValueError("no facts of a volume")
        return facts


_Plain = TypeVar("_Plain", str, int, float)


def _all_of(values: list[Any], kind: type[_Plain]) -> tuple[_Plain, ...]:
    """JSON's lists as they were written; True is no 1 here. Raises TypeError for other values."""
    if type(values) is not list or any(type(value) is not kind for value in values):
        raise TypeError(f"{values!r:.60} is no list of {kind.__name__}")
    return tuple(values)


def _pair_of(values: list[Any], kind: type[_Plain]) -> tuple[_Plain, _Plain]:
    first, second = _all_of(values, kind)
    return first, second


def _channel_of(record: dict[str, Any]) -> dict[str, Any]:
    _all_of([one for one in (record["minimum"], record["maximum"]) if one is not None], float)
    _all_of([record["nans"], record["infinite"]], int)
    return record


def read_facts(path: Path, view: View) -> FileFacts:
    """Reads the whole file; a file that cannot be decoded gives facts with its fault. Holds one volume at a time."""
    try:
        file = read_file(path, view.drawn)
    except DataError as error:
        return FileFacts(faults=error.faults)
    facts = FileFacts(
        shape=file.header.shape,
        affine=tuple(float(one) for one in file.header.affine.reshape(-1)),
        dtype=file.header.dtype.newbyteorder("=").name,
        scale=(file.slope, file.intercept),
    )
    return _with_classes(facts, file, view) if view.label else _with_channels(facts, file, view)


def _with_channels(facts: FileFacts, file: NiftiFile, view: View) -> FileFacts:
    flat = file.raw.reshape(-1, order="F")
    count = _channel_count(file, view.dimensions)
    length = flat.size // count
    digest = hashlib.blake2b(repr(file.header.shape).encode(), digest_size=16)
    channels = []
    for start in range(0, flat.size, length):
        channel = ChannelFacts(None, None)
        for values in _slabs(file, flat[start : start + length]):
            digest.update(values.data)
            channel = _joined(channel, _channel_facts(values))
        channels.append(channel)
    return replace(facts, channels=tuple(channels), digest=digest.hexdigest())


def _channel_count(file: NiftiFile, dimensions: int) -> int:
    try:
        return split_shape(file.header.path, file.header.shape, dimensions)[1]
    except DataError:
        return 1


def _slabs(file: NiftiFile, flat: np.ndarray) -> Iterator[np.ndarray]:
    """float32 pieces of a volume, so that no second copy of it is ever held."""
    for start in range(0, flat.size, _SLAB_VOXELS):
        yield replace(file, raw=flat[start : start + _SLAB_VOXELS]).values()


def _channel_facts(values: np.ndarray) -> ChannelFacts:
    # NaN and infinity show in the extremes, so that sound volumes need no mask
    low, high = float(values.min()), float(values.max())
    if np.isfinite(low) and np.isfinite(high):
        return ChannelFacts(low, high)
    finite = values[np.isfinite(values)]
    nans = int(np.isnan(values).sum())
    infinite = values.size - finite.size - nans
    if not finite.size:
        return ChannelFacts(None, None, nans, infinite)
    return ChannelFacts(float(finite.min()), float(finite.max()), nans, infinite)


def _joined(one: ChannelFacts, other: ChannelFacts) -> ChannelFacts:
    lows = [low for low in (one.minimum, other.minimum) if low is not None]
    highs = [high for high in (one.maximum, other.maximum) if high is not None]
    return ChannelFacts(
        min(lows, default=None), max(highs, default=None), one.nans + other.nans, one.infinite + other.infinite
    )


def _with_classes(facts: FileFacts, file: NiftiFile, view: View) -> FileFacts:
    try:
        whole = whole_values(file, file.raw)
    except DataError as error:
        return replace(facts, faults=error.faults)
    table = _table_of(whole)
    if table is None:
        fault = (
            f"{file.header.path} holds more than {MOST_VALUES} distinct values, which are no class values; is it an image in "
            "the place of a label? Name the label's file, or write the label anew"
        )
        return replace(facts, faults=(fault,))
    return replace(
        facts,
        values=tuple(sorted(table.items())),
        resampled=_left_by_resampling(whole, file, view),
        digest=_digest_of_classes(whole, table),
    )


def _digest_of_classes(whole: np.ndarray, table: dict[int, int]) -> str:
    """Of all voxels in the order of the file, whatever type they are stored in: 8 bits wherever they have room there."""
    narrow = np.uint8 if min(table) >= 0 and max(table) <= 255 else np.float64
    digest = hashlib.blake2b(f"{whole.shape} {np.dtype(narrow).name}".encode(), digest_size=16)
    flat = whole.reshape(-1, order="F")
    for start in range(0, flat.size, _SLAB_VOXELS):
        digest.update(np.ascontiguousarray(flat[start : start + _SLAB_VOXELS].astype(narrow, copy=False)).data)
    return digest.hexdigest()


def _left_by_resampling(whole: np.ndarray, file: NiftiFile, view: View) -> tuple[int, ...] | None:
    try:
        spatial, count = split_shape(file.header.path, whole.shape, view.dimensions)
    except DataError:
        return None
    picked = picked_indices(spatial, file.header.affine, view.spacing, view.orientation)
    if picked is None or count != 1:
        return None
    left = _table_of(whole.reshape(spatial, order="F")[np.ix_(*picked)])
    return None if left is None else tuple(sorted(left))


def _table_of(whole: np.ndarray) -> dict[int, int] | None:
    """Voxels by value of whole numbers of any type; None for more than `MOST_VALUES` of them."""
    table: Counter[int] = Counter()
    flat = whole.ravel(order="K")
    for start in range(0, flat.size, _SLAB_VOXELS):
        for value, count in _counted(flat[start : start + _SLAB_VOXELS]):
            table[value] += count
        if len(table) > MOST_VALUES:
            return None
    return dict(table)


def _counted(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Counting by index where the values lie close together, since sorting millions of them takes seconds."""
    low, high = int(values.min()), int(values.max())
    if high - low < _WIDEST_TABLE:
        # Differences of 8-bit values overflow, and what lies beyond 64 bits has none but small differences here
        wide = values.dtype.kind == "f" or values.dtype == np.uint64
        indices = (values - values.min()).astype(np.int64) if wide else values.astype(np.int64) - low
        counts = np.bincount(indices)
        found: Sequence[int] = np.flatnonzero(counts).tolist()
        return ((low + index, int(counts[index])) for index in found)
    distinct, counted = np.unique(values, return_counts=True)
    return ((int(value), int(count)) for value, count in zip(distinct, counted, strict=True))
