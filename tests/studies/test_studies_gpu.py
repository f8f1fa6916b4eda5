"""Trials on a real GPU: what they tell of memory, and that it is given back."""

from pathlib import Path

import pytest
import torch

from fasttrain.engine.planning.batch_policy import with_batch
from fasttrain.engine.stop import StopRequest
from fasttrain.studies.batch_study import BatchStudy
from fasttrain.studies.measuring import Measuring
from fasttrain.studies.options import Options
from fasttrain.studies.trials import TrialServer

pytestmark = pytest.mark.gpu


def test_a_sweep_on_the_gpu(tiny, phantoms: Path, tmp_path: Path) -> None:
    server = TrialServer(tmp_path, lambda event: None, StopRequest())
    try:
        settings = {"acceleration__amp": "auto", "acceleration__channels_last": "auto", "data__workers": "auto"}
        resolved = tiny(**settings, data__cache={"kind": "auto"})
        study = BatchStudy(resolved, Measuring(phantoms, "cuda", server, Options(sizes=(1, 4))))
        study.run()
    finally:
        server.close()
    small, large = study.points
    assert (small.status, large.status) == ("ok", "ok")
    assert 0 < small.values["reserved_bytes"] <= large.values["reserved_bytes"]
    assert large.values["allocated_bytes"] <= large.values["reserved_bytes"]
    # What a trial held is free again for the next one
    assert abs(small.values["free_bytes"] - large.values["free_bytes"]) < 1 << 30
    assert study.validation is not None
    assert study.validation.seconds is not None
    assert study.measuring.machine["driver"]
    # Between an old card and a future one
    ceilings = study.measuring.ceilings
    assert 1e12 < ceilings["peak_flops"] < 1e16
    assert 5e10 < ceilings["peak_bandwidth"] < 1e14


def test_what_does_not_fit_is_memory_and_nothing_else(tiny, phantoms: Path, tmp_path: Path) -> None:
    server = TrialServer(tmp_path, lambda event: None, StopRequest())
    try:
        resolved = tiny(network__features=[64, 128, 256], patch__size=[96, 96, 96], acceleration__cuda_graphs="off")
        measuring = Measuring(phantoms, "cuda", server, Options())
        measuring.look(resolved)
        huge = measuring.steps(with_batch(resolved, 4096), "huge")
        small = measuring.steps(with_batch(resolved, 1), "small")
    finally:
        server.close()
    assert huge.status == "memory", huge.faults
    assert small.done, small.faults


several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@several
def test_two_ranks_take_the_steps_of_a_trial_on_a_gpu_each(tiny, phantoms: Path, tmp_path: Path) -> None:
    server = TrialServer(tmp_path, lambda event: None, StopRequest())
    try:
        settings = {"acceleration__amp": "auto", "acceleration__channels_last": "auto", "data__workers": "auto"}
        resolved = tiny(**settings, data__cache={"kind": "auto"})
        study = BatchStudy(resolved, Measuring(phantoms, "cuda", server, Options(sizes=(4,), ranks=2)))
        study.run()
    finally:
        server.close()
    values = study.points[0].values
    assert study.points[0].ok, study.points[0].reason
    assert len(values["reserved_by_rank"]) == 2
    assert values["reserved_bytes"] in values["reserved_by_rank"]
    assert study.validation is not None
    assert study.validation.seconds is not None


@several
def test_a_second_card_without_memory_ends_the_trial_of_both(tiny, phantoms: Path, tmp_path: Path) -> None:
    resolved = tiny(network__features=[64, 128, 256], patch__size=[96, 96, 96], acceleration__cuda_graphs="off")
    server = TrialServer(tmp_path, lambda event: None, StopRequest())
    try:
        measuring = Measuring(phantoms, "cuda", server, Options(ranks=2))
        measuring.look(resolved)
        # Something else holds all but a little of it
        free, _ = torch.cuda.mem_get_info(1)
        held = torch.empty(free - (5 << 29), dtype=torch.uint8, device="cuda:1")
        large = with_batch(resolved, 4)
        short = measuring.steps(large, "short")
        del held
        torch.cuda.empty_cache()
        enough = measuring.steps(large, "enough")
    finally:
        server.close()
    assert (short.status, short.rank) == ("memory", 1), short.faults
    assert short.seconds < 90
    assert enough.done, enough.faults
