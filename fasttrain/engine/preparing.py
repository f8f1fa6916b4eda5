"""Owns all that is decided before a run begins, and the record of it by which a resume finds the same cases and choices."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain.data.caches import build_bytes, estimate_bytes
from fasttrain.data.caches.shared import are_shared
from fasttrain.data.finding import cases_for
from fasttrain.data.location import data_root
from fasttrain.data.made_ahead import MadeAhead, can_make_ahead
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.seen_files import SEEN
from fasttrain.data.sources.unlabelled import channel_suffixes
from fasttrain.data.splits import Split
from fasttrain.engine.failures import explaining
from fasttrain.engine.outline import Outline, outline_of
from fasttrain.engine.planning.kernels_ahead import compiling_ahead
from fasttrain.engine.planning.memory_plan import check_gpu_cache
from fasttrain.engine.planning.plan import Plan, make_plan
from fasttrain.engine.planning.sizes import Sizes, sizes_of
from fasttrain.engine.resuming.changes import as_values
from fasttrain.engine.sound_cases import sound_cases
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import RecipeError, StorageError
from fasttrain.machine.collector import collector_at_rest
from fasttrain.machine.cudnn import slow_cudnn
from fasttrain.machine.hardware import GIB, Hardware, environment_record, passed_over, survey
from fasttrain.machine.place import ALONE, Place
from fasttrain.machine.threads import limit_threads, thread_count
from fasttrain.recipe import Recipe
from fasttrain.run_folder import ENVIRONMENT_KEYS, FORMAT_VERSION, PLAN_KEYS, RunFolder
from fasttrain.telemetry.events import Event, Message
from fasttrain.telemetry.tensorboard import require_tensorboard
from fasttrain.whole_files import read_record, write_json
from fasttrain.wording import counted

_CPUS_FOR_THE_PLAN = 2
_READ_WHOLE = ("auto", "memory", "gpu")
"""Kinds of cache for which every case is read at the start."""
_WORTH_PROCESSES_BYTES = 16 << 20
_MOST_OPEN = 256
"""Descriptors of volumes made ahead that are kept for the other ranks; the rest is written once more for them."""
_SHARE_AHEAD = 2
"""One part in so many of the free memory may be taken by volumes that are made ahead, and by making them."""


@dataclass(frozen=True)
class Prepared:
    """A run that is decided but not begun: everything that `--dry-run` shows.

    `split` holds sound cases alone; skipped: {case name: faults} of those that `data.bad_cases: skip` left out of it;
    contents: {case name: digest of its voxels and grid}; ahead: volumes that were begun beside the plan, to be closed.
    """

    recipe: Recipe
    hardware: Hardware
    root: Path
    split: Split
    plan: Plan
    outline: Outline
    skipped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    ahead: MadeAhead | None = None


@dataclass(frozen=True)
class Looked:
    """What is known of a run before its plan is made; see `Prepared`."""

    recipe: Recipe
    hardware: Hardware
    root: Path
    split: Split
    outline: Outline
    sizes: Sizes
    skipped: dict[str, tuple[str, ...]]
    contents: dict[str, str]


def prepare(
    recipe: Recipe,
    data: Path | None = None,
    device: str = "auto",
    emit: Callable[[Event], None] = lambda _: None,
    former: Mapping[str, Any] | None = None,
    former_device: str | None = None,
    stop: StopRequest | None = None,
    ended: Callable[[str], None] = lambda part: None,
    opened: Callable[[Split], Split] | None = None,
    seat: Place = ALONE,
) -> Prepared:
    """Finds cases, parts them, checks every one, looks at the machine and decides the plan.

    `former` is the plan of the run that goes on here: cases that were left out when it began stay out. Nothing is written but a
    phantom's data and, in fasttrain's cache folder, what the check found, also where `stop` ends it. `ended` hears which part of
    the start is over (`start_clock.PARTS`). `opened` says which cases will be opened next: their volumes are begun while a GPU
    is measured, and whoever takes the result closes its `ahead`. Raises RecipeError,
    DataError (with all faults of all cases, unless the recipe leaves such cases out), MachineError, and Stopped.
    """
    looked = look(recipe, data, device, emit, former, stop, ended, seat)
    SEEN.stop_keeping()
    ahead = _made_ahead(looked, opened(looked.split)) if opened is not None else None
    try:
        with explaining(recipe):
            plan = make_plan(recipe, looked.hardware, looked.sizes, former, former_device, _heeding(stop, emit))
        if (slow := slow_convolutions(recipe, looked.hardware, plan)) is not None:
            emit(Message(slow, "warning"))
    except BaseException:
        if ahead is not None:
            ahead.close()
        raise
    return Prepared(
        recipe, looked.hardware, looked.root, looked.split, plan, looked.outline, looked.skipped, looked.contents, ahead
    )


def _heeding(stop: StopRequest | None, emit: Callable[[Event], None]) -> Callable[[Event], None]:
    """`emit`, at which work that tells of itself is ended by Stopped where a stop was asked for: a measured step may be slow."""

    def emit_or_stop(event: Event) -> None:
        if stop is not None:
            stop.check()
        emit(event)

    return emit_or_stop


def look(
    recipe: Recipe,
    data: Path | None = None,
    device: str = "auto",
    emit: Callable[[Event], None] = lambda _: None,
    former: Mapping[str, Any] | None = None,
    stop: StopRequest | None = None,
    ended: Callable[[str], None] = lambda part: None,
    seat: Place = ALONE,
) -> Looked:
    """The part of `prepare` that comes before the plan: cases, each of them checked, and the machine."""
    if recipe.output.tensorboard:
        require_tensorboard()
    hardware = survey(device, seat)
    check_ranks(recipe, hardware)
    if (told := passed_over(device, hardware)) is not None:
        emit(Message(told, "warning"))
    limit_threads(thread_count(recipe.acceleration.threads, hardware.on_gpu, hardware.local_ranks)[0])
    # What cannot be had is told before cases are read and steps measured
    check_gpu_cache(recipe, hardware)
    ended("device")
    # The arguments of a network by name are checked by MONAI alone, which should not wait until the cases are read
    outline = outline_of(recipe)
    ended("plan")
    root = data_root(recipe, data, os.environ)
    fresh = recipe.data.source.kind == "phantom" and not (root / "dataset.json").exists()
    found = cases_for(recipe.data, root)
    if fresh:
        emit(Message(f"{counted(len(found.every), 'volume')} made and written to {root} (data.source.kind: phantom)"))
    for warning in found.warnings:
        emit(Message(warning, "warning"))
    with compiling_ahead(recipe, hardware):
        load_for_steps()
        ended("import")
        split, skipped, contents = sound_cases(recipe, root, found, former, emit, stop or StopRequest())
        ended("check")
    if hardware.on_gpu:
        ended("kernels")
    counts = (len(split.train), len(split.validation), len(split.test))
    validated = [estimate_bytes([case], recipe) for case in split.validation]
    trained = estimate_bytes(split.train, recipe)
    built = build_bytes([*split.train, *split.validation], recipe)
    sizes = sizes_of(
        recipe, counts, trained + sum(validated), max(validated, default=0), built, trained, hardware.ranks
    )
    return Looked(recipe, hardware, root, split, outline, sizes, skipped, contents)


def _made_ahead(looked: Looked, split: Split) -> MadeAhead | None:
    """Volumes of the cache that are begun while the GPU is measured. On a CPU they would slow what is measured there, and other
    kinds of cache may hold the volumes already. Of several ranks the first begins them, on all CPUs: the others wait meanwhile.
    """
    recipe, hardware, sizes = looked.recipe, looked.hardware, looked.sizes
    if not hardware.on_gpu or recipe.data.cache.kind not in _READ_WHOLE or not can_make_ahead():
        return None
    room = int(hardware.memory_free_gib * GIB) // _SHARE_AHEAD - sizes.cache_bytes
    cpus = hardware.cpus * hardware.local_ranks
    processes = min(cpus - _CPUS_FOR_THE_PLAN, room // max(sizes.build_bytes, 1))
    if processes < 2 or sizes.cache_bytes < _WORTH_PROCESSES_BYTES:
        return None
    trained, validated = Preprocess(recipe), Preprocess(recipe, training=False)
    work = [*((case, trained) for case in split.train), *((case, validated) for case in split.validation)]
    if are_shared(work):
        return None
    try:
        return MadeAhead(work, processes, _MOST_OPEN if hardware.local_ranks > 1 else 0)
    except OSError:
        # No more descriptors or processes: volumes are made when they are asked for
        return None


def check_ranks(recipe: Recipe, hardware: Hardware) -> None:
    """Raises RecipeError for what several ranks cannot do."""
    if recipe.training.sync_batch_norm and hardware.ranks > 1 and not hardware.on_gpu:
        raise RecipeError(
            "training.sync_batch_norm: torch synchronises batch norms on GPUs alone; set it to false on a CPU"
        )


def load_for_steps() -> None:
    """Imports what torch loads by itself when the first optimiser is made, which takes a second or more."""
    with collector_at_rest():
        import torch._dynamo  # noqa: F401


def slow_convolutions(recipe: Recipe, hardware: Hardware, plan: Plan) -> str | None:
    """What the machine's cuDNN makes slow in this run, and what to install instead; None where nothing is."""
    affected = hardware.on_gpu and recipe.dimensions == 3 and plan.amp != "off"
    slow = slow_cudnn(hardware.cudnn) if affected else None
    if slow is None or not plan.channels_last:
        return slow
    return f"{slow}; this run is channels-last, so that only layers which change the layout are slow"


def record_start(
    folder: RunFolder, prepared: Prepared, device: str, recipe_text: str, asked: Mapping[str, Any] | None
) -> None:
    """Writes `environment.json` and `plan.json`, by which a resume finds the same cases and makes the same choices.

    asked: the recipe as the command gave it, before anything was tuned or stepped down; None: not known.
    """
    record = environment_record(prepared.hardware)
    record["format"] = FORMAT_VERSION
    record["arguments"] = {"data": str(prepared.root.absolute()), "device": device}
    write_json(folder.environment, record)
    names = {part: [case.name for case in cases] for part, cases in prepared.split.parts.items()}
    suffixes = channel_suffixes(prepared.recipe.data, prepared.split.train[0])
    digest = hashlib.sha256(recipe_text.encode()).hexdigest()
    skipped = {name: list(faults) for name, faults in prepared.skipped.items()}
    outline = {"outline": prepared.outline.text, "parameters": prepared.outline.parameters}
    more = {**outline, "cases": names, "skipped_cases": skipped, "channel_suffixes": suffixes, "recipe_sha256": digest}
    more["case_contents"] = prepared.contents
    more["recipe"], more["asked"] = as_values(prepared.recipe), asked
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
