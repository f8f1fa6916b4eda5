"""Owns the estimate of what a validation takes of a GPU's memory, made before the first epoch, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fasttrain.data.caches.estimate import dose_grid
from fasttrain.data.reading import split_shape
from fasttrain.data.volume_files import read_header
from fasttrain.data.volumes import ITEM_BYTES, preprocessed_shape
from fasttrain.engine.planning.decisions import Decision
from fasttrain.engine.planning.gpu_memory import OWN_BYTES, STEP_MARGIN
from fasttrain.engine.validating.inference import CPU
from fasttrain.engine.validating.validation import Validator
from fasttrain.machine.allocator import gpu_room_bytes
from fasttrain.machine.hardware import GIB
from fasttrain.recipe import Recipe
from fasttrain.samples import Case
from fasttrain.windows import lay_out
from fasttrain.wording import counted, size_in_memory

RESIDENT_SHARE = 0.5
"""Of the memory that training and the largest case leave: so much may volumes take that stay on the GPU between validations."""
_UNMEASURED_SHARE = 0.5
"""Of the free memory that is left to validation where no training step was measured."""
_SCRATCH_BYTES = GIB // 2
"""Slabs of scores on their way to a class map."""


@dataclass(frozen=True)
class Room:
    """Bytes of the GPU's memory before the first epoch: `free` now, what a training `step` held when it was measured (0: it was
    not), and whether a graph holds that for good (`captured`) or gives it back between steps.
    """

    free: int
    step: int
    captured: bool

    @property
    def lasting(self) -> int:
        """What training leaves at any time."""
        if not self.step:
            return int(self.free * _UNMEASURED_SHARE)
        return max(self.free - int(self.step * STEP_MARGIN) - OWN_BYTES, 0)

    @property
    def at_validation(self) -> int:
        """What is there while no step runs: a half of what a step takes is weights' company, such as the optimiser's state."""
        if self.captured or not self.step:
            return self.lasting
        return max(self.free - self.step // 2 - OWN_BYTES, 0)


def case_bytes(shape: Sequence[int], source_shape: Sequence[int], recipe: Recipe) -> int:
    """Of a volume that is stitched on the GPU: image, the sums of a slab of windows, class maps and reference."""
    window, answers = recipe.validation.window, recipe.answer_channels
    layout = lay_out(shape, recipe.box, window.overlap)
    voxels, source_voxels = math.prod(shape), math.prod(source_shape)
    image = voxels * (recipe.stored_channels + recipe.input_channels * (recipe.task == "dose"))
    image *= ITEM_BYTES[recipe.data.storage_dtype]
    # A slab, and the part of it that moves on
    sums = 4 * (answers + 1) * math.prod(layout.slab) * (1 + window.overlap) if layout.windows > 1 else 0
    # Counting makes a few masks of a byte a voxel; a dose is float32, before and after it is moved, and its reference two of them
    maps = 6 * voxels + 16 * source_voxels if recipe.task == "dose" else voxels + 6 * source_voxels
    return int(image + sums + maps) + _SCRATCH_BYTES


def batch_bytes(recipe: Recipe, step: int) -> int:
    """Of a batch of windows: the network's activations, by what a training step held, and what comes out of it in float32."""
    window, training = recipe.validation.window, recipe.training
    voxels = window.batch_size * math.prod(recipe.patch.size)
    answers = 4 * voxels * (recipe.input_channels + 4 * recipe.answer_channels)
    # Nothing is kept for a backward pass, and weights and optimiser are a part of the step's
    return answers + step * window.batch_size // (2 * training.batch_size)


def decide_stitching(
    recipe: Recipe, shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], room: Room
) -> tuple[bool, int, str]:
    """(whether windows are summed on the GPU, bytes that may stay there between validations, why).

    `shapes`: of each validation case, (preprocessed, of the file).
    """
    needs = {pair: case_bytes(*pair, recipe) for pair in shapes}
    largest = max(needs, key=lambda pair: needs[pair])
    needed = needs[largest] + batch_bytes(recipe, room.step)
    told = f"the largest of {counted(len(shapes), 'case')}, {list(largest[0])}, takes about {size_in_memory(needed)}"
    if needed > room.at_validation:
        left = size_in_memory(room.at_validation)
        return False, 0, f"{told}, and training leaves {left} of the GPU's memory: sums lie in the host's"
    stays = int(max(room.lasting - needed, 0) * RESIDENT_SHARE)
    return True, stays, f"{told}; volumes of up to {size_in_memory(stays)} stay on the GPU"


def prepare_validation(
    validator: Validator, step_bytes: int, captured: bool, warn: Callable[[str], None]
) -> Decision | None:
    """Decides, with the network and the training cases in place, where windows are summed and which volumes stay on the GPU.

    `warn` hears from then on where that turns out wrong. None where there is no GPU, or nothing to validate.
    """
    predictor = validator.predictor
    predictor.warn = warn
    device = predictor.device
    if device.type != "cuda" or not validator.cases:
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = Room(gpu_room_bytes(device) + unused, step_bytes, captured)
    shapes = [shapes_of(case, validator.recipe) for case in validator.cases]
    on_gpu, stays, why = decide_stitching(validator.recipe, shapes, room)
    setting = validator.recipe.validation.stitching
    if setting != "auto":
        on_gpu, stays, why = setting == "gpu", stays if setting == "gpu" else 0, f"set in the recipe; {why}"
    predictor.stitch_device = device if on_gpu else CPU
    validator.kept.resident_bytes = stays
    return Decision("validation_stitching", "gpu" if on_gpu else "cpu", why)


def shapes_of(case: Case, recipe: Recipe) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(preprocessed, of the file) from the header alone: how much a crop will cut away is not known."""
    if recipe.task == "dose":
        spatial, affine = dose_grid(case)
        return preprocessed_shape(spatial, affine, recipe.data.spacing, recipe.data.orientation), spatial
    header = read_header(case.images[0])
    spatial, _ = split_shape(case.images[0], header.shape, recipe.volume_dimensions)
    data = recipe.data
    shape = preprocessed_shape(spatial, header.affine, data.spacing, data.orientation, data.sliced_across)
    return shape, tuple(spatial)
