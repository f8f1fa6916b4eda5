"""Owns how a run folder becomes a network that predicts as it did in its own validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fasttrain.checkpoints import newest_good
from fasttrain.engine.build import build_predictor
from fasttrain.engine.planning.choices import choose_step
from fasttrain.engine.state import load_weights, weights_to_use
from fasttrain.engine.validating.inference import Ensemble, Predictor
from fasttrain.errors import RecipeError
from fasttrain.machine.hardware import Hardware, survey
from fasttrain.machine.threads import limit_threads, thread_count
from fasttrain.recipe import Recipe, resolve
from fasttrain.run_folder import ENVIRONMENT_KEYS, FOLDS_KEYS, PLAN_KEYS, RunFolder
from fasttrain.telemetry.events import Event
from fasttrain.whole_files import read_record


@dataclass(frozen=True)
class TrainedRun:
    """A run's recipe and network, or the ensemble of all folds'. `weights` says which they are, `warnings` tell of damaged
    checkpoints that were passed over, and of another precision. `epoch` is None for an ensemble.

    `channel_suffixes` are what the names of the training cases' channel files ended in, where the data set decided it.
    """

    folder: RunFolder
    recipe: Recipe
    predictor: Predictor | Ensemble
    weights: str
    checkpoint: Path
    epoch: int | None
    data_root: Path
    channel_suffixes: tuple[str, ...] | None
    warnings: tuple[str, ...]


def open_run(run: Path, device: str, emit: Callable[[Event], None] = lambda _: None) -> TrainedRun:
    """Loads the best checkpoint of a run, else the newest sound one; of a run of all folds that of each.

    On the kind of device it was trained on it computes in the same precision and layout, so that its scores are the same ones;
    on another these are measured, of which `emit` hears.
    Raises RecipeError where there is no run, StorageError where it has no sound checkpoint.
    """
    folder = RunFolder(run)
    if not folder.holds_a_run():
        raise RecipeError(f"{run} holds no run (it has no recipe.yaml)")
    if folder.folds.exists():
        return _open_folds(folder, device, emit)
    recipe = resolve(str(folder.recipe)).recipe
    hardware = survey(device)
    plan, environment = read_record(folder.plan, PLAN_KEYS), read_record(folder.environment, ENVIRONMENT_KEYS)
    same_device = environment["hardware"]["device_name"] == hardware.device_name
    limit_threads(thread_count(recipe.acceleration.threads, hardware.on_gpu)[0])
    usable, warnings = _usable_here(recipe, hardware)
    choice = choose_step(usable, hardware, plan if same_device else None, emit)
    predictor = build_predictor(recipe, choice.candidate, hardware)
    saved = newest_good(folder.best, [folder.last, *folder.epoch_files()])
    load_weights(predictor.network, weights_to_use(saved.state), str(saved.path))
    return TrainedRun(
        folder=folder,
        recipe=recipe,
        predictor=predictor,
        weights=f"weights of epoch {saved.state['progress']['epoch']}, {saved.path}",
        checkpoint=saved.path,
        epoch=int(saved.state["progress"]["epoch"]),
        data_root=Path(environment["arguments"]["data"]),
        channel_suffixes=tuple(plan["channel_suffixes"]) if plan.get("channel_suffixes") else None,
        warnings=(*warnings, *saved.damaged),
    )


def _open_folds(folder: RunFolder, device: str, emit: Callable[[Event], None]) -> TrainedRun:
    count = read_record(folder.folds, FOLDS_KEYS)["folds"]
    untrained = [folder.fold(fold) for fold in range(count) if not RunFolder(folder.fold(fold)).has_checkpoints()]
    if untrained:
        raise RecipeError(
            f"{folder.path}: {len(untrained)} of {count} folds are not trained yet, {untrained[0].name} the first; go on with "
            f"`fasttrain resume {folder.path}`, or name the run of one fold"
        )
    members = [open_run(folder.fold(fold), device, emit) for fold in range(count)]
    first = members[0]
    return TrainedRun(
        folder=folder,
        recipe=first.recipe,
        predictor=Ensemble([member.predictor for member in members if isinstance(member.predictor, Predictor)]),
        weights=f"an ensemble of the {count} folds in {folder.path}",
        checkpoint=folder.path,
        epoch=None,
        data_root=first.data_root,
        channel_suffixes=first.channel_suffixes,
        warnings=tuple(warning for member in members for warning in member.warnings),
    )


def mirrored(run: TrainedRun, axes: tuple[int, ...]) -> TrainedRun:
    """The run whose answers are the mean over the flips of these axes of a patch, whatever the recipe says; () flips none.

    Raises RecipeError for an axis that a patch has not.
    """
    dimensions = run.recipe.dimensions
    wrong = [str(axis) for axis in axes if not 0 <= axis < dimensions]
    if wrong:
        raise RecipeError(
            f"--mirror {', '.join(wrong)} is no axis of a patch of {run.folder.path}, which has {dimensions}, counted from 0"
        )
    axes = tuple(sorted(set(axes)))
    validation = run.recipe.validation.model_copy(update={"mirror": axes})
    recipe = run.recipe.model_copy(update={"validation": validation})
    run.predictor.recipe = recipe
    return replace(run, recipe=recipe)


def _usable_here(recipe: Recipe, hardware: Hardware) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with float32 for a precision that this device lacks: weights are float32 wherever they were trained."""
    amp, capability = recipe.acceleration.amp, hardware.compute_capability
    lacks_fp16 = amp == "fp16" and not hardware.on_gpu
    lacks_bf16 = amp == "bf16" and capability is not None and capability < (8, 0)
    if not lacks_fp16 and not lacks_bf16:
        return recipe, ()
    acceleration = recipe.acceleration.model_copy(update={"amp": "off"})
    sentence = f"the run was trained in {amp}, which {hardware.device_name} has not; it computes in float32 here"
    return recipe.model_copy(update={"acceleration": acceleration}), (sentence,)
