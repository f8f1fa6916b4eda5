"""Owns the suspicion that a label value is a slip of the hand: in one case of several alone, and in next to no voxels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fasttrain.wording import counted

_SHARE = 1e-4
"""Of all labelled voxels; a value with fewer is suspected."""
_FEW_VOXELS = 3
"""A value with so few is suspected in sets of any size: nothing can be learnt from them."""


@dataclass(frozen=True)
class StrayValue:
    """A label value that occurs in the case of that name alone, in `voxels` of `labelled` voxels over all cases."""

    value: int
    case: str
    voxels: int
    labelled: int

    def __str__(self) -> str:
        return (
            f"the label value {self.value} occurs in case {self.case} alone, in {counted(self.voxels, 'voxel')} of "
            f"{self.labelled:,} labelled ones; if it is a slip, mend the label or map it with data.label_map: "
            f"{{{self.value}: 0}}, else it is a class of its own"
        )


def stray_values(voxels_by_case: Mapping[str, Mapping[int, int]], named: Collection[int] = ()) -> list[StrayValue]:
    """`voxels_by_case`: {case: {label value: voxels}}; 0 is no label. Values in `named` were meant and are never suspected."""
    total: Counter[int] = Counter()
    holders: dict[int, list[str]] = {}
    for case, voxels in voxels_by_case.items():
        for value, count in voxels.items():
            if value and count:
                total[value] += count
                holders.setdefault(value, []).append(case)
    labelled = sum(total.values())
    if len(voxels_by_case) < 2 or len(total) < 2:
        return []
    return [
        StrayValue(value, cases[0], total[value], labelled)
        for value, cases in sorted(holders.items())
        if value not in named and len(cases) == 1 and (total[value] <= _FEW_VOXELS or total[value] < _SHARE * labelled)
    ]
