"""Owns what a data set looks like, read from every case: grids, classes, and the intensities of labelled structures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np

from fasttrain.data.caches.filling import Gathering
from fasttrain.data.checking.judging import without_declared
from fasttrain.data.grids import spacing_of
from fasttrain.data.layouts import Layout, look_at_layout
from fasttrain.data.reading import read_image, read_label
from fasttrain.errors import DataError
from fasttrain.samples import Case, Grid
from fasttrain.wording import counted

_SAMPLES_PER_CASE = 10_000
_CT_WORD = re.compile(r"\bct\b|computed tomography", re.IGNORECASE)
_AIR_HU = (-4000.0, -200.0)
_TISSUE_HU = 100.0
_WHOLE_NUMBERS = 10.0
"""A window at least this wide is given in whole numbers."""
_LEFT = re.compile(r"left|(?:^|[_\-. ])l(?:$|[_\-. ])", re.IGNORECASE)
_RIGHT = re.compile(r"right|(?:^|[_\-. ])r(?:$|[_\-. ])", re.IGNORECASE)


@dataclass(frozen=True)
class Window:
    """`low` to `high`, and the standard deviation of what was found there as a share of that range."""

    low: float
    high: float
    deviation: float


@dataclass(frozen=True, eq=False)
class CaseFingerprint:
    """One case. Axes run as in RAS for volumes, as in the file for planes.

    counts: voxels by label value, 0 left out; foreground: [channel, n] values of up to 10,000 labelled voxels, evenly drawn;
    nonzero_share: of the volume, the box around all voxels that are not 0; minimum, maximum: over all channels.
    """

    name: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    orientation: str
    counts: dict[int, int]
    foreground: np.ndarray
    nonzero_share: float
    minimum: float
    maximum: float
    non_finite: bool

    @property
    def voxels(self) -> int:
        """Of the whole volume."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """A whole set, cases by name; see `read_fingerprint`."""

    layout: Layout
    cases: tuple[CaseFingerprint, ...]

    @property
    def spacings(self) -> np.ndarray:
        """mm, [case, axis]."""
        return np.array([case.spacing for case in self.cases])

    @property
    def shapes(self) -> np.ndarray:
        """Voxels, [case, axis]."""
        return np.array([case.shape for case in self.cases])

    @property
    def voxels_by_value(self) -> dict[int, int]:
        """Voxels of each label value over all cases, 0 left out."""
        total: Counter[int] = Counter()
        for case in self.cases:
            total.update(case.counts)
        return dict(sorted(total.items()))

    @property
    def cases_by_value(self) -> dict[int, int]:
        """Cases that have a voxel of each label value, 0 left out."""
        return dict(sorted(Counter(value for case in self.cases for value in case.counts).items()))

    @property
    def classes(self) -> dict[int, str]:
        """{label value: name}: those that a JSON file of the set names, and those found beside them as `class_VALUE`."""
        named = self.layout.names
        others = {value: f"class_{value}" for value in self.voxels_by_value if value not in named}
        taken = set(named.values())
        return dict(sorted({**named, **{v: f"{n}_found" if n in taken else n for v, n in others.items()}}.items()))

    @property
    def foreground_share(self) -> float:
        """Labelled voxels among all."""
        return sum(self.voxels_by_value.values()) / sum(case.voxels for case in self.cases)

    @property
    def foreground(self) -> np.ndarray:
        """[channel, n] values of labelled voxels, of each case alike."""
        return np.concatenate([case.foreground for case in self.cases], axis=1)

    @property
    def is_ct(self) -> bool:
        """Whether all channels are named CT or, where no file names them, the values look like Hounsfield units."""
        if self.layout.named_channels:
            return all(_CT_WORD.search(name) for name in self.layout.channels)
        return self.looks_like_hounsfield

    @property
    def looks_like_hounsfield(self) -> bool:
        """Most images reach from air (below −200, not below −4000) to above 100."""
        low, high = _AIR_HU
        like = [low <= case.minimum < high and case.maximum > _TISSUE_HU for case in self.cases]
        return sum(like) * 2 > len(like)

    @property
    def window(self) -> Window | None:
        """The 0.5 and 99.5 percentiles of the labelled voxels; None where both are one value."""
        values = self.foreground.astype(np.float64)
        low, high = np.percentile(values, (0.5, 99.5))
        if high - low >= _WHOLE_NUMBERS:
            low, high = np.floor(low), np.ceil(high)
        low, high = float(f"{low:.6g}"), float(f"{high:.6g}")
        return Window(low, high, float(np.clip((values - low) / (high - low), 0, 1).std())) if low < high else None

    @property
    def mirror_axes(self) -> tuple[int, ...]:
        """All axes, but for the one from left to right where classes differ by their side; in planes any may be that."""
        names = self.classes.values()
        if not (any(map(_LEFT.search, names)) and any(map(_RIGHT.search, names))):
            return tuple(range(self.layout.dimensions))
        return (1, 2) if self.layout.dimensions == 3 else ()

    @property
    def orientations(self) -> dict[str, int]:
        """Cases by the direction of the file's axes, the commonest first."""
        return dict(Counter(case.orientation for case in self.cases).most_common())

    @property
    def non_finite(self) -> tuple[str, ...]:
        """Names of the cases with NaN or infinite image voxels."""
        return tuple(case.name for case in self.cases if case.non_finite)


def read_fingerprint(root: Path, workers: int, progress: Callable[[int, int], None] | None = None) -> Fingerprint:
    """Reads every case under `root` with `workers` threads; holds no more volumes at once than these.

    Raises one DataError with the faults of all cases, and where no label holds anything but 0. NaN and infinite image voxels
    are noted, not refused: the recipe can have them filled.
    """
    layout = look_at_layout(root)
    gathering = Gathering(lambda case: _fingerprint(case, layout), len(layout.cases), progress)
    read = gathering.over(layout.cases, workers)
    pairing = [fault for _, faults in sorted(layout.faults.items()) for fault in faults]
    try:
        gathering.raise_faults()
    except DataError as error:
        raise DataError([*pairing, *error.faults]) from error
    if pairing:
        raise DataError(pairing)
    found = Fingerprint(layout, tuple(sorted(read, key=lambda case: case.name)))
    if not found.voxels_by_value:
        raise DataError(
            f"{root}: no label of {counted(len(read), 'case')} holds anything but 0; there is nothing to learn"
        )
    return found


def _fingerprint(case: Case, layout: Layout) -> CaseFingerprint:
    """Image and label are both read before anything is raised, so that one pass shows every fault of the case."""
    faults: list[str] = []
    image, grid, label, non_finite = None, None, None, False
    try:
        image, grid, non_finite = _read_image(case, layout)
    except DataError as error:
        faults.extend(error.faults)
    try:
        label, _ = read_label(case, layout.reading_spec("refuse"), layout.dimensions, grid)
    except DataError as error:
        faults.extend(without_declared(fault) for fault in error.faults)
    if faults or image is None or grid is None or label is None:
        raise DataError(faults)
    if layout.ignore_label is not None:
        # Neither a class nor anything to take intensities from
        label[label == layout.ignore_label] = 0
    values, counts = np.unique(label, return_counts=True)
    inside = np.flatnonzero(label[0])
    chosen = inside[np.linspace(0, len(inside) - 1, min(len(inside), _SAMPLES_PER_CASE)).astype(np.int64)]
    order, orientation = _axes(grid)
    spacing = spacing_of(grid.affine, layout.dimensions)
    return CaseFingerprint(
        name=case.name,
        shape=tuple(grid.shape[axis] for axis in order),
        spacing=tuple(float(spacing[axis]) for axis in order),
        orientation=orientation,
        counts={int(value): int(count) for value, count in zip(values, counts, strict=True) if value},
        foreground=image.reshape(len(image), -1)[:, chosen],
        nonzero_share=_nonzero_share(image),
        minimum=float(image.min()),
        maximum=float(image.max()),
        non_finite=non_finite,
    )


def _read_image(case: Case, layout: Layout) -> tuple[np.ndarray, Grid, bool]:
    try:
        return *read_image(case, layout.reading_spec("refuse"), layout.dimensions), False
    except DataError as error:
        # Only where filling helps was it the NaN voxels alone; else the second reading raises what else is wrong
        try:
            return *read_image(case, layout.reading_spec("replace"), layout.dimensions), True
        except DataError as rest:
            raise rest from error


def _axes(grid: Grid) -> tuple[list[int], str]:
    """The file's axis along each axis of RAS, and the letters of the file's own axes."""
    if len(grid.shape) < 3:
        return [0, 1], "plane"
    ends = nib.orientations.io_orientation(grid.affine)
    if np.isnan(ends).any():
        return [0, 1, 2], "unclear"
    return [int(axis) for axis in np.argsort(ends[:, 0])], "".join(nib.orientations.ornt2axcodes(ends))


def _nonzero_share(image: np.ndarray) -> float:
    nonzero = (image != 0).any(axis=0)
    share = 1.0
    for axis, length in enumerate(nonzero.shape):
        hits = np.flatnonzero(nonzero.any(axis=tuple(other for other in range(nonzero.ndim) if other != axis)))
        share *= (hits[-1] - hits[0] + 1) / length if len(hits) else 0.0
    return float(share)
