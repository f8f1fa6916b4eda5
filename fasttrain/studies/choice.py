"""Owns which of the measured batch sizes is taken, what that changes in training, and what holds the rate back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fasttrain.engine.planning.batch_policy import with_batch, with_ranks
from fasttrain.recipe import ResolvedRecipe
from fasttrain.studies.sweep import MARGIN, MEMORY, OK, TOLERANCE, Point, best_of, tolerance_of
from fasttrain.wording import size_in_memory

if TYPE_CHECKING:
    from fasttrain.engine.planning.sizes import Sizes

PREFERENCES = ("throughput", "memory", "largest")
_FOR_MEMORY = 0.1
"""Of the best rate that `memory` gives up at most."""
_WAITS = 0.1
_CLEARLY = 0.75
_NEAR = 0.2
"""Of a ceiling: below that of both, it is neither."""


def choose(points: Sequence[Point], prefer: str) -> Point | None:
    """The point to take; None where none may be.

    throughput: the smallest batch within the tolerance of the best rate. memory: the one that holds least, or where that is not
    known the smallest, of those within 10% of it. largest: the largest.
    """
    able = [point for point in points if point.ok]
    if not able:
        return None
    best = best_of(able).rate
    if prefer == "largest":
        return max(able, key=lambda point: point.batch_size)
    share = _FOR_MEMORY if prefer == "memory" else tolerance_of(able)
    near = [point for point in able if point.rate >= best * (1 - share)]
    if prefer == "memory":
        return min(near, key=lambda point: (point.values.get("reserved_bytes", 0), point.batch_size))
    return min(near, key=lambda point: point.batch_size)


def finalists(points: Sequence[Point], prefer: str) -> list[Point]:
    """The two that are worth compiling: the choice and the best of the others, the likelier first."""
    chosen = choose(points, prefer)
    if chosen is None:
        return []
    others = [point for point in points if point.ok and point is not chosen]
    return [chosen, *([best_of(others)] if others else [])]


@dataclass(frozen=True)
class Effect:
    """What training with another batch size is: the numbers before and after."""

    batch_size: tuple[int, int]
    accumulate: tuple[int, int]
    effective_batch: tuple[int, int]
    steps_per_epoch: tuple[int, int]
    patches: tuple[int, int]
    """Over the whole run."""
    learning_rate: tuple[float, float]
    policy: str


def effect_of(resolved: ResolvedRecipe, batch_size: int, sizes: Sizes, ranks: int = 1) -> Effect:
    """Of the change from the recipe's own batch size, of so many ranks before and after; `sizes` are those before it."""
    # With torch behind it, which the command line loads late
    from fasttrain.engine.planning.sizes import sizes_of

    before, after = (with_ranks(one, ranks).recipe for one in (resolved, with_batch(resolved, batch_size)))
    cases = (sizes.training_cases, sizes.validation_cases, sizes.test_cases)
    old, new = (sizes_of(recipe, cases, sizes.cache_bytes, ranks=ranks) for recipe in (before, after))
    return Effect(
        batch_size=(old.batch_size, new.batch_size),
        accumulate=(old.accumulate, new.accumulate),
        effective_batch=(old.effective_batch, new.effective_batch),
        steps_per_epoch=(old.steps_per_epoch, new.steps_per_epoch),
        patches=(old.total_steps * old.effective_batch, new.total_steps * new.effective_batch),
        learning_rate=(before.optimizer.learning_rate, after.optimizer.learning_rate),
        policy=before.training.batch_policy,
    )


def effect_text(effect: Effect) -> str:
    """One line."""
    if effect.batch_size[0] == effect.batch_size[1]:
        return "nothing of training changes: it is the recipe's own batch size"
    parts = [
        _changed("steps an epoch", *effect.steps_per_epoch),
        _changed("patches seen", *effect.patches),
        _changed("patches a step", *effect.effective_batch),
        _changed("learning rate", *(f"{rate:.3g}" for rate in effect.learning_rate)),
    ]
    if effect.accumulate[0] != effect.accumulate[1]:
        parts.append(_changed("passes a step", *effect.accumulate))
    return f"under training.batch_policy: {effect.policy}: {', '.join(parts)}"


def _changed(name: str, old: object, new: object) -> str:
    shown = [f"{value:,}" if isinstance(value, int) else str(value) for value in (old, new)]
    return f"{name} {shown[0]} → {shown[1]}" if shown[0] != shown[1] else f"{name} {shown[0]} as before"


def _rises(able: Sequence[Point], chosen: Point) -> bool:
    """Whether the rate still rises at the upper end of the sizes, where the chosen one lies too."""
    top = max(point.batch_size for point in able)
    clearly_smaller = [point.rate for point in able if point.batch_size <= _CLEARLY * top]
    rates = [point.rate for point in able if point.batch_size > _CLEARLY * top]
    return chosen.batch_size > _CLEARLY * top and max(rates) > max(clearly_smaller, default=0.0) * (1 + TOLERANCE)


def limit_of(
    points: Sequence[Point],
    chosen: Point,
    most: int,
    on_gpu: bool,
    gpu_bytes: int | None,
    ceilings: Mapping[str, float] | None = None,
    ranks: int = 1,
) -> tuple[str, str]:
    """(what holds the rate back, the figures by which that is judged): `data`, `memory`, `set`, `compute`, `bandwidth`,
    `kernels`, `device` where `ceilings` do not tell which of these three, or `unknown`. Of several ranks each has a device.
    """
    values = chosen.values
    waits = float(values.get("wait_share") or 0.0)
    if waits > _WAITS:
        return "data", f"a step waits {waits:.0%} of its time for patches; more workers or another cache would help"
    larger = [point for point in points if point.batch_size > chosen.batch_size]
    failed = [point for point in larger if point.status in (MEMORY, MARGIN)]
    able = [point for point in points if point.status == OK]
    rising = _rises(able, chosen)
    if failed and rising:
        size = min(point.batch_size for point in failed)
        held = values.get("reserved_bytes")
        of = f", {size_in_memory(held)} of {size_in_memory(gpu_bytes)} are held" if held and gpu_bytes else ""
        return "memory", f"the rate still rises at batch {chosen.batch_size}{of}, and batch {size} does not fit"
    smaller = [point for point in able if point.batch_size < chosen.batch_size]
    if rising and chosen.batch_size >= most and smaller:
        return (
            "set",
            f"the rate still rises at batch {chosen.batch_size}, and one pass over the cases has no more patches",
        )
    if len(able) == 1:
        return "unknown", f"no other batch size could be measured; a step waits {waits:.0%} of its time for patches"
    by, why = _ceiling(chosen.rate / ranks, ceilings, "GPU" if on_gpu else "CPU")
    if ranks > 1 and ceilings:
        why = f"of each of {ranks} ranks {why}"
    parts = [f"waiting for data {waits:.0%}"]
    if values.get("utilisation") is not None:
        parts.append(f"a kernel runs {values['utilisation']:.0%} of the time")
    if ups := [point for point in larger if point.ok]:
        other = min(ups, key=lambda point: point.batch_size)
        parts.append(f"batch {other.batch_size} gives {other.rate / chosen.rate - 1:+.1%}")
    return by, f"{why}; {', '.join(parts)}"


def _ceiling(rate: float, ceilings: Mapping[str, float] | None, device: str) -> tuple[str, str]:
    """Which of the device's two ceilings a rate is nearer to: by the network's counted work, so that fused layers, which move
    fewer bytes than were counted, may come out above what a copy reaches.
    """
    if not ceilings:
        return (
            "device",
            f"the {device}'s own speed, computing or memory bandwidth: the network's work could not be counted",
        )
    computing, moving = rate * ceilings["patch_flops"], rate * ceilings["patch_bytes"]
    of_peak, of_copy = computing / ceilings["peak_flops"], moving / ceilings["peak_bandwidth"]
    computes = of_ceiling(of_peak, ceilings.get("peak_flops_spread", 0.0), f"a matrix product reaches on this {device}")
    moves = of_ceiling(of_copy, ceilings.get("peak_bandwidth_spread", 0.0), "a copy reaches")
    told = f"its layers compute {readable(computing)}FLOP/s, {computes}, and move about {readable(moving)}B/s, {moves}"
    if max(of_peak, of_copy) < _NEAR:
        return "kernels", told
    return ("compute" if of_peak >= of_copy else "bandwidth"), told


def of_ceiling(share: float, spread: float, ceiling: str) -> str:
    """`43% of what CEILING`. Beyond all of it the ceiling is not measured well enough to say how much, and its spread is told."""
    if share <= 1.0:
        return f"{share:.0%} of what {ceiling}"
    return f"no less than what {ceiling}, whose own rate scatters by ±{spread:.0%}"


def readable(count: float) -> str:
    """`1.2 T`, `34 G` or `5 M`, to be followed by a unit."""
    power, letter = next(((power, letter) for power, letter in ((12, "T"), (9, "G")) if count >= 10**power), (6, "M"))
    return f"{count / 10**power:.3g} {letter}"
