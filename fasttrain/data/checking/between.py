"""Owns what can be wrong between cases that are sound by themselves: one case twice, and nothing to learn in any of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fasttrain.data.checking.judging import CaseFindings
from fasttrain.data.splits import Split
from fasttrain.wording import counted


def faults_of_copies(findings: Sequence[CaseFindings], split: Split | None) -> dict[str, str]:
    """{case name: fault} of each case whose image voxels are those of a case before it by name."""
    parts = _parts(split)
    first: dict[tuple[str, ...], CaseFindings] = {}
    faults = {}
    for one in sorted(findings, key=lambda one: one.case.name):
        if not one.digests or not all(one.digests):
            continue
        earlier = first.setdefault(one.digests, one)
        if earlier is not one:
            faults[one.case.name] = _fault(one, earlier, parts)
    return faults


def fault_of_empty(findings: Sequence[CaseFindings], split: Split | None, root: Path) -> str | None:
    """The fault of a set whose training cases hold nothing but background, every one of them."""
    names = None if split is None else {case.name for case in split.train}
    training = [one for one in findings if names is None or one.case.name in names]
    # A label that could not be read, or whose values are not declared, may hold anything
    if not training or not all(one.empty and not one.faults for one in training):
        return None
    many = f"the {counted(len(training), 'training case' if split is not None else 'case')}"
    return (
        f"{root}: no label of {many} holds anything but background, so there is nothing to learn; mend the labels, or see that "
        "data.classes names their values"
    )


def _parts(split: Split | None) -> dict[str, str]:
    """A case that trains and validates alike (`kind: same`) belongs to no part that another could leak into."""
    if split is None or split.train == split.validation:
        return {}
    named = (("training", split.train), ("validation", split.validation), ("test", split.test))
    return {case.name: part for part, cases in named for case in cases}


def _fault(one: CaseFindings, earlier: CaseFindings, parts: dict[str, str]) -> str:
    own, other = parts.get(one.case.name), parts.get(earlier.case.name)
    said = [f"case {each.case.name}{f', {part}' if part else ''}" for each, part in ((one, own), (earlier, other))]
    leak = own is not None and other is not None and own != other
    why = f"the same voxels in {other} and {own}, whose scores then say too much" if leak else "the same case twice"
    return (
        f"{one.case.images[0]} ({said[0]}) holds the voxels of {earlier.case.images[0]} ({said[1]}): {why}; "
        "remove one of the two"
    )
