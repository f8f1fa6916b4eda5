"""Owns what differs between two runs: in recipe, plan, machine and result, and the picture of their curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fasttrain.engine.resuming.changes import Change, as_values, changes_between
from fasttrain.errors import FasttrainError, RecipeError
from fasttrain.history.events_so_far import number
from fasttrain.history.listing import Listed, listed
from fasttrain.history.standing import RunReader, Standing
from fasttrain.recipe import resolve
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.figure_file import save_figure
from fasttrain.telemetry.metrics_csv import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MACHINE = ("hardware", "host", "system", "python", "cuda", "versions", "variables")
_CHANGING = frozenset({"memory_free_gib", "gpu_free_gib", "shared_gib", "gpu_uuid"})
"""What is another at every start of one and the same kind of machine."""
_MOST_NAMED = 3


@dataclass(frozen=True)
class Difference:
    """A value by its dotted key in run A and run B; None: it has none."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side. `plan` holds decisions that came out otherwise and sizes; `notes` say what makes the results hard
    to compare. `curves`: (name, rows of metrics.csv) of A and of B, one a fold.
    """

    a: Listed
    b: Listed
    recipe: list[Difference]
    plan: list[Difference]
    machine: list[Difference]
    result: list[Difference]
    notes: list[str]
    curves: tuple[list[tuple[str, list[Row]]], list[tuple[str, list[Row]]]]

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        parts = {"recipe": self.recipe, "plan": self.plan, "machine": self.machine, "result": self.result}
        sides = {"a": self.a.record(), "b": self.b.record()}
        return {**sides, **{name: [asdict(one) for one in part] for name, part in parts.items()}, "notes": self.notes}


def compare(a: Path, b: Path) -> Comparison:
    """Reads both runs and sets them against each other; what a damaged run lacks is a note. Raises RecipeError where there is
    no run.
    """
    lists = [listed(RunFolder(path)) for path in (a, b)]
    wholes = [RunReader(path).read() for path in (a, b)]
    parts = [_parts(path) or [whole] for path, whole in zip((a, b), wholes, strict=True)]
    firsts = [runs[0] for runs in parts]
    notes = [f"{side}: {fault}" for side, run in zip("AB", lists, strict=True) for fault in (run.faults if run else ())]
    recipes = [_recipe(run, side, notes) for side, run in zip("AB", firsts, strict=True)]
    left, right = lists
    if left is None or right is None:
        raise RecipeError(f"{b if left is not None else a} holds no run; see `fasttrain runs list`")
    notes += _not_alike(left, right, firsts, wholes)
    return Comparison(
        a=left,
        b=right,
        recipe=_of_recipes(*recipes),
        plan=_of_plans(firsts[0].plan, firsts[1].plan),
        machine=list(_differing(_machine(firsts[0]), _machine(firsts[1]))),
        result=_of_results(left, right, wholes),
        notes=notes,
        curves=(_curves(a, parts[0]), _curves(b, parts[1])),
    )


def draw_comparison(comparison: Comparison, path: Path) -> Path | None:
    """Losses, scores and pace of both runs over their epochs in one PNG; None where neither has a row. Raises StorageError."""
    every = [(name, rows, index) for index, runs in enumerate(comparison.curves) for name, rows in runs if rows]
    if not every:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    metrics = dict.fromkeys(run.best[0] for run in (comparison.a, comparison.b) if run.best is not None)
    metric = next(iter(metrics), "val_dice")
    panels = (
        ("train_loss", "training loss (mean over the epoch)"),
        (metric, metric.removeprefix("val_").replace("_", " ") + (" (Gy)" if "dose" in metric else "")),
        ("patches_per_second", "patches/s"),
    )
    for axes, (column, label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name, rows, index in every:
            _draw(axes, rows, column, name, index)
        axes.set_ylabel(label)
        axes.set_xlabel("epoch")
        axes.grid(True, alpha=0.3)
        if column == "patches_per_second":
            axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            for text in axes.legend(fontsize=8).get_texts():
                text.set_parse_math(False)
    return save_figure(figure, path)


def _draw(axes: Axes, rows: list[Row], column: str, name: str, index: int) -> None:
    points = [(row["epoch"], value) for row in rows if (value := row.get(column)) is not None and math.isfinite(value)]
    if points:
        # matplotlib leaves out of the legend what begins with an underscore
        axes.plot(
            *zip(*points, strict=True), color=f"C{index}", marker=".", markersize=3, label=f"{'AB'[index]}  {name}"
        )


def _parts(path: Path) -> list[Standing]:
    """The runs of a folder that holds all folds of a split."""
    folder = RunFolder(path)
    if not folder.folds.exists():
        return []
    folds = sorted(
        (int(number), one) for one in path.glob("fold_*") if (number := one.name.removeprefix("fold_")).isdecimal()
    )
    return [RunReader(one).read() for _, one in folds]


def _curves(path: Path, parts: list[Standing]) -> list[tuple[str, list[Row]]]:
    name = path.resolve().name
    return [(name if len(parts) == 1 else f"{name}/{part.path.name}", part.rows) for part in parts]


def _machine(run: Standing) -> dict[str, Any]:
    return {key: run.environment.get(key) for key in _MACHINE}


def _recipe(run: Standing, side: str, notes: list[str]) -> Mapping[str, Any]:
    """The values that were trained with; none, with a note, where they cannot be had."""
    kept = run.plan.get("recipe")
    if isinstance(kept, dict) and isinstance(kept.get("data"), dict):
        return kept
    try:
        return as_values(resolve(str(RunFolder(run.path).recipe)).recipe)
    except FasttrainError as error:
        notes.append(f"{side}: its recipe cannot be read, so that recipes are not compared: {error.faults[0]}")
        return {}


def _of_recipes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    if not a or not b:
        return []
    found = {change.key: Difference(change.key, change.before, change.after) for change in changes_between(a, b)}
    # Keys that only one side has are told of the side that has them alone
    back: list[Change] = changes_between(b, a)
    return [*found.values(), *(Difference(one.key, one.after, one.before) for one in back if one.key not in found)]


def _of_plans(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    decisions = [
        {
            one["name"]: one.get("value")
            for one in plan.get("decisions") or ()
            if isinstance(one, dict) and "name" in one
        }
        for plan in (a, b)
    ]
    names = dict.fromkeys([*decisions[0], *decisions[1]])
    found = [
        Difference(name, decisions[0].get(name), decisions[1].get(name))
        for name in names
        if decisions[0].get(name) != decisions[1].get(name)
    ]
    return [*found, *_differing({"sizes": a.get("sizes")}, {"sizes": b.get("sizes")})]


def _differing(a: Any, b: Any, keys: tuple[str, ...] = ()) -> Iterator[Difference]:
    if a == b or (keys and keys[-1] in _CHANGING):
        return
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        yield Difference(".".join(keys), a, b)
        return
    for key in dict.fromkeys([*a, *b]):
        yield from _differing(a.get(key), b.get(key), (*keys, str(key)))


def _of_results(a: Listed, b: Listed, wholes: list[Standing]) -> list[Difference]:
    """Key figures, whether they differ or not, and the scores by class and case that do."""
    found = [
        Difference("status", a.status, b.status),
        Difference("best", a.best and a.best[1], b.best and b.best[1]),
        Difference("best epoch", (a.best and a.best[2]) or None, (b.best and b.best[2]) or None),
        Difference("epochs", a.epochs_done or None, b.epochs_done or None),
        Difference("patches/s", a.patches_per_second, b.patches_per_second),
        Difference("hours", a.hours, b.hours),
        Difference("cost", a.cost, b.cost),
    ]
    for name in ("to_first_step", "training", "validation"):
        values = [number(whole.summary, "seconds", name) for whole in wholes]
        found.append(Difference(f"seconds, {name.replace('_', ' ')}", *values))
    classes = [_by_class(whole) for whole in wholes]
    for name in dict.fromkeys([*classes[0], *classes[1]]):
        found.append(Difference(f"last mean, {name}", classes[0].get(name), classes[1].get(name)))
    return [one for one in found if not (one.a is None and one.b is None)]


def _by_class(run: Standing) -> dict[str, float]:
    """The mean over the cases of the last validation."""
    cases = run.summary.get("cases")
    values: dict[str, list[float]] = {}
    for scores in cases.values() if isinstance(cases, dict) else ():
        for name in scores if isinstance(scores, dict) else ():
            if (value := number(scores, name)) is not None:
                values.setdefault(name, []).append(value)
    return {name: fmean(one) for name, one in values.items()}


def _not_alike(a: Listed, b: Listed, firsts: list[Standing], wholes: list[Standing]) -> list[str]:
    """What makes one result no measure of the other."""
    notes = []
    metrics = [run.best and run.best[0] for run in (a, b)]
    if None not in metrics and metrics[0] != metrics[1]:
        notes.append(f"A is judged by {metrics[0]} and B by {metrics[1]}: their scores cannot be compared")
    scored = [_scored(first, whole) for first, whole in zip(firsts, wholes, strict=True)]
    if all(scored) and scored[0] != scored[1]:
        alone = [sorted(scored[0] - scored[1]), sorted(scored[1] - scored[0])]
        named = [f"{side} alone {_some(names)}" for side, names in zip("AB", alone, strict=True) if names]
        notes.append(f"they were scored on different cases, which moves the scores by itself: {'; '.join(named)}")
    running = [side for side, run in zip("AB", (a, b), strict=True) if run.status == "running"]
    notes += [f"{side} is still running: its figures are those up to now" for side in running]
    contents = [run.plan.get("case_contents") or {} for run in firsts]
    other = [case for case in contents[0] if case in contents[1] and contents[0][case] != contents[1][case]]
    if other:
        notes.append(f"cases of one name are not the same volumes in both: {_some(sorted(other))}")
    return notes


def _scored(first: Standing, whole: Standing) -> set[str]:
    given = whole.summary.get("cases") or (first.plan.get("cases") or {}).get("validation") or ()
    return {str(name) for name in given}


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
