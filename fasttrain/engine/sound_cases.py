"""Owns which cases a run is made of: those that its check finds sound, and in a run that goes on those that it began with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.data.checking import Checked, Terms, check_cases, skipped_text, without_bad_cases
from fasttrain.data.sources import FoundCases
from fasttrain.data.sources.found import listed
from fasttrain.data.splits import Split, split_cases
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError, RecipeError
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.limits import cpu_limit
from fasttrain.recipe import Recipe
from fasttrain.samples import Case
from fasttrain.telemetry.events import Event, Message, Progress
from fasttrain.wording import counted, first_few

Faults = dict[str, tuple[str, ...]]
"""{case name: its faults}."""
Contents = dict[str, str]
"""{case name: a digest of voxels and grid}."""


def sound_cases(
    recipe: Recipe,
    root: Path,
    found: FoundCases,
    former: Mapping[str, Any] | None,
    emit: Callable[[Event], None],
    stop: StopRequest,
) -> tuple[Split, Faults, Contents]:
    """The split less the cases that are left out, the faults of these, and what each case that is used holds.

    Raises DataError with all faults of all cases where the recipe does not leave faulty ones out, and of those that the run
    `former` trained on; Stopped where `stop` was asked for, once what was read is remembered.
    """
    check = _Check(recipe, root, found, emit, stop)
    split = split_cases(found.every, recipe.data.split)
    gone: Faults = {name: tuple(faults) for name, faults in (former or {}).get("skipped_cases", {}).items()}
    kept = split.without(gone)
    begun, mended = stop.begun, frozenset[str]()
    # From here on a signal asks: what was read until then is worth keeping
    stop.begun = True
    checked = check(_cases_of(kept), kept)
    if former is not None:
        _refuse_faulty_since(former, checked)
        mended = check.mended([case for case in _cases_of(split) if case.name in gone])
    left = without_bad_cases(checked, kept)
    stop.check()
    stop.begun = begun
    out = {**gone, **checked.bad}
    told = {name: faults for name, faults in out.items() if name not in mended}
    for warning in (*checked.warnings, *skipped_text(told)):
        emit(Message(warning, "warning"))
    used = {case.name for case in (*left.train, *left.validation)}
    return left, out, {one.case.name: one.content for one in checked.cases if one.case.name in used}


def check_same_cases(recorded: Mapping[str, list[str]], split: Split, root: Path) -> None:
    """Raises DataError where the parts of a split are not those of `plan.json`."""
    faults = []
    for part in ("training", "validation"):
        then, now = set(recorded[part]), {case.name for case in split.parts[part]}
        if then != now:
            differing = sorted(then ^ now)
            faults.append(
                f"{root}: the {part} cases are not those the run began with ({len(then)} then, {len(now)} now; "
                f"for example {', '.join(differing[:3])}); name the folder it began with by --data, or begin anew"
            )
    if faults:
        raise DataError(faults)


def changed_text(recorded: Mapping[str, str], contents: Contents) -> str | None:
    """The sentence about cases that no longer hold what they held when the run began; None where all do.

    recorded: what `plan.json` has; of cases that are not in it nothing is known.
    """
    changed = sorted(name for name, content in contents.items() if recorded.get(name, content) != content)
    if not changed:
        return None
    hold = "no longer holds what it" if len(changed) == 1 else "no longer hold what they"
    return (
        f"{counted(len(changed), 'case')} of {len(contents):,} {hold} held when the run began ({first_few(changed)}): "
        "training goes on with what is there now, so its losses are not those of an unbroken run; for these bring the files "
        "back, or begin anew"
    )


@dataclass(frozen=True)
class _Check:
    recipe: Recipe
    root: Path
    found: FoundCases
    emit: Callable[[Event], None]
    stop: StopRequest

    def __call__(self, cases: Sequence[Case], split: Split | None) -> Checked:
        folder = own_cache_folder()
        terms, pairing = Terms.of_recipe(self.recipe), self.found.faults
        return check_cases(cases, self.root, terms, split, folder, cpu_limit(), self._progress, pairing=pairing)

    def mended(self, cases: Sequence[Case]) -> frozenset[str]:
        """Those of the cases that were left out when the run began that are sound now, which is told."""
        if not cases:
            return frozenset()
        try:
            bad = self(cases, None).bad
        except RecipeError:
            # Of these alone, every one is too large for any memory
            return frozenset()
        sound = [case.name for case in cases if case.name not in bad]
        if sound:
            text = f"left out when the run began and sound now: {listed(sound)}; only a new run takes them in"
            self.emit(Message(text, "warning"))
        return frozenset(sound)

    def _progress(self, done: int, total: int) -> None:
        self.emit(Progress("checking files", done, total))
        self.stop.check()


def _refuse_faulty_since(former: Mapping[str, Any], checked: Checked) -> None:
    names = {name for part in ("training", "validation") for name in former["cases"][part]}
    faulty = {name: faults for name, faults in checked.bad.items() if name in names}
    if faulty:
        raise DataError(
            [
                *(fault for faults in faulty.values() for fault in faults),
                f"{checked.root}: the run began with {listed(faulty)} sound, and cannot go on without; bring the files back as "
                "they were, or begin anew",
            ]
        )


def _cases_of(split: Split) -> list[Case]:
    return list(dict.fromkeys(case for part in split.parts.values() for case in part))
