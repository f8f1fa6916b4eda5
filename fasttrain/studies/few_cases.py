"""Owns the part of a set that a measurement reads: a step is no faster with more cases, and reading all takes long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fasttrain.data.caches import estimate_bytes
from fasttrain.data.splits import Split
from fasttrain.engine.planning.plan import Plan
from fasttrain.recipe import Recipe
from fasttrain.samples import Case

MOST_CASES = 16


def few_cases(
    recipe: Recipe, split: Split, cache: str, validated: tuple[Case, ...] = (), most: int = MOST_CASES
) -> Split:
    """At most so many of the training cases, and of the validation cases those that are named."""
    train = split.train
    # How `smart` moves on depends on how many there are
    if cache != "smart" and len(train) > most:
        # By way of names evenly, so that parts of a set that differ are all there
        train = tuple(train[index] for index in np.linspace(0, len(train) - 1, most).astype(int))
    return Split(train, validated)


def largest_case(cases: tuple[Case, ...], recipe: Recipe) -> tuple[Case, ...]:
    """The one that takes most memory; none where there are none."""
    return (max(cases, key=lambda case: estimate_bytes([case], recipe)),) if cases else ()


def plan_for_few(plan: Plan, split: Split, recipe: Recipe) -> Plan:
    """The plan for a part of the cases: of the volumes the same share lies on the GPU."""
    whole, part = max(plan.sizes.training_bytes, 1), estimate_bytes(split.train, recipe)
    # Where all of the set lies there, all of the part does
    resident = part if plan.resident_bytes >= whole else int(plan.resident_bytes * min(part / whole, 1.0))
    return replace(plan, resident_bytes=resident)
