"""Owns the sections of a report that are short: figures, folds, plan, time and cost, machine, recipe."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from fasttrain.history.events_so_far import number, text
from fasttrain.history.key_figures import machine_of, pace_of, score_name
from fasttrain.history.page import folded, heading, paragraph, section, table, tiles
from fasttrain.history.standing import Standing
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.start_clock import PARTS
from fasttrain.wording import counted


def hours_text(hours: float | None) -> str | None:
    """`0.4 min`, `12 min`, `3.2 h`."""
    if hours is None:
        return None
    if hours < 1 / 60:
        return f"{hours * 3600:.1f} s"
    return f"{hours * 60:.1f} min" if hours < 1 else f"{hours:.2f} h"


def summary_section(run: Standing, folds: Sequence[Standing]) -> str:
    """The head of the page: name, status, key figures, and all that went wrong."""
    name = run.path.resolve().name
    best = None
    if run.best is not None:
        metric, value, epoch = run.best
        where = f" (epoch {epoch})" if epoch else " (pooled over the folds)" if folds else ""
        best = f"{score_name(metric)} {value:.4f}{' Gy' if 'dose' in metric else ''}{where}"
    first = folds[0] if folds else run
    pace = pace_of(first)
    waiting = [share for row in first.rows if (share := row.get("wait_share")) is not None]
    hours, cost = _taken(run, folds)
    epochs = number(first.started, "epochs")
    figures = [
        ("best", best),
        ("epochs", f"{first.epochs_done}" + (f" of {epochs:.0f}" if epochs else "") + (" a fold" if folds else "")),
        ("time, all attempts", hours_text(hours)),
        ("cost", None if cost is None else f"{cost:.2f} USD"),
        ("speed, median epoch", None if pace is None else f"{pace:.1f} patches/s"),
        ("waiting for data", f"{median(waiting):.0%}" if waiting else None),
        ("machine", machine_of(first.environment) or first.device),
        ("began", None if run.began is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))),
    ]
    kind = run.status if run.status.isalpha() else ""
    faults = [*run.faults, *(f"{fold.path.name}: {fault}" for fold in folds for fault in fold.faults)]
    return "\n".join(
        part
        for part in (
            heading(name),
            paragraph(run.told, f"status {kind}"),
            paragraph(_of(run.recipe, first)),
            tiles(figures),
            *(paragraph(f"damaged: {fault}", "fault") for fault in faults),
            *(paragraph(f"warning: {warning}", "note") for warning in run.warnings),
        )
        if part
    )


def folds_section(folds: Sequence[Standing]) -> str:
    """How each fold ended."""
    rows = [
        (fold.path.name, fold.told, "–" if fold.best is None else f"{fold.best[1]:.4f}", hours_text(fold.hours) or "–")
        for fold in folds
    ]
    return section("Folds", table(("fold", "status", "best", "time"), rows))


def plan_section(run: Standing) -> str:
    """What was decided for the machine, each with its reason."""
    decisions = run.started.get("decisions") if run.started is not None else None
    rows = [tuple(map(str, one)) for one in decisions or () if isinstance(one, list | tuple) and len(one) == 3]
    if not rows:
        given = run.plan.get("decisions")
        parts = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
        rows = [tuple(str(one.get(key, "")) for key in ("name", "value", "reason")) for one in parts]
    sizes = run.plan.get("sizes")
    pairs = (
        [(str(key).replace("_", " "), _plain(value)) for key, value in sizes.items()] if isinstance(sizes, dict) else []
    )
    network = text(run.started, "outline") or text(run.plan, "outline") or ""
    return section(
        "Plan",
        paragraph(f"network: {network}") if network else "",
        table(("decision", "value", "reason"), rows),
        "<h3>Sizes</h3>" if pairs else "",
        table(("", ""), pairs, numbers_from=1),
    )


def time_section(run: Standing, folds: Sequence[Standing]) -> str:
    """Where the time went and what it cost."""
    seconds = run.summary.get("seconds")
    rows = []
    if isinstance(seconds, dict):
        names = ("total", "to_first_step", "training", "validation")
        rows = [(name.replace("_", " "), _seconds(number(seconds, name))) for name in names]
        start = seconds.get("start")
        rows += [(f"start: {part.replace('_', ' ')}", _seconds(number(start, part))) for part in PARTS] if start else []
    hours, cost = _taken(run, folds)
    attempts = sum(fold.attempts for fold in folds) or run.attempts
    rows += [("attempts", str(attempts) if attempts else "–"), ("hours, all attempts", _figure(hours, 3))]
    if cost is not None:
        rows += [("cost, all attempts", f"{cost:.2f} USD")]
        rows += [("price of an hour", f"{run.price_per_hour:g} USD")] if run.price_per_hour is not None else []
    written = run.summary.get("checkpoint")
    for key, value in written.items() if isinstance(written, dict) else ():
        rows.append((f"checkpoint: {str(key).replace('_', ' ')}", _plain(value)))
    known = [row for row in rows if row[1] != "–"]
    note = "" if cost is not None else "No price was given (--price-per-hour), so that no cost is known."
    return section("Time and cost", table(("", ""), known, numbers_from=1), paragraph(note, "note"))


def machine_section(run: Standing) -> str:
    """The machine, and the versions of what ran on it."""
    rows = [(key, _plain(value)) for key, value in _leaves(run.environment) if value is not None]
    return section("Machine", table(("", ""), rows))


def recipe_section(folder: RunFolder) -> str:
    """The recipe as the run keeps it."""
    try:
        given = folder.recipe.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return section("Recipe", folded("recipe.yaml", given))


def _of(recipe: str | None, run: Standing) -> str:
    cases = [number(run.started, key) for key in ("training_cases", "validation_cases")]
    parts = [f"recipe {recipe}"] if recipe else []
    if cases[0] is not None and cases[1] is not None:
        parts.append(f"{counted(int(cases[0]), 'training case')}, {counted(int(cases[1]), 'validation case')}")
    return ", ".join(parts)


def _taken(run: Standing, folds: Sequence[Standing]) -> tuple[float | None, float | None]:
    if run.hours is not None or not folds:
        return run.hours, run.cost
    hours = [fold.hours for fold in folds if fold.hours is not None]
    costs = [fold.cost for fold in folds if fold.cost is not None]
    return (sum(hours) if hours else None), (sum(costs) if costs else None)


def _leaves(document: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in document.items():
        name = f"{above}{key}".replace("_", " ") if not above.startswith("variables") else f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}: ")
        else:
            yield name, value


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
