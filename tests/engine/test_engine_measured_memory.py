"""Memory that runs out while a way of computing a step is measured, in each of its forms: that way alone is out."""

import contextlib

import pytest
import torch

from fasttrain.engine.planning import trial
from fasttrain.engine.planning.trial import Candidate, held_by_batch, measure
from fasttrain.errors import OutOfMemoryError, ran_out_of_memory
from fasttrain.machine.hardware import Hardware

GPU = Hardware("cuda:0", "a GPU", 4, 8.0, gpu_gib=8.0, gpu_free_gib=8.0)
FORMS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("out of memory"),
    OutOfMemoryError("a sentence already: out of memory"),
]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that need one do nothing."""
    for name in ("memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())


@pytest.mark.parametrize("error", FORMS, ids=[f"{type(one).__name__} {str(one)[-24:]}" for one in FORMS])
def test_a_way_that_runs_out_of_memory_is_left_out(
    tiny, no_gpu: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert ran_out_of_memory(error)

    def seconds_of(recipe, device, candidate, checkpointing) -> float:
        if candidate.amp == "bf16":
            raise error
        return 1.5

    monkeypatch.setattr(trial, "_seconds_of", seconds_of)
    recipe, fits = tiny().recipe, Candidate("off", False)
    assert measure(recipe, GPU, [Candidate("bf16", True), fits]) == {fits: 1.5}

    def timer(recipe, *_):
        if recipe.training.batch_size > 1:
            raise error
        return lambda: 1.0

    monkeypatch.setattr(trial, "_learner", lambda *_: None)
    monkeypatch.setattr(trial, "_timer", timer)
    assert list(held_by_batch(recipe, GPU, fits, False, [1, 2])) == [1]


@pytest.mark.parametrize("error", OTHERS, ids=[type(one).__name__ for one in OTHERS])
def test_any_other_error_is_raised(tiny, no_gpu: None, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def seconds_of(*_: object) -> float:
        raise error

    monkeypatch.setattr(trial, "_seconds_of", seconds_of)
    assert not ran_out_of_memory(error)
    with pytest.raises(type(error)):
        measure(tiny().recipe, GPU, [Candidate("off", False)])
