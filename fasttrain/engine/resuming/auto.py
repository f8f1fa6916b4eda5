"""Owns `train --resume auto`: which run a command that is given again means, and what it asks otherwise than when that began."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.engine.resuming.changes import as_values, assignments_for, changes_between
from fasttrain.errors import StorageError
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import runs_by_age

if TYPE_CHECKING:
    from fasttrain.recipe import Recipe

_STAMP = re.compile(r"-\d{8}-\d{6}(-\d+)?$")


def run_of_command(
    name: str, run: Path | None, base: Path = Path("runs"), since: float | None = None
) -> tuple[Path | None, bool]:
    """The folder that a command means, and whether it holds a run to go on with.

    run: what it names, else the newest folder that a run of a recipe `name` was given under `base`; None: there is none yet.
    since: a command that a launcher began anew means no run that was there before the launcher began (Unix seconds).

    Raises StorageError where there are checkpoints and no recipe to go on by: a run is never begun anew in silence.
    """
    if run is None:
        named = (one for one in runs_by_age(base) if _STAMP.sub("", one.path.name) == name)
        run = next((one.path for one in named if since is None or (one.began() or 0.0) >= since), None)
        if run is None:
            return None, False
    folder = RunFolder(run)
    if folder.has_checkpoints() and not folder.holds_a_run():
        raise StorageError(
            f"{run} holds checkpoints and no recipe.yaml, so that its run cannot be gone on with; bring that file back, or begin "
            "anew in another --run"
        )
    return run, folder.holds_a_run() and not folder.never_trained()


def asked_otherwise(folder: RunFolder, recipe: Recipe) -> dict[str, Any]:
    """What a command's recipe has otherwise than that of the command that began (or last changed) the run, as values to set; of
    a run whose plan does not tell, nothing.
    """
    try:
        asked = json.loads(folder.plan.read_text(encoding="utf-8")).get("asked")
    except (OSError, ValueError, AttributeError):
        return {}
    if not isinstance(asked, Mapping):
        return {}
    now = as_values(recipe)
    return assignments_for(changes_between(asked, now), now)
