"""Owns what can be wrong between cases that are sound by themselves: one case twice, and nothing to learn in any of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fasttrain.data.checking.judging import CaseFindings
from fasttrain.data.sources.found import listed
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
    nothing = "background" + " and ignored voxels" * any(one.ignored for one in training)
    return (
        f"{root}: no label of {many} holds anything but {nothing}, so there is nothing to learn; mend the labels, or see that "
        "data.classes names their values"
    )


def texts_of_ignored(findings: Sequence[CaseFindings], split: Split | None) -> list[str]:
    """Warnings of labels that hold nothing but voxels of `data.ignore_label`: what comes of the cases in each part."""
    ignored = [one.case.name for one in findings if one.all_ignored]
    if not ignored:
        return []
    if split is None:
        return [f"{_labels_of(ignored)} nothing but ignored voxels"]
    parts = (("nothing is learnt from", split.train), ("no score is had from", split.validation))
    texts = []
    for outcome, cases in parts:
        inside = [name for name in ignored if name in {case.name for case in cases}]
        if inside:
            texts.append(
                f"{_labels_of(inside)} nothing but ignored voxels; {outcome} {'it' if len(inside) == 1 else 'them'}"
            )
    validated = {one.case.name for one in findings} & {case.name for case in split.validation}
    if validated and validated <= set(ignored):
        texts.append(
            "no validation case has a voxel that is scored, so there will be no score and no best epoch; label some, or change "
            "data.split"
        )
    return texts


def _labels_of(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"the label of case {names[0]} holds"
    return f"the labels of {len(names)} cases ({listed(names)}) hold"


def _parts(split: Split | None) -> dict[str, str]:
    """A case that trains and validates alike (`kind: same`) belongs to no part that another could leak into."""
    if split is None or split.train == split.validation:
        return {}
    return {case.name: part for part, cases in split.parts.items() for case in cases}


def _fault(one: CaseFindings, earlier: CaseFindings, parts: dict[str, str]) -> str:
    own, other = parts.get(one.case.name), parts.get(earlier.case.name)
    said = [f"case {each.case.name}{f', {part}' if part else ''}" for each, part in ((one, own), (earlier, other))]
    leak = own is not None and other is not None and own != other
    why = f"the same voxels in {other} and {own}, whose scores then say too much" if leak else "the same case twice"
    return (
        f"{one.case.images[0]} ({said[0]}) holds the voxels of {earlier.case.images[0]} ({said[1]}): {why}; "
        "remove one of the two"
    )
