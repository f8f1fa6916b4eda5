"""Owns which accelerations cannot be had together, or with what else a recipe says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fasttrain.recipe.network_spec import Fault
from fasttrain.recipe.training_spec import MuonSpec, NovogradSpec

if TYPE_CHECKING:
    from fasttrain.recipe.recipe import Recipe


def faults_of_acceleration(recipe: Recipe) -> Iterator[Fault]:
    """What excludes each other in `acceleration`, and in the ways in which batches are made."""
    acceleration, data = recipe.acceleration, recipe.data
    if acceleration.fused_layers == "on" and acceleration.compile == "on":
        yield (
            ("acceleration", "compile"),
            "and fused_layers do the same work in two ways; set one of them to off or auto",
        )
    if acceleration.fused_layers == "on" and acceleration.channels_last == "off":
        yield ("acceleration", "channels_last"), "off leaves the layout that fused_layers need; set one of them to auto"
    if acceleration.cuda_graphs == "on" and acceleration.activation_checkpointing == "on":
        yield (
            ("acceleration", "cuda_graphs"),
            "cannot record what activation_checkpointing computes again; set one of them to off or auto",
        )
    one_form = isinstance(recipe.optimizer, MuonSpec | NovogradSpec)
    if acceleration.cuda_graphs == "on" and acceleration.fused_optimizer == "off" and not one_form:
        yield ("acceleration", "cuda_graphs"), "needs fused_optimizer, since another waits for the host in each step"
    if data.cache.kind == "gpu" and isinstance(data.workers, int) and data.workers > 0:
        yield (
            ("data", "workers"),
            "have nothing to do where data.cache.kind: gpu cuts patches on the GPU; use auto or 0",
        )
