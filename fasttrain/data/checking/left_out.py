"""Owns what is told of masks of which every structure is left out: a name spelt otherwise would pass for an empty label."""

from __future__ import annotations

from collections.abc import Sequence

from fasttrain.data.checking.judging import CaseFindings
from fasttrain.data.dicom.contents import structures_of
from fasttrain.data.dicom.instances import instance_of, plain_name
from fasttrain.data.sources.found import listed
from fasttrain.errors import DataError
from fasttrain.samples import Case


def text_of_left_out(findings: Sequence[CaseFindings]) -> str | None:
    """A sentence on the cases whose mask holds structures, but none that is called as the recipe has it; None without any."""
    left_out = {one.case.name: names for one in findings if one.empty and (names := _left_out(one.case))}
    if not left_out:
        return None
    (first, *_) = (one.case.drawn for one in findings if one.case.name in left_out)
    assert first is not None
    known = listed([repr(name) for name, value in first.values if value]) or "none"
    found = listed(sorted({repr(name) for names in left_out.values() for name in names}))
    many = (
        f"the mask of case {next(iter(left_out))} holds"
        if len(left_out) == 1
        else f"the masks of {len(left_out)} cases ({listed(left_out)}) hold"
    )
    return (
        f"{many} {found} but no {known}, and data.source.other_structures: skip leaves out what is not named; give a structure "
        "that is meant its label value with data.source.structures"
    )


def _left_out(case: Case) -> list[str]:
    """The names in a mask none of whose structures is drawn; empty where one is, or where nothing is left out unasked."""
    if case.drawn is None or case.label is None or case.drawn.others != "skip":
        return []
    values = {plain_name(name): value for name, value in case.drawn.values}
    try:
        names = structures_of(instance_of(case.label))
    except DataError:
        return []
    if any(values.get(plain_name(name)) for name in names):
        return []
    return [name for name in names if plain_name(name) not in values]
