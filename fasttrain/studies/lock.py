"""Owns the file of tuned settings: what was found, for which recipe and machine, and whether that still holds."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fasttrain.engine.planning.batch_policy import TUNED, possible_batch, with_batch
from fasttrain.errors import RecipeError, StorageError
from fasttrain.machine.own_files import read_regular
from fasttrain.recipe import Recipe, ResolvedRecipe
from fasttrain.studies.machine_record import SAME_MACHINE
from fasttrain.whole_files import write_json
from fasttrain.wording import counted, sizes_apart

FORMAT = 1
BATCH = "training.batch_size"
_FREE_OF_SPEED = (
    "name",
    "output",
    "search",
    "schedule",
    "data.split",
    "training.epochs",
    "training.seed",
    "training.early_stopping",
    "training.iterations_per_epoch",
    "training.batch_policy",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "validation.every",
)
"""Sections and keys on which neither the speed nor the memory of a step hangs."""
_ACCUMULATE = "training.accumulate"
_TUNED = (
    BATCH,
    _ACCUMULATE,
    "data.workers",
    "data.prefetch_factor",
    "data.cache.kind",
    "validation.window.batch_size",
    "validation.stitching",
)
"""What a lock may set: there the recipe's own values are where the search began, and need not be the same."""
_ODD = re.compile(r"[^\w.-]+")
_MOST_SHOWN = 3
_LOCK_BYTES = 1 << 16
"""More than a lock takes."""


def matters(recipe: Recipe, tuned_keys: Iterable[str] = _TUNED) -> dict[str, Any]:
    """{dotted key: value} of all on which a measurement hangs. tuned_keys: what is set by it; of the rest the recipe's own values
    were found to be the best, or were never in question.
    """
    free = {_ACCUMULATE, *tuned_keys, *_FREE_OF_SPEED}
    found: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        if path in free:
            return
        if isinstance(value, dict) and value:
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else str(key))
        else:
            found[path] = value

    visit(recipe.model_dump(mode="json"), "")
    training = recipe.training
    if training.batch_policy == "keep_effective":
        # Of other effective batches other sizes are parts
        found["training.batch_policy"] = training.batch_policy
        found["training.effective_batch"] = training.batch_size * training.accumulate
    return found


def digest_of(values: Mapping[str, Any]) -> str:
    """Of what `matters`."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def lock_record(
    resolved: ResolvedRecipe,
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    more: Mapping[str, Any],
    ranks: int = 1,
) -> dict[str, Any]:
    """The document of a lock; `more`: the table and what is told of it; ranks: with how many it was measured."""
    return {
        "format": FORMAT,
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "recipe": resolved.recipe.name,
        "network": resolved.recipe.network.kind,
        "recipe_sha256": digest_of(matters(resolved.recipe)),
        "matters": matters(resolved.recipe, settings),
        "machine": dict(machine),
        "settings": dict(settings),
        **more,
        "ranks": ranks,
    }


def check_place(cache: Path) -> None:
    """Raises StorageError where no lock can be written, before minutes are spent on what would go into it."""
    folder = cache / "tuned"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            # A full disk still makes files, as long as nothing is in them
            stream.write(bytes(_LOCK_BYTES))
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}; set FASTTRAIN_CACHE to a folder that can"
        ) from error


def write_lock(record: Mapping[str, Any], run_lock: Path, cache: Path) -> Path:
    """Writes it into the run and into the machine's folder, one a recipe, device and number of ranks; returns the latter."""
    write_json(run_lock, record)
    place = _place(record, cache)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{place.parent} cannot be made: {error.strerror}; set FASTTRAIN_CACHE") from error
    write_json(place, record)
    return place


def _place(record: Mapping[str, Any], cache: Path) -> Path:
    held = {"recipe": record["recipe_sha256"], "device": record["machine"]["device_name"]}
    key = digest_of(held if record["ranks"] == 1 else {**held, "ranks": record["ranks"]})
    return cache / "tuned" / f"{_ODD.sub('_', record['recipe'])[:60]}-{key[:16]}.json"


def tuned(
    resolved: ResolvedRecipe, machine: Mapping[str, Any], cache: Path, ranks: int = 1
) -> tuple[ResolvedRecipe, str]:
    """The recipe with what was tuned for it on this machine and for so many ranks, and a sentence about that.

    Raises RecipeError where nothing was, or where what was found holds no longer, with the reasons.
    """
    command = "fasttrain tune-batch" + (f" --gpus {ranks}" if ranks > 1 else "")
    again = f"`{command}` measures anew"
    locks, damaged = _read_all(cache / "tuned")
    if not locks and damaged:
        raise RecipeError(
            f"--tuned: {damaged[0]} is damaged or of another fasttrain, and nothing else was tuned here; {again}"
        )
    if not locks:
        raise RecipeError(f"--tuned: nothing was tuned on this machine yet ({cache / 'tuned'} is empty); {again}")
    reasons = {path: _differences(record, resolved.recipe, machine, ranks) for path, record in locks.items()}
    fitting = [path for path, found in reasons.items() if not found]
    if not fitting:
        named = sorted({record["recipe"] for record in locks.values()})
        if resolved.recipe.name not in named:
            shown = ", ".join(named[:_MOST_SHOWN]) + (" …" if len(named) > _MOST_SHOWN else "")
            raise RecipeError(
                f"--tuned: nothing was tuned for {resolved.recipe.name} on this machine yet, but for {shown}; "
                f"`{command}` measures it"
            )
        # The one that needs least to fit, the newest of these first
        own = [path for path in reasons if locks[path]["recipe"] == resolved.recipe.name]
        nearest = min(own, key=lambda path: len(reasons[path]))
        found = reasons[nearest]
        shown = "; ".join(found[:_MOST_SHOWN]) + (
            f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        )
        raise RecipeError(
            f"--tuned: what was tuned for {locks[nearest]['recipe']} on {locks[nearest]['made']} does not hold: {shown}; {again}"
        )
    record = locks[fitting[0]]
    _refuse_set(resolved, record["settings"])
    told = ", ".join(f"{key}={value}" for key, value in record["settings"].items())
    try:
        found_there = applied(resolved, record["settings"])
    except RecipeError as error:
        raise RecipeError([f"--tuned: {fitting[0]} is damaged: {fault}; {again}" for fault in error.faults]) from error
    return found_there, f"tuned on {record['made']}: {told or 'the recipe as it is'}"


def applied(resolved: ResolvedRecipe, settings: Mapping[str, Any]) -> ResolvedRecipe:
    """The recipe with tuned settings {dotted key: value}; of the batch size with what its policy makes of it."""
    if BATCH in settings:
        resolved = with_batch(resolved, int(settings[BATCH]))
    others: dict[tuple[str | int, ...], Any] = {
        tuple(key.split(".")): value for key, value in settings.items() if key != BATCH
    }
    return resolved.with_values(others, TUNED) if others else resolved


def _refuse_set(resolved: ResolvedRecipe, settings: Mapping[str, Any]) -> None:
    both = [key for key in settings if resolved.origins.get(tuple(key.split("."))) == "--set"]
    if both:
        raise RecipeError([f"--set {key} and --tuned both decide it; leave one of them out" for key in both])


def _read_all(folder: Path) -> tuple[dict[Path, dict[str, Any]], list[Path]]:
    """The locks there are, the newest first, and the files that are none or of another format."""
    found: dict[Path, dict[str, Any]] = {}
    damaged: list[Path] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            record = json.loads(read_regular(path))
        except (OSError, ValueError, RecursionError):
            damaged.append(path)
            continue
        if _sound(record):
            found[path] = record
        else:
            damaged.append(path)
    return dict(sorted(found.items(), key=lambda pair: pair[1]["made"], reverse=True)), damaged


def _sound(record: Any) -> bool:
    kinds = {"made": str, "recipe": str, "matters": dict, "machine": dict, "settings": dict}
    return (
        isinstance(record, dict)
        and record.get("format") == FORMAT
        and all(isinstance(record.get(key), kind) for key, kind in kinds.items())
        and set(record["settings"]) <= set(_TUNED)
        and _whole(record.get("ranks", 1))
        and (BATCH not in record["settings"] or _whole(record["settings"][BATCH]))
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _differences(record: Mapping[str, Any], recipe: Recipe, machine: Mapping[str, Any], ranks: int) -> list[str]:
    """Why a lock does not hold, each in a few words."""
    values = matters(recipe, record["settings"])
    then, there = record["matters"], record["machine"]
    found = [
        f"{key} was {_shown(then.get(key))} and is {_shown(values.get(key))}"
        for key in dict.fromkeys([*values, *then])
        if then.get(key) != values.get(key)
    ]
    keys = SAME_MACHINE if machine.get("gpu_bytes") else (*SAME_MACHINE, "cpus")
    found += [
        f"the machine's {key} was {_shown(there.get(key))} and is {_shown(machine.get(key))}"
        for key in keys
        if there.get(key) != machine.get(key)
    ]
    measured = record.get("ranks", 1)
    if measured != ranks:
        found.insert(
            0,
            f"it was measured with {counted(measured, 'rank')}, and {ranks} {'trains' if ranks == 1 else 'train'} here",
        )
    batch = record["settings"].get(BATCH)
    if batch is not None and not found and not possible_batch(recipe, batch, ranks):
        found.append(f"a batch of {batch} is no part of the effective batch, which training.batch_policy keeps")
    needs, free = record.get("needed_bytes"), machine.get("gpu_free_bytes")
    if not found and isinstance(needs, int) and isinstance(free, int) and needs > free:
        needed, left = sizes_apart(needs, free)
        found.append(f"it needs {needed} of the GPU's memory and {left} are free")
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = json.dumps(value) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
