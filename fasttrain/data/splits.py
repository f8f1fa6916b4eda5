"""Owns how cases part into training, validation and test: folds, the last ones, shares, lists of names, or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fasttrain.data.file_names import as_text
from fasttrain.errors import RecipeError
from fasttrain.recipe.data_spec import (
    KFoldSplit,
    LastSplit,
    ListsSplit,
    ProvidedSplit,
    RatioSplit,
    SameSplit,
    SplitSpec,
)
from fasttrain.recipe.names import did_you_mean
from fasttrain.samples import Case
from fasttrain.wording import counted


@dataclass(frozen=True)
class Split:
    """Three disjoint parts, each sorted by case name; with `kind: same` training and validation are one and the same."""

    train: tuple[Case, ...]
    validation: tuple[Case, ...]
    test: tuple[Case, ...] = ()

    @property
    def parts(self) -> dict[str, tuple[Case, ...]]:
        """The parts by the names that sentences and records have for them."""
        return {"training": self.train, "validation": self.validation, "test": self.test}

    def without(self, names: Container[str]) -> Split:
        """The same parts less the cases of these names."""
        return Split(*(tuple(case for case in part if case.name not in names) for part in self.parts.values()))


def split_cases(cases: Sequence[Case], spec: SplitSpec) -> Split:
    """Parts the cases as `data.split` says; the same cases and spec give the same parts on any machine.

    Raises RecipeError for names that do not exist, a case in two parts, more folds than cases, and an empty part.
    """
    ordered = sorted(cases, key=lambda case: case.name)
    # Names of cases are in one Unicode form; those that a person or a tool wrote may be in another
    parts = {
        part: names for part in ("train", "validation", "test") if isinstance(names := getattr(spec, part, 0), tuple)
    }
    spec = spec.model_copy(update={part: tuple(map(as_text, names)) for part, names in parts.items()})
    if isinstance(spec, KFoldSplit):
        split = _split_by_folds(ordered, spec)
    elif isinstance(spec, LastSplit):
        split = _split_last(ordered, spec)
    elif isinstance(spec, RatioSplit):
        split = _split_by_ratio(ordered, spec)
    elif isinstance(spec, ProvidedSplit):
        split = _split_as_provided(ordered)
    elif isinstance(spec, SameSplit):
        split = Split(train=tuple(ordered), validation=tuple(ordered))
    else:
        split = _split_by_lists(ordered, spec)
    empty = [part for part, inside in (("training", split.train), ("validation", split.validation)) if not inside]
    if empty:
        raise RecipeError(
            f"data.split ({spec.kind}) leaves no case for {' and none for '.join(empty)} of {len(ordered)} found; "
            "change data.split or add cases"
        )
    return split


_PROVIDED = ("train-pats", "validation-pats", "test-pats")


def _split_as_provided(ordered: Sequence[Case]) -> Split:
    """By the folder in which a case or its folder lies."""
    parts: dict[str, list[Case]] = {name: [] for name in _PROVIDED}
    strays = []
    for case in ordered:
        names = {folder.name for folder in case.images[0].parents[:2]}
        part = next((name for name in _PROVIDED if name in names), None)
        if part is None:
            strays.append(case)
        else:
            parts[part].append(case)
    if strays:
        raise RecipeError(
            f"data.split (provided): {strays[0].images[0]} lies in none of the folders {', '.join(_PROVIDED)}; move such cases "
            "there, or set another data.split"
        )
    return Split(*(tuple(parts[name]) for name in _PROVIDED))


def fold_indices(count: int, folds: int, fold: int, seed: int) -> np.ndarray:
    """The sorted indices of one validation fold of `count` items.

    The same as scikit-learn's KFold(n_splits=folds, shuffle=True, random_state=seed): shuffled indices cut into runs, of
    which the first count % folds are one longer.
    """
    indices = np.arange(count)
    np.random.RandomState(seed).shuffle(indices)
    sizes = np.full(folds, count // folds)
    sizes[: count % folds] += 1
    stop = int(sizes[: fold + 1].sum())
    return np.sort(indices[stop - int(sizes[fold]) : stop])


def _split_by_folds(cases: list[Case], spec: KFoldSplit) -> Split:
    _check_names(cases, {"test": spec.test})
    held = set(spec.test)
    rest = [case for case in cases if case.name not in held]
    if spec.folds > len(rest):
        raise RecipeError(
            f"data.split.folds is {spec.folds}, but there are only {counted(len(rest), 'case')} to fold; "
            f"set it to {max(len(rest), 2)} or less, or add cases"
        )
    if spec.fold >= spec.folds:
        raise RecipeError(f"data.split.fold is {spec.fold}; the folds are 0 to {spec.folds - 1}")
    chosen = set(fold_indices(len(rest), spec.folds, spec.fold, spec.seed).tolist())
    return Split(
        train=tuple(case for index, case in enumerate(rest) if index not in chosen),
        validation=tuple(case for index, case in enumerate(rest) if index in chosen),
        test=tuple(case for case in cases if case.name in held),
    )


def _split_last(cases: list[Case], spec: LastSplit) -> Split:
    needed = spec.validation + spec.test
    if needed >= len(cases):
        raise RecipeError(
            f"data.split takes {counted(spec.validation, 'case')} for validation and {spec.test} for test, but only "
            f"{len(cases)} were found and at least one must train; lower data.split.validation or data.split.test"
        )
    first = len(cases) - needed
    return Split(
        train=tuple(cases[:first]),
        validation=tuple(cases[len(cases) - spec.validation :]),
        test=tuple(cases[first : len(cases) - spec.validation]),
    )


def _split_by_ratio(cases: list[Case], spec: RatioSplit) -> Split:
    order = np.random.RandomState(spec.seed).permutation(len(cases))
    validation = max(1, round(spec.validation * len(cases)))
    test = max(1, round(spec.test * len(cases))) if spec.test else 0
    if validation + test >= len(cases):
        raise RecipeError(
            f"data.split.validation {spec.validation:g} and data.split.test {spec.test:g} of {counted(len(cases), 'case')} are "
            f"{validation} and {test}, which leaves none to train; lower them or add cases"
        )
    parts = np.split(order, [validation, validation + test])
    held, tested, trained = (tuple(cases[index] for index in sorted(part.tolist())) for part in parts)
    return Split(train=trained, validation=held, test=tested)


def _split_by_lists(cases: list[Case], spec: ListsSplit) -> Split:
    parts = {"train": spec.train, "validation": spec.validation, "test": spec.test}
    _check_names(cases, parts)
    chosen = {part: tuple(case for case in cases if case.name in set(names)) for part, names in parts.items()}
    return Split(**chosen)


def _check_names(cases: Iterable[Case], parts: dict[str, tuple[str, ...]]) -> None:
    known = [case.name for case in cases]
    known_set = set(known)
    faults = []
    for part, names in parts.items():
        for index, name in enumerate(names):
            if name not in known_set:
                hint = did_you_mean(name, known) or (
                    f"; there are {len(known)} cases, such as {known[0]}" if known else ""
                )
                faults.append(f"data.split.{part}[{index}]: no case is called {name}{hint}")
    for name, count in Counter(name for names in parts.values() for name in names).items():
        if count > 1:
            where = ", ".join(f"{part} ×{names.count(name)}" if names.count(name) > 1 else part
                              for part, names in parts.items() if name in names)  # fmt: skip
            faults.append(f"data.split: case {name} stands in {where}; a case belongs to one part, once")
    if faults:
        raise RecipeError(faults)
