"""Owns how the figures of a study are shown: a table of every trial, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fasttrain.cli.figures import share_text
from fasttrain.cli.printing import print_table
from fasttrain.wording import size_in_memory

if TYPE_CHECKING:
    from fasttrain.studies.batch_study import BatchStudy
    from fasttrain.studies.settings_study import SettingsStudy
    from fasttrain.studies.sweep import Point


def print_batches(study: BatchStudy) -> None:
    """The table of batch sizes, the winner marked, and what is told of it."""
    points = study.points
    if not points:
        return
    own = study.resolved.recipe.training.batch_size
    on_gpu = study.measuring.on_gpu
    ranks = study.measuring.ranks
    size, rate, memory = ("batch", "patches/s", "memory")
    if ranks > 1:
        size, rate, memory = ("batch a rank", f"patches/s of {ranks} ranks", "memory of the fullest")
    rows = [[size, rate, "±", "waiting", *(["GPU busy", memory] if on_gpu else []), "epoch", "how it ended"]]
    ordered = sorted(points, key=lambda point: (point.compiled, point.batch_size))
    word = "taken" if study.alone() else "chosen"
    rows += [_row(point, own, word if point is study.chosen else "", on_gpu) for point in ordered]
    print_table(rows)
    if study.sweep is not None and study.sweep.ended:
        print(f"sweep ended: {study.sweep.ended}")
    _print_chosen(study)


def _row(point: Point, own: int, chosen: str, on_gpu: bool) -> list[str]:
    values = point.values
    marks = [text for text, holds in ((chosen, bool(chosen)), ("the recipe's own", point.batch_size == own)) if holds]
    ended = f"{point.reason} ← {', '.join(marks)}" if marks else point.reason
    name = f"{point.batch_size} compiled" if point.compiled else str(point.batch_size)
    if not point.rate:
        return [name, *["–"] * (6 if on_gpu else 4), ended]
    gpu = [_share(values.get("utilisation")), _size(values.get("reserved_bytes"))] if on_gpu else []
    spread, waits = f"{point.spread:.1%}", _share(values.get("wait_share"))
    return [name, f"{point.rate:.1f}", spread, waits, *gpu, f"{values['epoch_seconds']:.1f} s", ended]


def _share(value: float | None) -> str:
    return "–" if value is None else share_text(value)


def _size(count: int | None) -> str:
    return "–" if count is None else size_in_memory(count)


def _print_chosen(study: BatchStudy) -> None:
    from fasttrain.studies.choice import effect_text
    from fasttrain.studies.sweep import TOLERANCE, tolerance_of

    chosen, effect, limit, gain = study.chosen, study.effect(), study.limit(), study.gain()
    if chosen is None or effect is None or limit is None:
        return
    over = f", {gain:+.1%} over the recipe's own" if gain is not None and gain else ""
    alone = study.alone()
    print(f"{'taken' if alone else 'chosen'}: batch {chosen.batch_size}, {chosen.rate:.1f} patches/s{over}")
    if alone is not None:
        print(alone)
    near = tolerance_of(study.points)
    if near > TOLERANCE and study.options.prefer == "throughput":
        print(f"rates scatter here, so that those within {near:.0%} of the best count as equal")
    print(effect_text(effect))
    if (of_ranks := study.told_of_ranks()) is not None:
        print(of_ranks)
    print(f"limited by {_LIMITS[limit[0]]}: {limit[1]}")
    checked = study.validation
    if checked is not None and checked.seconds is not None:
        where = f", {size_in_memory(checked.reserved_bytes)} held" if checked.reserved_bytes else ""
        summed = f", summed on the {checked.summed_on.upper()}" if checked.summed_on and study.measuring.on_gpu else ""
        print(
            f"validation of the largest case, {checked.case}: {checked.seconds:.2f} s with {checked.window_batch} windows at a "
            f"time{summed}{where}"
        )
        for note in checked.notes:
            print(f"  {note}")


_LIMITS = {
    "data": "data",
    "memory": "memory",
    "set": "the size of the data set",
    "compute": "computing",
    "bandwidth": "memory bandwidth",
    "kernels": "kernels that are small or slow for these shapes",
    "device": "the device",
    "unknown": "what is not known",
}


def print_settings(study: SettingsStudy) -> None:
    """What else was tried."""
    if study.tried:
        rows = [["setting", "value", "training", "validation", "how it ended"]]
        for one in study.tried:
            rate = f"{one.rate:.1f} patches/s" if one.rate else "–"
            seconds = f"{one.seconds:.2f} s" if one.seconds else "–"
            rows.append([one.setting, str(one.value), rate, seconds, f"{one.reason}{' ← taken' if one.taken else ''}"])
        print_table(rows)
    for note in study.notes:
        print(note)


def print_settings_found(settings: dict[str, Any], places: Sequence[str], ranks: int = 1) -> None:
    """The settings, and where they were written."""
    told = ", ".join(f"{key}={value}" for key, value in settings.items())
    print(f"settings: {told or 'the recipe as it is'}")
    several = f" --gpus {ranks}" if ranks > 1 else ""
    print(f"written to {' and '.join(places)}; `fasttrain train --tuned{several}` uses them")
