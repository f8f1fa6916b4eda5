"""Owns `tune-batch`: the sweep over batch sizes by trials on the machine at hand, and what is chosen, told and kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fasttrain.engine.planning.batch_policy import told_of_ranks, with_batch
from fasttrain.errors import MachineError, OutOfMemoryError, RecipeError
from fasttrain.recipe import ResolvedRecipe
from fasttrain.studies.choice import Effect, choose, effect_of, finalists, limit_of
from fasttrain.studies.lock import BATCH, applied
from fasttrain.studies.measuring import Measuring, Validation, error_of
from fasttrain.studies.sweep import HUNG, MARGIN, TIME_IS_OVER, Bounds, Point, Sweep, record_of
from fasttrain.studies.too_large import nothing_fits
from fasttrain.telemetry.events import Message

_OVER = 0.5
"""Of the budget."""


class BatchStudy:
    """Runs trials of a recipe with other batch sizes; they may take `sweep_share` of the budget. `found` is called after each.

    What was found so far can be read at any time: `points` (with compiled finalists behind the sweep's), `chosen`, `validation`.
    """

    def __init__(
        self,
        resolved: ResolvedRecipe,
        measuring: Measuring,
        sweep_share: float = 1.0,
        found: Callable[[], None] = lambda: None,
    ) -> None:
        self.resolved = resolved
        self.measuring = measuring
        self.options = measuring.options
        self.emit = measuring.emit
        self.sweep_share = sweep_share
        self.found = found
        self.sweep: Sweep | None = None
        self.compiled: list[Point] = []
        self.chosen: Point | None = None
        self.validation: Validation | None = None
        self.settings: dict[str, Any] = {}
        self._last_seconds = 0.0

    @property
    def points(self) -> list[Point]:
        """As they were measured."""
        return [*(self.sweep.points if self.sweep is not None else ()), *self.compiled]

    def run(self) -> None:
        """Looks, sweeps, compiles finalists, chooses and validates.

        Raises OutOfMemoryError where nothing fits, the error of a trial that failed for another reason, and Stopped.
        """
        if not self.measuring.machine:
            self.measuring.look(self.resolved)
        self.sweep_batches()
        self.compile_finalists()
        self.choose()
        self.validate()

    def sweep_batches(self) -> None:
        """Measures batch sizes until there is nothing left to find."""
        recipe, options = self.resolved.recipe, self.options
        if options.sizes is not None:
            impossible = [size for size in options.sizes if not self.measuring.possible(recipe, size)]
            if impossible:
                with_batch(self.resolved, impossible[0])  # raises the sentence
                raise RecipeError(
                    f"--batch-sizes {impossible[0]}: training.batch_policy: keep_effective keeps "
                    f"{recipe.training.batch_size * recipe.training.accumulate} patches a step, and a rank's share of "
                    f"{self.measuring.ranks} is no multiple of {impossible[0]}"
                )
        bounds = Bounds(
            start=recipe.training.batch_size,
            most=self.measuring.most,
            trials=options.trials,
            sizes=options.sizes,
            allowed=lambda size: self.measuring.possible(recipe, size),
            largest=options.prefer == "largest",
            ranks=self.measuring.ranks,
        )
        self.sweep = Sweep(bounds, self._measured, self.found)
        self.sweep.run()
        if not self.sweep.points:
            raise RecipeError(
                f"--batch-sizes {','.join(map(str, options.sizes or ()))}: {bounds.pass_text}, and a larger batch holds some "
                "twice; name smaller sizes"
            )
        if not any(point.ok for point in self.sweep.points):
            self._refuse(self.sweep.points)
        self.emit(Message(f"sweep over: {self.sweep.ended or 'nothing between the measured sizes is left to try'}"))

    def compile_finalists(self) -> None:
        """Measures the two best sizes compiled where the plan of a run would compile."""
        best = finalists(self.points, self.options.prefer)
        for point in best if best and best[0].values.get("would_compile") else ():
            self._compiled(point.batch_size)
        if self.compiled and not any(point.ok for point in self.compiled):
            self._compile_smaller()

    def _compiled(self, size: int) -> None:
        self.compiled.append(self._trial(size, compiled=True))
        self.found()

    def _compile_smaller(self) -> None:
        """The run will compile, so that a size which fits uncompiled alone is none. Raises the last one's error."""
        tried = min(point.batch_size for point in self.compiled)
        smaller = [point for point in self.points if point.ok and point.batch_size < tried]
        for point in sorted(smaller, key=lambda point: -point.rate):
            self._compiled(point.batch_size)
            if self.compiled[-1].ok:
                return
        last = self.compiled[-1]
        kind = MachineError if last.status == HUNG else OutOfMemoryError
        raise kind(
            f"batch {last.batch_size} compiled: {last.reason}; set acceleration.compile=off, or lower patch.size"
        )

    def choose(self) -> None:
        """Among compiled sizes where there are any, else among all."""
        able = [point for point in self.compiled if point.ok]
        self.chosen = choose(able or self.points, self.options.prefer)
        assert self.chosen is not None
        if self.chosen.batch_size != self.resolved.recipe.training.batch_size:
            self.settings[BATCH] = self.chosen.batch_size

    def validate(self) -> None:
        """Validates the largest case at the chosen size; where memory ends, with fewer windows at a time, and sums on the CPU.

        Raises OutOfMemoryError where that does not help either.
        """
        assert self.chosen is not None
        recipe = self.recipe_with(self.settings)
        window = recipe.recipe.validation.window.batch_size
        while True:
            outcome, point = self.measuring.validated(recipe, self.chosen.compiled)
            if outcome.done and (point.margin_kept or (window == 1 and recipe.recipe.validation.stitching == "cpu")):
                break
            if not outcome.done and outcome.status != "memory":
                raise error_of(outcome, "validating the largest case")
            if window > 1:
                window //= 2
                self.settings["validation.window.batch_size"] = window
            elif recipe.recipe.validation.stitching != "cpu":
                self.settings["validation.stitching"] = "cpu"
            else:
                raise error_of(outcome, "validating the largest case")
            short = ", ".join(f"{key}={value}" for key, value in self.settings.items() if key.startswith("validation"))
            self.emit(Message(f"the GPU has too little memory to validate the largest case; trying {short}", "warning"))
            recipe = self.recipe_with(self.settings)
        self.validation = point.validation
        if self.validation.seconds is not None:
            self.emit(Message(f"validating the largest case, {self.validation.case}: {self.validation.seconds:.2f} s"))

    def recipe_with(self, settings: Mapping[str, Any]) -> ResolvedRecipe:
        """The recipe with settings {dotted key: value}."""
        return applied(self.resolved, settings)

    def effect(self) -> Effect | None:
        """What the chosen size changes."""
        if self.chosen is None or self.measuring.sizes is None:
            return None
        return effect_of(self.resolved, self.chosen.batch_size, self.measuring.sizes, self.measuring.ranks)

    def told_of_ranks(self) -> str | None:
        """What so many ranks make of a step of the chosen size; None where there is one."""
        if self.chosen is None or self.measuring.ranks == 1:
            return None
        alone = self.recipe_with({BATCH: self.chosen.batch_size})
        return told_of_ranks(alone, self.measuring.shared(alone), self.measuring.ranks)

    def limit(self) -> tuple[str, str] | None:
        """See `limit_of`."""
        if self.chosen is None:
            return None
        same = [point for point in self.points if point.compiled == self.chosen.compiled]
        points = same if len(same) > 1 else self.points
        return limit_of(
            points,
            self.chosen,
            self.measuring.most,
            self.measuring.on_gpu,
            self.measuring.machine.get("gpu_bytes"),
            self.measuring.ceilings,
            self.measuring.ranks,
        )

    def gain(self) -> float | None:
        """The chosen rate over that of the recipe's own size, less one; None where that one was not measured."""
        if self.chosen is None:
            return None
        own = [one for one in self.points if one.batch_size == self.resolved.recipe.training.batch_size and one.rate]
        alike = [one for one in own if one.compiled == self.chosen.compiled] or own
        return self.chosen.rate / alike[0].rate - 1 if alike else None

    def alone(self) -> str | None:
        """The sentence where time was over before there was a second rate to compare the chosen one with."""
        if self.chosen is None or self.sweep is None or self.sweep.ended != TIME_IS_OVER:
            return None
        if sum(point.ok for point in self.sweep.points) > 1:
            return None
        return (
            f"batch {self.chosen.batch_size} was not chosen among others: time was over before a second size was measured; "
            "a larger --budget measures more"
        )

    def needed_bytes(self) -> int | None:
        """Of the GPU's memory, the most that a step or a validation held."""
        held = [self.chosen.values.get("reserved_bytes") if self.chosen is not None else None]
        held.append(self.validation.reserved_bytes if self.validation is not None else None)
        return max((count for count in held if count), default=None)

    def document(self) -> dict[str, Any]:
        """All that was found so far, for JSON."""
        limit, effect = self.limit(), self.effect()
        return {
            "ranks": self.measuring.ranks,
            "with_ranks": self.told_of_ranks(),
            "prefer": self.options.prefer,
            "margin": self.options.margin,
            "sweep_ended": self.sweep.ended if self.sweep is not None else None,
            "trials": [record_of(point) for point in self.points],
            "chosen": None if self.chosen is None else record_of(self.chosen),
            "compared": None if self.chosen is None else self.alone() is None,
            "gain": self.gain(),
            "effect": None if effect is None else asdict(effect),
            "limit": None if limit is None else {"by": limit[0], "why": limit[1]},
            "validation": None if self.validation is None else asdict(self.validation),
            "needed_bytes": self.needed_bytes(),
        }

    def _measured(self, size: int) -> Point | None:
        if self.points:
            left, expected = self.measuring.budget_left(self.sweep_share), self._expected(size)
            # One size alone says nothing: a second one may take longer than was given
            if len(self.points) == 1:
                left += _OVER * self.measuring.budget_seconds
            if left < expected:
                return None
        return self._trial(size)

    def _expected(self, size: int) -> float:
        """Seconds of a trial, by the last one: on a CPU a step takes longer the larger its batch."""
        last = self.points[-1].batch_size
        return self._last_seconds * (max(size / last, 1.0) if not self.measuring.on_gpu else 1.0)

    def _trial(self, size: int, compiled: bool = False) -> Point:
        resolved = with_batch(self.resolved, size)
        began = self.measuring.clock()
        outcome = self.measuring.steps(resolved, f"batch-{size}{'-compiled' if compiled else ''}", compiled)
        self._last_seconds = self.measuring.clock() - began
        if not self.measuring.on_gpu:
            # Later ones go by the plan that is known then
            self._last_seconds -= float(outcome.values.get("planning_seconds", 0.0))
        point = self.measuring.point(resolved, outcome, compiled)
        rate = f"{point.rate:.1f} patches/s, " if point.rate else ""
        self.emit(
            Message(f"batch {size}{' compiled' if compiled else ''}: {rate}{point.reason} ({outcome.seconds:.1f} s)")
        )
        return point

    def _refuse(self, points: list[Point]) -> None:
        """Raises where no size may be taken."""
        if any(point.status == MARGIN for point in points):
            least = min((point for point in points if point.status == MARGIN), key=lambda point: point.batch_size)
            raise OutOfMemoryError(
                f"no batch size leaves the margin of {self.options.margin:.0%} of the GPU's memory: batch {least.batch_size} "
                f"{least.reason}; lower --margin, end what else uses the GPU, or lower patch.size"
            )
        if any(point.status == HUNG for point in points):
            raise MachineError(
                f"no trial came to its end within {self.options.trial_seconds:g} s; raise --trial-time, or lower "
                "patch.size or the size of the network"
            )
        smallest = min(point.batch_size for point in points) if points else 1
        if smallest > 1:
            raise OutOfMemoryError(
                f"batch {smallest} does not fit, and no smaller one was tried; {_try_smaller(points)}"
            )
        attempt = lambda one: self.measuring.steps(one, "smaller")  # noqa: E731
        raise nothing_fits(
            with_batch(self.resolved, 1),
            attempt,
            self.measuring.machine["device_name"],
            self.measuring.machine["gpu_free_bytes"],
            next((fault for point in points for fault in point.values.get("faults", ()) if point.batch_size == 1), ""),
        )


def _try_smaller(points: list[Point]) -> str:
    return "name smaller ones with --batch-sizes, or raise --trials" if points else "raise --budget"
