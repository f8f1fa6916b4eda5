"""Owns how many windows `predict` computes at a time: as many as find room in the memory that is free here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from fasttrain.delivery.trained import TrainedRun
from fasttrain.engine.validating.inference import Ensemble, Predictor
from fasttrain.errors import ran_out_of_memory
from fasttrain.machine.limits import memory_free_bytes
from fasttrain.wording import counted, size_in_memory

_SHARE = 0.5
"""Of what is free: the volume, its answer and what others take need the rest."""
_MOST_TIMES = 4
"""The recipe's number is for a validation beside a training step; alone on a GPU there is room for more."""
Answered = TypeVar("Answered")


def fit_windows(run: TrainedRun, warn: Callable[[str], None]) -> None:
    """Sets the number of windows a batch by a window's measured need and what is free; what is predicted is the same but for
    rounding. `warn` hears where it is less than the recipe's.
    """
    wanted = run.recipe.validation.window.batch_size
    on_gpu = run.predictor.device.type == "cuda"
    try:
        need = _bytes_on_gpu(run) if on_gpu else _bytes_of_layers(run)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        # The case itself will tell what is to be done
        need = 0
    free = _free_on_gpu(run.predictor.device) if on_gpu else memory_free_bytes()
    fits = windows_that_fit(wanted, need, free, _MOST_TIMES if on_gpu else 1)
    if fits != wanted:
        set_windows(run, fits)
    if fits < wanted:
        warn(
            f"{counted(fits, 'window')} at a time instead of {wanted} (validation.window.batch_size), since one takes "
            f"{size_in_memory(need)} and {size_in_memory(free)} are free"
        )


def windows_that_fit(wanted: int, need_bytes: int, free_bytes: int, times: int) -> int:
    """As many windows as half of what is free holds, at least 1 and at most `times` as many as wanted."""
    if need_bytes <= 0:
        return wanted
    return max(1, min(wanted * times, int(free_bytes * _SHARE) // need_bytes))


def set_windows(run: TrainedRun, batch_size: int) -> None:
    """From now on the run's networks see so many windows at a time."""
    recipe = run.predictor.recipe
    window = recipe.validation.window.model_copy(update={"batch_size": batch_size})
    validation = recipe.validation.model_copy(update={"window": window})
    run.predictor.recipe = recipe.model_copy(update={"validation": validation})


def with_fewer_windows(run: TrainedRun, answer: Callable[[], Answered], warn: Callable[[str], None]) -> Answered:
    """What `answer` gives; where memory runs out, with half as many windows at a time, until one is too much."""
    while True:
        batch_size = run.predictor.recipe.validation.window.batch_size
        try:
            return answer()
        except Exception as error:
            if batch_size == 1 or not ran_out_of_memory(error):
                raise
        # Here, since the error held on to all that was computed
        if run.predictor.device.type == "cuda":
            torch.cuda.empty_cache()
        set_windows(run, batch_size // 2)
        warn(f"memory ran out with {batch_size} windows at a time; going on with {batch_size // 2}")


def _first(run: TrainedRun) -> Predictor:
    predictor = run.predictor
    return predictor.members[0] if isinstance(predictor, Ensemble) else predictor


def _window(run: TrainedRun) -> Tensor:
    return torch.zeros((1, run.recipe.input_channels, *run.recipe.patch.size), device=run.predictor.device)


@torch.no_grad()
def _bytes_on_gpu(run: TrainedRun) -> int:
    """What a window takes beside the weights, by the allocator's own count."""
    predictor, device = _first(run), run.predictor.device
    predictor.network.eval()
    windows = _window(run)
    predictor.forward(windows)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    predictor.forward(windows)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _free_on_gpu(device: torch.device) -> int:
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + int(kept)


@torch.no_grad()
def _bytes_of_layers(run: TrainedRun) -> int:
    """The answers of all layers to a window, of which a pass never holds more: the host's allocator keeps no count."""
    predictor, total = _first(run), 0

    def add(layer: nn.Module, given: object, made: object) -> None:
        nonlocal total
        total += made.nbytes if isinstance(made, Tensor) else 0

    leaves = [layer for layer in predictor.network.modules() if not any(layer.children())]
    hooks = [layer.register_forward_hook(add) for layer in leaves]
    try:
        predictor.network.eval()
        predictor.forward(_window(run))
    finally:
        for hook in hooks:
            hook.remove()
    return total
