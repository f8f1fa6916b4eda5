"""Trials on a real GPU: what they tell of memory, and that it is given back."""

from pathlib import Path

import pytest

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
