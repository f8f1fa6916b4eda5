"""Owns the trials of a study: what each is given, and what its figures mean on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.engine.planning.batch_policy import possible_batch, with_ranks
from fasttrain.errors import (
    EXIT_DATA,
    EXIT_DIVERGED,
    EXIT_MACHINE,
    EXIT_OUT_OF_MEMORY,
    EXIT_STORAGE,
    EXIT_USAGE,
    DataError,
    DivergedError,
    FasttrainError,
    MachineError,
    OutOfMemoryError,
    RecipeError,
    StorageError,
)
from fasttrain.recipe import Recipe, ResolvedRecipe
from fasttrain.studies.options import Options
from fasttrain.studies.sweep import HUNG, MARGIN, MEMORY, OK, Point
from fasttrain.studies.task import LOOK, STEPS, VALIDATION, Outcome, Task
from fasttrain.studies.trials import Trials
from fasttrain.telemetry.events import Event
from fasttrain.wording import counted, sizes_apart

if TYPE_CHECKING:
    from fasttrain.engine.planning.sizes import Sizes

_ERRORS: dict[int, type[FasttrainError]] = {
    EXIT_USAGE: RecipeError,
    EXIT_DATA: DataError,
    EXIT_MACHINE: MachineError,
    EXIT_OUT_OF_MEMORY: OutOfMemoryError,
    EXIT_STORAGE: StorageError,
    EXIT_DIVERGED: DivergedError,
}
_BUDGET_SECONDS = 60.0
"""Of a sweep where none was asked for, from when the cases were looked at."""
_LOOK_SECONDS = 24 * 3600.0
"""Reading and checking a large set the first time takes what it takes; it can be stopped and is remembered."""
_COMPILING_SECONDS = 240.0


@dataclass(frozen=True)
class Validation:
    """The validation of the largest case as it was measured, and the settings it was measured with."""

    window_batch: int
    seconds: float | None
    summed_on: str | None
    case: str | None
    reserved_bytes: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Validated:
    """A validation, and whether it left the margin of memory free."""

    validation: Validation
    margin_kept: bool


class Measuring:
    """Runs trials on data and device, once `look` has told what they are."""

    def __init__(
        self,
        data: Path | None,
        device: str,
        trials: Trials,
        options: Options,
        emit: Callable[[Event], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.data = None if data is None else str(data.absolute())
        self.device = device
        self.trials = trials
        self.options = options
        self.emit = emit
        self.clock = clock
        self.began = clock()
        self.machine: dict[str, Any] = {}
        self.sizes: Sizes | None = None
        self._in_slices = False
        self.ceilings: dict[str, float] | None = None
        """See `ceilings_of`; None until a trial of steps has found out."""
        self._former: tuple[dict[str, Any], str] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the trials use one."""
        return self.machine.get("gpu_bytes") is not None

    @property
    def most(self) -> int:
        """Patches of one pass over the training cases, of several ranks each one's share: a larger batch would hold some of them
        twice. Cases that are cut into slices give another one each time, so that an epoch is what they have at least.
        """
        assert self.sizes is not None
        one_pass = self.sizes.training_cases * self.sizes.samples_per_case
        if self._in_slices:
            one_pass = max(one_pass, self.sizes.steps_per_epoch * self.sizes.effective_batch)
        return max(one_pass // self.ranks, 1)

    @property
    def ranks(self) -> int:
        """Processes that take the steps of a trial together."""
        return self.options.ranks

    def shared(self, resolved: ResolvedRecipe) -> ResolvedRecipe:
        """The recipe as each of the ranks trains it. Raises RecipeError where they cannot share its step."""
        return with_ranks(resolved, self.ranks)

    def possible(self, recipe: Recipe, size: int) -> bool:
        """Whether `training.batch_policy` leaves each rank so many patches in a pass."""
        return possible_batch(recipe, size, self.ranks)

    def look(self, resolved: ResolvedRecipe) -> None:
        """Finds and checks the cases, which is remembered, and surveys the machine."""
        outcome = self.trials.run(self._task(LOOK, resolved), "look", _LOOK_SECONDS)
        if not outcome.done:
            raise error_of(outcome, "looking at data and machine")
        # With torch behind it, which is loaded beside the first trial's work
        from fasttrain.engine.planning.sizes import Sizes

        self.machine = outcome.values["machine"]
        self.sizes = Sizes(**outcome.values["sizes"])
        self._in_slices = resolved.recipe.data.slices is not None
        self.began = self.clock()

    def steps(self, resolved: ResolvedRecipe, name: str, compiled: bool = False) -> Outcome:
        """A trial of training steps."""
        limit = self.options.trial_seconds + (_COMPILING_SECONDS if compiled else 0.0)
        outcome = self.trials.run(self._task(STEPS, resolved, compiled), name, limit)
        if outcome.done and not self.on_gpu and self._former is None:
            # A CPU's precision and layout are measured once; a GPU's step is measured each time, as a run would
            self._former = outcome.values["plan"], outcome.values["device_name"]
        if outcome.done and self.ceilings is None:
            self.ceilings = outcome.values.get("ceilings", {})
        return outcome

    def validated(self, resolved: ResolvedRecipe, compiled: bool = False) -> tuple[Outcome, Validated]:
        """A trial of a validation."""
        window = resolved.recipe.validation.window.batch_size
        limit = self.options.trial_seconds * 2 + (_COMPILING_SECONDS if compiled else 0.0)
        name = f"validation-{window}-{resolved.recipe.validation.stitching}"
        outcome = self.trials.run(self._task(VALIDATION, resolved, compiled), name, limit)
        values = outcome.values
        found = Validation(
            window,
            values.get("validation_seconds"),
            values.get("summed_on"),
            values.get("case"),
            values.get("reserved_bytes"),
            tuple(values.get("warnings", ())),
        )
        return outcome, Validated(found, self.headroom(values) >= 0)

    @property
    def budget_seconds(self) -> float:
        """Of all trials."""
        return self.options.budget_seconds or _BUDGET_SECONDS

    def budget_left(self, share: float = 1.0) -> float:
        """Seconds of a share of the budget, which counts from when the cases were looked at."""
        return share * self.budget_seconds - (self.clock() - self.began)

    def point(self, resolved: ResolvedRecipe, outcome: Outcome, compiled: bool = False) -> Point:
        """The point of a trial of `resolved`. Raises the trial's error where it failed for another reason than memory or time."""
        training = resolved.recipe.training
        size = training.batch_size
        if outcome.status == "memory":
            of = "" if outcome.rank is None else f" (rank {outcome.rank})"
            known = {"faults": list(outcome.faults), "rank": outcome.rank}
            return Point(size, MEMORY, f"out of memory{of}", compiled=compiled, values=known)
        if outcome.status == "hung":
            return Point(size, HUNG, outcome.faults[0], compiled=compiled)
        if not outcome.done:
            raise error_of(outcome, f"the trial of batch {size}")
        values = {key: value for key, value in outcome.values.items() if key not in ("plan", "reasons", "ceilings")}
        steps, plan = values["steps_per_epoch"], outcome.values["plan"]
        shared = self.shared(resolved).recipe.training
        values["epoch_seconds"] = steps * shared.batch_size * shared.accumulate * self.ranks / values["rate"]
        values["cache"], values["workers"] = plan["cache"], plan["workers"]
        values["resident_bytes"], values["cards"] = plan["resident_bytes"], plan.get("cards", 1)
        values["trial_seconds"] = outcome.seconds
        headroom = self.headroom(values)
        notes = list(values.get("warnings", ()))
        if plan["activation_checkpointing"] and resolved.recipe.acceleration.activation_checkpointing == "auto":
            notes.append("activations are computed again, to fit")
        if values.get("retries"):
            notes.append(counted(values["retries"], "allocator retry", "allocator retries"))
        status = OK if headroom >= 0 else MARGIN
        if status == MARGIN:
            margin = self.options.margin * self.machine["gpu_bytes"]
            least, left = sizes_apart(margin, max(headroom + margin, 0))
            notes.insert(0, f"leaves {left}, less than the margin of {least}")
        reason = "; ".join(notes) or "ok"
        return Point(size, status, reason, values["rate"], values["spread"], compiled, values)

    def headroom(self, values: Mapping[str, Any]) -> float:
        """Bytes that were free beside the margin when a trial held most; what others hold of the card was not free.

        Volumes that fill the memory left to them are no need: a run plans with a margin of its own, and fewer would do.
        """
        held, total = values.get("reserved_bytes"), self.machine.get("gpu_bytes")
        if not held or not total:
            return 0.0
        assert self.sizes is not None
        plan = values.get("plan") or values
        # Several GPUs may hold the volumes in parts
        resident = (plan.get("resident_bytes") or 0) * (plan.get("cards") or 1)
        if 0 < resident < self.sizes.training_bytes:
            return 0.0
        return float(values["free_bytes"] - held - self.options.margin * total)

    def _task(self, kind: str, resolved: ResolvedRecipe, compiled: bool = False) -> Task:
        former, device = self._former or (None, None)
        text, first = self.shared(resolved).recipe.model_dump_json(), kind == STEPS and self.ceilings is None
        return Task(kind, text, self.data, self.device, former, device, compiled, first, ranks=self.ranks)


def error_of(outcome: Outcome, what: str) -> FasttrainError:
    """The trial's own error, with where its log lies where that may say more."""
    kind = _ERRORS.get(outcome.exit_code, FasttrainError)
    if outcome.status == "hung":
        return MachineError(f"{what} did not come to its end: {outcome.faults[0]}; raise --trial-time")
    if kind in (RecipeError, DataError) and len(outcome.faults) > 0:
        return kind(outcome.faults)
    return kind(
        [f"{what} failed: {fault}; its log is {outcome.log}" for fault in outcome.faults or ("no reason given",)]
    )
