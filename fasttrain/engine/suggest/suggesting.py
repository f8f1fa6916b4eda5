"""Owns the way from a folder of images and labels to a recipe that trains on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.data.checking.stray import stray_values
from fasttrain.data.fingerprint import Fingerprint, read_fingerprint
from fasttrain.engine.suggest.commented_yaml import size_text
from fasttrain.engine.suggest.planner import SuggestedPlan, plan_for
from fasttrain.engine.suggest.recipe_text import recipe_text
from fasttrain.machine.hardware import survey
from fasttrain.machine.limits import cpu_limit
from fasttrain.recipe.recipe import Recipe, faults_across
from fasttrain.recipe.yaml_text import parse
from fasttrain.wording import counted


@dataclass(frozen=True, eq=False)
class Suggestion:
    """`text` is the commented YAML of `recipe`; `found` and `plan` are what it was made from."""

    text: str
    recipe: Recipe
    found: Fingerprint
    plan: SuggestedPlan

    def record(self) -> dict[str, Any]:
        """The findings and the numbers, for a JSON document."""
        found, plan = self.found, self.plan
        return {
            "layout": found.layout.source.model_dump(mode="json"),
            "cases": len(found.cases),
            "channels": list(found.layout.channels),
            "classes": {str(value): name for value, name in found.classes.items()},
            "ignore_label": found.layout.ignore_label,
            "voxels_by_value": {str(value): count for value, count in found.voxels_by_value.items()},
            "foreground_share": found.foreground_share,
            "median_shape": np.median(found.shapes, axis=0).tolist(),
            "median_spacing_mm": np.median(found.spacings, axis=0).tolist(),
            "orientations": found.orientations,
            "ct": found.is_ct,
            "non_finite_cases": list(found.non_finite),
            "gpu_gib": plan.gpu_gib,
            "spacing_mm": list(plan.spacing),
            "patch": list(plan.network.patch),
            "strides": [list(stride) for stride in plan.network.strides],
            "features": list(plan.features),
            "batch_size": plan.batch_size,
            "step_gib": plan.step_gib,
        }

    def rows(self) -> list[tuple[str, str]]:
        """The same in a few words."""
        found, plan = self.found, self.plan
        kind = "CT" if found.is_ct else "not CT"
        sizes = f"{counted(len(found.cases), 'case')}, {counted(len(found.layout.channels), 'channel')}"
        return [
            (
                "layout",
                f"{found.layout.source.kind}, {sizes}, {kind}",
            ),
            ("classes", f"{len(found.classes)}, {found.foreground_share:.2%} of the voxels"),
            (
                "spacing",
                f"{size_text(plan.spacing)} mm, a median volume then has {size_text(plan.median_shape)} voxels",
            ),
            (
                "patch",
                f"{size_text(plan.network.patch)}, batch {plan.batch_size}, about {plan.step_gib:.2g} GiB a step",
            ),
            ("network", f"{plan.network.stages} stages, {plan.features[0]} to {plan.features[-1]} features"),
        ]

    def warnings(self) -> list[str]:
        """What a user should look at before training."""
        found = self.found
        texts = list(found.layout.warnings)
        if len(found.cases) == 1:
            texts.append("there is one case, which trains and validates; its score says nothing about other cases")
        if found.non_finite:
            texts.append(
                f"{counted(len(found.non_finite), 'case')} with NaN or infinite voxels (such as "
                f"{found.non_finite[0]}); the recipe fills them (data.nan_policy: replace)"
            )
        if found.layout.named_channels and found.looks_like_hounsfield and not found.is_ct:
            texts.append(
                f"the values look like Hounsfield units, but the channels are named {', '.join(found.layout.channels)}; if it is "
                "CT, set data.intensity to a window"
            )
        missing = [name for value, name in found.classes.items() if value not in found.voxels_by_value]
        if missing:
            texts.append(f"no label holds the class {', '.join(missing)}, which the data set names")
        texts += map(str, stray_values({case.name: case.counts for case in found.cases}, found.layout.names))
        return texts


def suggest(
    data: Path,
    name: str,
    target: Path,
    gpu_gib: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Suggestion:
    """Reads every case under `data` and plans a recipe for a GPU of `gpu_gib` (None: that of this machine; 0: a CPU).

    Nothing is written; `target` is the file that the recipe's first comment names.
    Raises DataError for an unknown layout and with the faults of all cases.
    """
    if gpu_gib is None:
        gpu_gib = survey("auto").gpu_gib
    found = read_fingerprint(data, cpu_limit(), progress)
    plan = plan_for(found.shapes, found.spacings, len(found.layout.channels), len(found.classes), gpu_gib)
    text = recipe_text(name, data, target, found, plan)
    recipe = Recipe.model_validate(parse(text, "the suggested recipe"))
    faults = list(faults_across(recipe))
    if faults:
        raise AssertionError(f"the suggested recipe is not sound: {faults}")
    return Suggestion(text, recipe, found, plan)
