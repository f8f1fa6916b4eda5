"""Owns the check of a data set: every file read or remembered, every case judged, and the faulty ones refused or left out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fasttrain.data.checking.between import fault_of_empty, faults_of_copies, texts_of_ignored
from fasttrain.data.checking.facts import View
from fasttrain.data.checking.judging import CaseFindings, Terms, judge
from fasttrain.data.checking.left_out import text_of_left_out
from fasttrain.data.checking.patients import judge_patient
from fasttrain.data.checking.planes import refuse_other_axes
from fasttrain.data.checking.reading_pass import Progress, facts_of
from fasttrain.data.checking.remembered import Remembered
from fasttrain.data.checking.sizes import faults_of_size
from fasttrain.data.checking.stray import StrayValue, stray_values
from fasttrain.data.sources.found import listed
from fasttrain.data.splits import Split
from fasttrain.errors import DataError, tells_of_open_files
from fasttrain.samples import Case
from fasttrain.wording import counted

_MOST_WARNINGS = 20


@dataclass(frozen=True)
class Checked:
    """What a check found. `cases` by name; set_faults concern no single case; notes are further warnings, one sentence each."""

    root: Path
    terms: Terms
    cases: tuple[CaseFindings, ...]
    set_faults: tuple[str, ...]
    notes: tuple[str, ...]
    files: int
    files_read: int
    seconds: float

    @property
    def faults(self) -> tuple[str, ...]:
        """Every fault, those of cases by the name of the case."""
        return (*(fault for case in self.cases for fault in case.faults), *self.set_faults)

    @property
    def bad(self) -> dict[str, tuple[str, ...]]:
        """{name of a faulty case: its faults}."""
        return {case.case.name: case.faults for case in self.cases if case.faults}

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for all cases without foreground, one for each class that resampling loses, one for each value that
        looks like a slip (where no recipe declares the values), and the notes.
        """
        bad = self.bad
        sound = [case for case in self.cases if case.case.name not in bad]
        empty = [case.case.name for case in sound if case.empty and not case.all_ignored]
        texts = [text for case in sound for text in case.warnings]
        if len(texts) > _MOST_WARNINGS:
            more = len(texts) - _MOST_WARNINGS
            texts = [*texts[:_MOST_WARNINGS], f"{more} more classes vanish on resampling; `fasttrain check` lists them"]
        if empty:
            texts.insert(0, _empty_text(empty))
        return (*texts, *map(str, self._stray()), *self.notes)

    def _stray(self) -> list[StrayValue]:
        if self.terms.recipe is not None:
            return []
        return stray_values({case.case.name: case.voxels or {} for case in self.cases}, self.terms.named)


def check_cases(
    cases: Sequence[Case],
    root: Path,
    terms: Terms,
    split: Split | None,
    folder: Path,
    workers: int,
    progress: Progress | None = None,
    full: bool = False,
    pairing: Mapping[str, tuple[str, ...]] | None = None,
) -> Checked:
    """Reads every image and label that is not remembered from an earlier check (`full`: all) and judges each case.

    `folder` is fasttrain's cache folder, where facts are remembered; nothing is written beside the data. Without a `split`
    cases are compared all the same. pairing: {name of a case whose files do not pair: its faults}. Raises nothing for faults:
    they are in what is returned; RecipeError where `data.spacing` makes more of every case than any memory holds, and where
    every case is a volume and the recipe is for planes, or the other way round.
    """
    began = time.monotonic()
    remembered, pairing = Remembered(folder, root), pairing or {}
    wanted = [(path, terms.image_view) for case in cases for path in case.images]
    wanted += [(case.label, _label_view(case, terms)) for case in cases if case.label is not None]
    facts, files_read = facts_of(wanted, remembered, workers, full, progress)
    note = remembered.save()
    refuse_other_axes(cases, {path: found for (path, view), found in facts.items() if not view.label}, terms)
    judged = judge_patient if terms.data.source.kind == "openkbp" else judge
    findings = [
        judged(
            case,
            [facts[path, terms.image_view] for path in case.images],
            facts[case.label, _label_view(case, terms)] if case.label is not None else None,
            terms,
            pairing.get(case.name, ()),
        )
        for case in sorted(cases, key=lambda case: case.name)
    ]
    too_large, far_larger = faults_of_size(findings, terms)
    findings = _with(findings, too_large)
    findings = _with(findings, faults_of_copies([one for one in findings if not one.faults], split))
    empty = fault_of_empty(findings, split, root)
    sound = [one for one in findings if not one.faults]
    left_out = text_of_left_out(sound)
    notes = [left_out if empty is None else None, *far_larger, *texts_of_ignored(sound, split), note]
    return Checked(
        root=root,
        terms=terms,
        cases=tuple(findings),
        set_faults=() if empty is None else tuple(text for text in (empty, left_out) if text is not None),
        notes=tuple(text for text in notes if text is not None),
        files=len(facts),
        files_read=files_read,
        seconds=time.monotonic() - began,
    )


def _label_view(case: Case, terms: Terms) -> View:
    """A file that holds image and label is read once."""
    return terms.image_view if case.label in case.images else terms.label_view(case)


def _with(findings: list[CaseFindings], faults: Mapping[str, str]) -> list[CaseFindings]:
    """With a further fault of the cases so named."""
    return [
        replace(one, faults=(*one.faults, faults[one.case.name])) if one.case.name in faults else one
        for one in findings
    ]


def without_bad_cases(checked: Checked, split: Split) -> Split:
    """The split less the faulty cases, where the recipe says `bad_cases: skip`.

    Raises DataError with every fault where it says `refuse`, where the set as a whole is faulty, where too many files were open,
    and where no case is left to train or to validate.
    """
    if not checked.faults:
        return split
    bad = checked.bad
    # Too many open files make no case faulty, which another run would train on
    whole = any(map(tells_of_open_files, checked.faults))
    if checked.terms.data.bad_cases == "refuse" or checked.set_faults or whole:
        raise DataError(checked.faults)
    left = split.without(bad)
    gone = [name for name in ("training", "validation") if not left.parts[name]]
    if gone:
        raise DataError(
            [
                *checked.faults,
                f"data.bad_cases: skip leaves no {' and no '.join(gone)} case of {checked.root}; mend cases, or change "
                "data.split",
            ]
        )
    empty = fault_of_empty([one for one in checked.cases if one.case.name not in bad], left, checked.root)
    if empty is not None:
        raise DataError([*checked.faults, empty])
    return left


def skipped_text(bad: dict[str, tuple[str, ...]]) -> list[str]:
    """One sentence for all cases that were left out and one a fault."""
    if not bad:
        return []
    return [
        f"left out {counted(len(bad), 'faulty case')} (data.bad_cases: skip): {listed(bad)}",
        *(f"left out: {fault}" for faults in bad.values() for fault in faults),
    ]


def remaining_text(checked: Checked, split: Split) -> str:
    """What `data.bad_cases: skip` leaves out of a faulty set, and what remains of each part."""
    bad = checked.bad
    remain = split.without(bad).parts
    left = ", ".join(f"{len(remain[name])} of {len(cases)} {name}" for name, cases in split.parts.items() if cases)
    many = counted(len(bad), "faulty case")
    return f"data.bad_cases: skip leaves out {many} ({listed(bad)}); there remain {left} cases"


def _empty_text(names: list[str]) -> str:
    if len(names) == 1:
        return f"the label of case {names[0]} holds nothing but background; the case is trained on as background"
    return f"the labels of {len(names)} cases hold nothing but background ({listed(names)}); they are trained on as background"
