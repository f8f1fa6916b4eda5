"""Owns what is exported of a run: its plain network in float32 on the CPU, what its answer means, and windows of a real case."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.checkpoints import newest_good
from fasttrain.data.finding import cases_for
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.splits import split_cases
from fasttrain.engine.state import load_weights, weights_to_use
from fasttrain.engine.step import Precision
from fasttrain.engine.validating.inference import Predictor
from fasttrain.errors import DataError, RecipeError
from fasttrain.networks import build_network
from fasttrain.recipe import Recipe, resolve
from fasttrain.recipe.data_spec import PercentileIntensity, WindowIntensity, ZScoreIntensity
from fasttrain.run_folder import ENVIRONMENT_KEYS, PLAN_KEYS, RunFolder
from fasttrain.samples import Case, Sample
from fasttrain.whole_files import read_record
from fasttrain.windows import Answer, WindowStream, of_slices
from fasttrain.windows.stitching import Whole

MOST_WINDOWS = 4
"""Of a case that is compared: on a CPU a large one would take minutes."""
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class PlainModel:
    """The network of a run as its recipe builds it: no fused layers, float32, on the CPU, in eval mode, with the weights that
    the run is scored with (the EMA's where it has one). `checkpoint` is where they come from, `case` a real case to check with.
    """

    folder: RunFolder
    recipe: Recipe
    network: nn.Module
    checkpoint: Path
    epoch: int
    case: Case
    channel_suffixes: tuple[str, ...] | None

    @property
    def patch(self) -> tuple[int, ...]:
        """The voxels of a window."""
        return tuple(self.recipe.patch.size)

    @property
    def example(self) -> Tensor:
        """A batch of two windows [batch, channel, *patch]."""
        return torch.zeros((2, self.recipe.input_channels, *self.patch))

    @property
    def answer(self) -> str:
        """What the channels of the network's answer are: `softmax`, `sigmoid`, `regions` (a sigmoid each) or `dose`."""
        if self.recipe.task == "dose":
            return "dose"
        if self.recipe.data.regions:
            return "regions"
        return "sigmoid" if self.recipe.output_channels == 1 else "softmax"

    def predictor(self) -> Predictor:
        """The network with the recipe's windows, in float32."""
        return Predictor(self.network, self.recipe, Precision("cpu", None, None), CPU)

    def described(self) -> dict[str, Any]:
        """What a user of the file has to know, as plain values."""
        recipe, data = self.recipe, self.recipe.data
        return {
            "recipe": recipe.name,
            "epoch": self.epoch,
            "input": f"float32 [batch, {recipe.input_channels}, {', '.join(map(str, self.patch))}]",
            "channels": list(data.channels),
            "answer": _ANSWERS[self.answer],
            "outputs": _outputs(recipe, self.answer),
            "label_values": list(data.class_values),
            "orientation": data.orientation,
            "spacing_mm": None if data.spacing is None else list(data.spacing),
            "intensity": data.intensity.model_dump(mode="json"),
            "window": {"overlap": recipe.validation.window.overlap, "blend": recipe.validation.window.blend},
        }


_ANSWERS = {
    "softmax": "logits of the classes, the background first; softmax over channels gives probabilities",
    "sigmoid": "logits of the one class; sigmoid gives its probability, above 0.5 it is there",
    "regions": "logits of regions that may overlap; sigmoid of each gives its probability, above 0.5 it is there",
    "dose": "logits; softplus × data.dose_scale gives Gy (the input is the CT and a channel for each structure)",
}


def _outputs(recipe: Recipe, answer: str) -> list[str]:
    names = list(recipe.data.scored_names)
    if answer == "dose":
        return ["dose"]
    return ["background", *names] if answer == "softmax" else names


def describes_intensity(recipe: Recipe) -> str:
    """The intensity step in a few words."""
    intensity = recipe.data.intensity
    if isinstance(intensity, WindowIntensity):
        return f"intensities from {intensity.low:g} to {intensity.high:g} scaled to 0 … 1 and clipped"
    if isinstance(intensity, ZScoreIntensity):
        return "zero mean and unit standard deviation a channel" + (
            ", of voxels that are not 0" if intensity.nonzero else ""
        )
    if isinstance(intensity, PercentileIntensity):
        return f"percentiles {intensity.low:g} to {intensity.high:g} scaled to 0 … 1 and clipped"
    return "as in the file"


def open_plain(run: Path, data: Path | None) -> PlainModel:
    """Loads the best checkpoint of a run into its plain network.

    data: the folder of the data set where it is no longer where the run found it. Raises RecipeError where there is no run or
    one of all folds, StorageError where it has no sound checkpoint, DataError where there is no case to check with.
    """
    folder = RunFolder(run)
    if not folder.holds_a_run():
        raise RecipeError(f"{run} holds no run (it has no recipe.yaml)")
    if folder.folds.exists():
        raise RecipeError(
            f"{run} holds the networks of all folds, and a file holds one; export one fold, {folder.fold(0)}"
        )
    recipe = resolve(str(folder.recipe)).recipe
    saved = newest_good(folder.best, [folder.last, *folder.epoch_files()])
    network = build_network(recipe.network, recipe.patch.size, recipe.input_channels, recipe.output_channels)
    load_weights(network, weights_to_use(saved.state), str(saved.path))
    network.eval().requires_grad_(False)
    plan, environment = read_record(folder.plan, PLAN_KEYS), read_record(folder.environment, ENVIRONMENT_KEYS)
    root = data if data is not None else Path(environment["arguments"]["data"])
    return PlainModel(
        folder=folder,
        recipe=recipe,
        network=network,
        checkpoint=saved.path,
        epoch=int(saved.state["progress"]["epoch"]),
        case=_case(recipe, root),
        channel_suffixes=tuple(plan["channel_suffixes"]) if plan.get("channel_suffixes") else None,
    )


def _case(recipe: Recipe, root: Path) -> Case:
    """The first validation case whose files are there."""
    try:
        parts = split_cases(cases_for(recipe.data, root).every, recipe.data.split).parts
    except DataError as error:
        *others, last = error.faults
        raise DataError(
            [*others, f"{last}; an export is checked on a real case, name the data set with --data"]
        ) from error
    for case in (*parts["validation"], *parts["training"]):
        if all(path.exists() for path in case.images):
            return case
    raise DataError(
        f"{root} holds no case with its files, and an export is checked on one; name the data set with --data"
    )


def sample_of(model: PlainModel) -> Sample:
    """The case as the network is given it; raises DataError where it cannot be read."""
    preprocess = Preprocess(model.recipe, training=False)
    return preprocess.as_sample(preprocess(model.case))


class _EnoughError(Exception):
    """No more windows are needed."""


def real_windows(model: PlainModel) -> Tensor:
    """Up to four windows [window, channel, *patch] of the case, those that differ most within themselves."""
    recipe, seen = model.recipe, list[Tensor]()

    def taken(windows: Tensor) -> Tensor:
        seen.extend(windows.clone())
        # A large case has windows of air at its beginning
        if len(seen) >= 16 * MOST_WINDOWS:
            raise _EnoughError
        return windows[:, :1]

    sample = sample_of(model)
    forward = taken if recipe.data.slices is None else of_slices(taken)
    stream = WindowStream(
        Answer([forward], (), 1), recipe.box, recipe.validation.window, CPU, neighbours=recipe.neighbours
    )
    image = model.predictor()._seen(sample)
    try:
        for _ in stream.predict([(image, Whole(tuple(image.shape[1:])))]):
            pass
    except _EnoughError:
        pass
    return torch.stack(sorted(seen, key=lambda one: -float(one.std()))[:MOST_WINDOWS])
