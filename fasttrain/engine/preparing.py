"""Owns all that is decided before a run begins, and the record of it by which a resume finds the same cases and choices."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttrain.data.caches import check_cases, estimate_bytes
from fasttrain.data.location import data_root
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.data.sources.unlabelled import channel_suffixes
from fasttrain.data.splits import Split, split_cases
from fasttrain.engine.failures import explaining
from fasttrain.engine.plan import Plan, make_plan
from fasttrain.engine.sizes import sizes_of
from fasttrain.errors import DataError, StorageError
from fasttrain.machine.hardware import Hardware, environment_record, survey
from fasttrain.machine.limits import cpu_limit
from fasttrain.machine.threads import limit_threads, thread_count
from fasttrain.networks import build_network
from fasttrain.recipe import Recipe
from fasttrain.run_folder import ENVIRONMENT_KEYS, FORMAT_VERSION, PLAN_KEYS, RunFolder, read_record, write_json
from fasttrain.samples import Case
from fasttrain.telemetry.events import Event, Message, Progress
from fasttrain.telemetry.tensorboard import require_tensorboard


@dataclass(frozen=True)
class Prepared:
    """A run that is decided but not begun: everything that `--dry-run` shows."""

    recipe: Recipe
    hardware: Hardware
    root: Path
    split: Split
    plan: Plan


def prepare(
    recipe: Recipe,
    data: Path | None = None,
    device: str = "auto",
    emit: Callable[[Event], None] = lambda _: None,
    former: Mapping[str, Any] | None = None,
    former_device: str | None = None,
) -> Prepared:
    """Finds cases, parts them, looks at the machine and decides the plan; nothing is written but a phantom's data.

    Raises RecipeError, DataError and MachineError.
    """
    if recipe.output.tensorboard:
        require_tensorboard()
    hardware = survey(device)
    limit_threads(thread_count(recipe.acceleration.threads, hardware.on_gpu)[0])
    if recipe.network.kind == "monai":
        # Its name and arguments are checked by MONAI alone, which should not wait until the cases are read
        with torch.random.fork_rng(devices=[]):
            build_network(recipe.network, recipe.patch.size, len(recipe.data.channels), recipe.output_channels)
    root = data_root(recipe, data, os.environ)
    found = find_cases(recipe.data, root)
    for warning in found.warnings:
        emit(Message(warning, "warning"))
    split = split_cases(found.cases, recipe.data.split)
    counts = (len(split.train), len(split.validation), len(split.test))
    sizes = sizes_of(recipe, counts, _cache_bytes(recipe, [*split.train, *split.validation], emit))
    with explaining(recipe):
        plan = make_plan(recipe, hardware, sizes, former, former_device)
    return Prepared(recipe, hardware, root, split, plan)


def _cache_bytes(recipe: Recipe, cases: list[Case], emit: Callable[[Event], None]) -> int:
    """What the cases will hold in memory, by their headers; where one has none, all cases are read and all faults raised."""
    try:
        return estimate_bytes(cases, recipe)
    except DataError:
        told = lambda done, total: emit(Progress("reading cases", done, total))  # noqa: E731
        check_cases(cases, Preprocess(recipe), cpu_limit(), told)
        raise


def record_start(folder: RunFolder, prepared: Prepared, device: str, recipe_text: str) -> None:
    """Writes `environment.json` and `plan.json`, by which a resume finds the same cases and makes the same choices."""
    record = environment_record(prepared.hardware)
    record["format"] = FORMAT_VERSION
    record["arguments"] = {"data": str(prepared.root.absolute()), "device": device}
    write_json(folder.environment, record)
    names = {
        part: [case.name for case in getattr(prepared.split, attribute)]
        for part, attribute in (("training", "train"), ("validation", "validation"), ("test", "test"))
    }
    suffixes = channel_suffixes(prepared.recipe.data, prepared.split.train[0])
    digest = hashlib.sha256(recipe_text.encode()).hexdigest()
    more = {"cases": names, "channel_suffixes": suffixes, "recipe_sha256": digest}
    write_json(folder.plan, {**prepared.plan.record(), **more})


def recipe_changed(folder: RunFolder, plan: Mapping[str, Any]) -> bool:
    """Whether `recipe.yaml` is another file than the run began with: edited, or cut short and still a recipe."""
    return plan.get("recipe_sha256") not in (None, hashlib.sha256(folder.recipe.read_bytes()).hexdigest())


def read_start(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """`environment.json` and `plan.json` as they were written when the run began."""
    record = read_record(folder.environment, ENVIRONMENT_KEYS)
    if record["format"] != FORMAT_VERSION:
        raise StorageError(f"{folder.path} has run format {record['format']}; this fasttrain reads {FORMAT_VERSION}")
    return record, read_record(folder.plan, PLAN_KEYS)


def check_same_cases(recorded: Mapping[str, list[str]], split: Split, root: Path) -> None:
    faults = []
    for part, cases in (("training", split.train), ("validation", split.validation)):
        then, now = set(recorded[part]), {case.name for case in cases}
        if then != now:
            differing = sorted(then ^ now)
            faults.append(
                f"{root}: the {part} cases are not those the run began with ({len(then)} then, {len(now)} now; "
                f"for example {', '.join(differing[:3])}); name the folder it began with by --data, or begin anew"
            )
    if faults:
        raise DataError(faults)
