"""Owns the decision whether fasttrain's kernels take the sums of a loss, with the reason for it."""

from __future__ import annotations

from fasttrain.kernels.class_sums import MOST_CLASSES
from fasttrain.losses import by_kernels
from fasttrain.recipe import Recipe


def choose_loss_kernels(recipe: Recipe, fused_layers: bool) -> tuple[bool, str]:
    """Whether a loss takes its sums in one pass over logits and labels. Where not, torch's own operations take the same sums."""
    if not fused_layers:
        return False, "fused_layers are off, whose layout they need"
    if not by_kernels(recipe.loss, bool(recipe.data.regions)):
        return False, f"loss.kind: {recipe.loss.kind} has none; torch's operations compute it"
    if recipe.output_channels > MOST_CLASSES:
        return False, f"they take up to {MOST_CLASSES} classes, and there are {recipe.output_channels}"
    return True, "all sums of the loss in one pass over logits and labels"
