"""The same runs on a GPU."""

import json
from pathlib import Path

import pytest
import torch

from fasttrain import train
from fasttrain.batches import LoaderSource, Order
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.delivery import open_run
from fasttrain.engine.run import resume
from fasttrain.engine.stop import StopRequest
from fasttrain.telemetry.events import Event, StepLogged
from fasttrain.telemetry.metrics_csv import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "StepLogged"]


@pytest.mark.parametrize("amp", ["off", "fp16", "bf16", "auto"])
@pytest.mark.parametrize("layout", ["on", "off"])
def test_every_precision_and_layout_trains(amp: str, layout: str, tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(acceleration__amp=amp, acceleration__channels_last=layout, training__epochs=6)
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cuda")
    found = losses(result.run)
    assert len(found) == 30
    assert all(loss == loss for loss in found)
    assert sum(found[-5:]) < sum(found[:5])
    row = read_metrics(result.run / "metrics.csv")[-1]
    assert row["gpu_gib"] is not None


def test_a_resume_on_a_gpu_goes_on_as_an_unbroken_run(tiny, phantoms: Path, tmp_path: Path) -> None:
    class StopAtSeven:
        def __init__(self, stop: StopRequest) -> None:
            self.stop = stop

        def on_event(self, event: Event) -> None:
            if isinstance(event, StepLogged) and event.step == 7:
                self.stop.ask("a test", 143)

        def close(self) -> None: ...

    recipe = tiny(network__dropout=0.0)
    whole = train(recipe, data=phantoms, run=tmp_path / "whole", device="cuda")
    again = train(recipe, data=phantoms, run=tmp_path / "again", device="cuda")
    stop = StopRequest()
    train(recipe, data=phantoms, run=tmp_path / "broken", device="cuda", stop=stop, observers=[StopAtSeven(stop)])
    broken = resume(tmp_path / "broken")
    unbroken = torch.tensor(losses(whole.run))
    noise = (torch.tensor(losses(again.run)) - unbroken).abs().max()
    assert (torch.tensor(losses(broken.run)) - unbroken).abs().max() <= max(3 * float(noise), 1e-3)


def test_batches_are_those_of_the_cpu(tiny, phantoms: Path) -> None:
    """Draws and order are identical; what a device computes differs in the last digits, its noise fields altogether."""
    recipe = tiny(training__batch_size=4).recipe
    found = find_cases(recipe.data, phantoms).cases
    made = []
    for device, workers in (("cpu", 0), ("cuda", 0), ("cuda", 2)):
        cases = open_case_source("memory", found, Preprocess(recipe), 2)
        source = LoaderSource(recipe, cases, Order(len(cases), 1, 0), torch.device(device), workers, True)
        stream = source.batches(4)
        made.append([next(stream) for _ in range(3)])
        source.close()
    for cpu, alone, helped in zip(*made, strict=True):
        assert cpu.positions == alone.positions == helped.positions
        assert torch.equal(alone.image, helped.image)
        assert torch.equal(alone.label, helped.label)
        assert torch.allclose(cpu.image, alone.image.cpu(), atol=1e-4)
        assert (cpu.label != alone.label.cpu()).float().mean() < 1e-3


def test_a_gpu_predicts_what_a_cpu_predicts(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(acceleration__tf32="off", training__epochs=8)
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cuda")
    found = find_cases(recipe.recipe.data, phantoms).cases
    preprocess = Preprocess(recipe.recipe, training=False)
    sample = preprocess.as_sample(preprocess(found[0]))
    maps = [open_run(result.run, device).predictor.class_map(sample, True).cpu() for device in ("cpu", "cuda")]
    assert (maps[0] == maps[1]).float().mean() > 0.999
