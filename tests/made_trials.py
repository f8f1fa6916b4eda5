"""Trials for tests of studies: a GPU of 80 GiB that is made up, and answers at once."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fasttrain.engine.planning.sizes import Sizes
from fasttrain.recipe import Recipe
from fasttrain.studies.task import LOOK, STEPS, Outcome, Task

GIB = 1 << 30


class MadeTrials:
    """Answers for a GPU of 80 GiB: a patch holds `patch_gib`, and a batch b runs at rate(b); all that was asked is noted."""

    def __init__(
        self,
        rate: Callable[[int], float] = lambda size: 100 * size / (size + 2),
        patch_gib: float = 4.0,
        free_gib: float = 79.0,
        **change: Any,
    ) -> None:
        self.rate = rate
        self.patch_gib = patch_gib
        self.free_gib = free_gib
        self.change = change
        self.asked: list[tuple[str, Task]] = []

    def run(self, task: Task, name: str, limit_seconds: float) -> Outcome:
        recipe = Recipe.model_validate_json(task.recipe)
        self.asked.append((name, task))
        if name in self.change:
            return self.change[name]
        if task.kind == LOOK:
            return Outcome("done", {"machine": self.machine(), "sizes": asdict(sizes(recipe))})
        size = recipe.training.batch_size
        share = math.prod(recipe.patch.size) / 48**3
        held = size * self.patch_gib * share
        if recipe.acceleration.activation_checkpointing == "on":
            held *= 0.5
        if task.kind == STEPS and held < self.free_gib:
            return Outcome("done", self.steps(size, held, task.compiled))
        if task.kind != STEPS and held + 3 * recipe.validation.window.batch_size < self.free_gib:
            held += 3 * recipe.validation.window.batch_size
            seconds = 2.0 / recipe.validation.window.batch_size + (recipe.validation.stitching == "cpu")
            return Outcome(
                "done",
                {**self.steps(size, held, False), "case": "c", "validation_seconds": seconds, "summed_on": "cuda"},
            )
        return Outcome("memory", faults=("the GPU ran out of memory",), exit_code=5)

    def machine(self) -> dict[str, Any]:
        free = int(self.free_gib * GIB)
        return {"device": "cuda:0", "device_name": "H100", "cpus": 16, "gpu_bytes": 80 * GIB, "gpu_free_bytes": free}

    def steps(self, size: int, held: float, compiled: bool) -> dict[str, Any]:
        rate = self.rate(size) * (1.2 if compiled else 1.0)
        plan = {"activation_checkpointing": False, "cache": "gpu", "workers": 0, "resident_bytes": GIB}
        return {
            "rate": rate,
            "spread": 0.001,
            "repeats": [rate] * 5,
            "wait_share": 0.0,
            "steps_per_epoch": 10,
            "reserved_bytes": int(held * GIB),
            "free_bytes": int(self.free_gib * GIB),
            "would_compile": self.change.get("would_compile", False),
            "plan": {**plan, **self.change.get("plan", {})},
        }

    def close(self) -> None: ...


def sizes(recipe: Recipe) -> Sizes:
    return Sizes(
        100, 10, 0, 4, recipe.training.batch_size, 1, recipe.training.batch_size, 10, 5, 50, 2 * GIB, 0, 0, GIB
    )
