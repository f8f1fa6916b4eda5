"""Owns the room that a run's checkpoints will take, and whether the disk has it before anything is trained."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fasttrain.checkpoints import free_bytes
from fasttrain.errors import StorageError
from fasttrain.machine.limits import memory_free
from fasttrain.recipe import Recipe
from fasttrain.recipe.training_spec import OptimizerSpec, SGDSpec
from fasttrain.run_folder import RunFolder
from fasttrain.wording import counted

_MOMENTS = {"adamw": 2, "adam": 2, "novograd": 1, "muon": 2}
"""Values that an optimiser keeps for each weight, at most: Muon one for the matrices, two for the rest."""
_BESIDE = 1 << 19
"""What else a checkpoint holds: names, shapes, progress, generators."""
_OTHER_FILES = 1 << 20
"""What a run writes besides at the least: its log, tables and records."""


def expected_checkpoint_bytes(recipe: Recipe, parameters: int) -> int:
    """About what a checkpoint of a network with so many parameters will take: weights, their average, the optimiser's state."""
    copies = 1 + (recipe.training.ema is not None) + _moments(recipe.optimizer)
    return parameters * 4 * copies + _BESIDE


def checkpoints_kept(recipe: Recipe) -> int:
    """How many a run has at its end: `last`, `best` and the newest `output.keep` of the periodic ones."""
    output, epochs = recipe.output, recipe.training.epochs
    return 2 + (min(output.keep, epochs // output.keep_every) if output.keep_every else 0)


def check_space(folder: RunFolder, recipe: Recipe, parameters: int) -> None:
    """Raises StorageError where the folder's disk has no room for the checkpoints that the run keeps at once.

    Those are `last`, `best`, the newest `output.keep` of the periodic ones, and the one that is being written; what the folder
    holds of them already is not asked for again. Of a run over all folds, those that are still to come count too.
    """
    each = expected_checkpoint_bytes(recipe, parameters)
    kept = checkpoints_kept(recipe)
    there = sum(_size(path) for path in (folder.last, folder.best, *folder.epoch_files()))
    folds = folder.folds_left()
    needed = max(each * (kept * folds + 1) - there, each) + _OTHER_FILES
    free = free_bytes(folder.path, reserved=False)
    # A network that no memory holds has another fault, which is told by whoever builds it
    if free is None or free >= needed or each > memory_free()[0]:
        return
    what = "last, best and the one being written"
    if kept > 2:
        what = f"last, best, {kept - 2} by output.keep and the one being written"
    of_folds = f" of each of {counted(folds, 'fold')}" if folds > 1 else ""
    raise StorageError(
        f"{folder.checkpoints}: the checkpoints of this run need {needed:,} bytes ({what}{of_folds}, about {each:,} bytes each) "
        f"and its disk has {free:,} free; free space there, or choose another folder with --run"
    )


def _moments(spec: OptimizerSpec) -> int:
    if isinstance(spec, SGDSpec):
        return int(spec.momentum > 0)
    return _MOMENTS[spec.kind]


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
