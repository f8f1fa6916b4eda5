"""Owns what a profile says of other cards: a measured step in the parts that scale with them, or its counted work alone."""

from __future__ import annotations

from collections.abc import Mapping

from fasttrain.engine.preparing import Prepared
from fasttrain.studies.profiling.cards import Parted, Projection, card_named, project, project_counted
from fasttrain.studies.profiling.kernels import Breakdown
from fasttrain.studies.profiling.verdict import Evidence


def projected(
    prepared: Prepared,
    found: Evidence,
    kinds: Breakdown,
    ceilings: Mapping[str, float],
    prices: Mapping[str, float],
) -> tuple[list[Projection], bool]:
    """(other cards, whether only what they take at best is known)."""
    plan, here = prepared.plan, card_named(prepared.hardware.device_name)
    epoch = (plan.sizes.steps_per_epoch, found.validating, plan.sizes.epochs)
    if here is None:
        if not ceilings:
            return [], True
        patches = plan.sizes.effective_batch
        return project_counted(
            patches * ceilings["patch_flops"], patches * ceilings["patch_bytes"], epoch, prices
        ), True
    computing = found.same * kinds.kinds.get("conv", 0.0) / kinds.whole
    staying = found.same * kinds.idle_share
    extra = max(found.real - found.same, 0.0)
    parted = Parted(
        computing, found.same - computing - staying, staying + extra, found.loader if found.overlaps else 0.0
    )
    return project(parted, here, plan.amp, plan.tf32, epoch, prices), False
