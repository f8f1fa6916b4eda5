"""Doses on a GPU: the step in a CUDA graph, volumes in the GPU's memory, and the whole network within 24 GiB."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fasttrain import train
from fasttrain.engine.planning.trial import Candidate, measure
from fasttrain.machine.hardware import GIB, survey
from fasttrain.recipe import resolve
from fasttrain.telemetry.metrics_csv import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_recorded_step_on_resident_volumes_learns_as_one_from_the_host(small, patients: Path, tmp_path: Path) -> None:
    losses = []
    steady = {"network__dropout": 0.0, "training__epochs": 3, "training__iterations_per_epoch": 10}
    resident = {"data__cache__kind": "gpu", "acceleration__cuda_graphs": "on", "data__workers": "auto"}
    for number, more in enumerate((resident, {"acceleration__cuda_graphs": "off"})):
        run = tmp_path / str(number)
        result = train(small(**steady, **more), data=patients, run=run, device="cuda")
        assert result.exit_code == 0
        losses.append([row["train_loss"] for row in read_metrics(run / "metrics.csv")])
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        assert not [
            event for event in events if event["event"] == "Message" and "could not be recorded" in event["text"]
        ]
    plan = json.loads((tmp_path / "0" / "plan.json").read_text())
    assert (plan["cache"], plan["cuda_graphs"]) == ("gpu", True)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_the_whole_network_trains_in_24_gib() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(24 * GIB / total, 1.0))
    try:
        held: dict[Candidate, int] = {}
        way = Candidate("bf16", True, captured=True)
        seconds = measure(resolve("openkbp").recipe, survey("cuda"), [way], held=held)
        assert way in seconds, "a step of two patches of 128³ was not taken, or not recorded"
        assert held[way] < 24 * GIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
