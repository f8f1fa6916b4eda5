"""Owns what the first rank of a run tells the others: what is trained, on which cases, from which state; or that it is over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.checkpoints import ReadCheckpoint
from fasttrain.engine.planning.plan import Plan
from fasttrain.engine.preparing import Prepared
from fasttrain.machine.ranks import Ranks
from fasttrain.recipe import Recipe


@dataclass(frozen=True)
class Orders:
    """A run as all ranks are to carry it out. training, validation: names of cases, in their order; contents: a digest of each;
    state: the checkpoint that it goes on from.
    """

    recipe: Recipe
    plan: Plan
    root: Path
    training: tuple[str, ...]
    validation: tuple[str, ...]
    contents: dict[str, str]
    state: dict[str, Any] | None


@dataclass(frozen=True)
class Over:
    """There is nothing more to do; the command ends with this exit code."""

    exit_code: int


def give_orders(ranks: Ranks, prepared: Prepared, saved: ReadCheckpoint | None) -> None:
    """To all ranks, which wait for it."""
    if ranks.place.alone:
        return
    ranks.share(
        Orders(
            prepared.recipe,
            prepared.plan,
            prepared.root.absolute(),
            tuple(case.name for case in prepared.split.train),
            tuple(case.name for case in prepared.split.validation),
            prepared.contents,
            None if saved is None else saved.state,
        )
    )
