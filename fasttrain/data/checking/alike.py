"""Owns telling faults that many cases share in one line: what their sentences have in common, less files and counts of voxels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fasttrain.data.checking.judging import CaseFindings
from fasttrain.data.nifti import is_nifti
from fasttrain.data.sources.found import listed
from fasttrain.wording import counted

_LEAST = 5
"""Cases with the same fault that get a line."""
_VOXELS = re.compile(r" in [\d,]+ voxels?")
_NUMBER = re.compile(r"\d[\d,.]*")
_UNDECLARED = "the undeclared label value"


def shared_faults(findings: Sequence[CaseFindings]) -> list[str]:
    """One line for each fault of at least five cases, the commonest first; what differs between them is `…`."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for one in findings:
        for text in dict.fromkeys(_bare(fault, one) for fault in one.faults):
            # Which values are undeclared tells faults apart, other numbers do not
            key = text if _UNDECLARED in text else _NUMBER.sub("#", text)
            groups.setdefault(key, []).append((one.case.name, text))
    large = sorted((members for members in groups.values() if len(members) >= _LEAST), key=len, reverse=True)
    return [
        f"{counted(len(members), 'case')}: {_merged([text for _, text in members])} ({listed(name for name, _ in members)})"
        for members in large
    ]


def _bare(fault: str, one: CaseFindings) -> str:
    """The sentence without what belongs to the one case: its files, its name, numbers of voxels."""
    case = one.case
    if case.images and not is_nifti(case.images[0]):
        # Sentences on a series name its folder
        fault = fault.replace(str(case.images[0].parent), "…")
    # The longest first: a name may be a part of a path
    for path in sorted(map(str, (*case.images, *((case.label,) if case.label else ()))), key=len, reverse=True):
        fault = fault.replace(path, "…")
    fault = re.sub(rf"(?<![\w.-]){re.escape(case.name)}(?![\w-])", "…", fault)
    fault = _VOXELS.sub("", fault).removeprefix("… ").removeprefix("…: ").removeprefix("has ")
    return fault.removeprefix("the ") if fault.startswith(_UNDECLARED) else fault


def _merged(texts: Sequence[str]) -> str:
    words = [text.split(" ") for text in texts]
    if len({len(one) for one in words}) > 1:
        return texts[0]
    return " ".join(column[0] if len(set(column)) == 1 else "…" for column in zip(*words, strict=True))
