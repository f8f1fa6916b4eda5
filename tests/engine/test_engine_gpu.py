"""The same runs on a GPU."""

import json
import time
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from fasttrain import train
from fasttrain.batches import LoaderSource, Loading, Order
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.delivery import open_run
from fasttrain.engine.optimisation.ema import Ema
from fasttrain.engine.optimisation.optim import build_optimizer
from fasttrain.engine.run import resume
from fasttrain.engine.state import TrainState
from fasttrain.engine.step import Precision, Step
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.trainer import Trainer
from fasttrain.errors import OutOfMemoryError
from fasttrain.losses import build_loss
from fasttrain.recipe.training_spec import AdamWSpec, CrossEntropyLossSpec, OptimizerSpec, SGDSpec
from fasttrain.samples import Batch
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
    """Draws and order are identical; what a device computes differs in the last digits (noise fields altogether: none here)."""
    recipe = tiny(training__batch_size=4, augment__noise=None).recipe
    found = find_cases(recipe.data, phantoms).cases
    made = []
    for device, workers in (("cpu", 0), ("cuda", 0), ("cuda", 2)):
        cases = open_case_source("memory", found, Preprocess(recipe), 2)
        source = LoaderSource(
            recipe, cases, Order(len(cases), 1, 0), torch.device(device), Loading(workers, pin_memory=True)
        )
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


def test_cuts_before_augmentation_are_the_cpus_bit_for_bit(tiny, phantoms: Path) -> None:
    """From any position on, with pinned memory and workers or without: what a resume goes on with."""
    recipe = tiny(training__batch_size=4, augment={}).recipe
    found = find_cases(recipe.data, phantoms).cases
    for position in (0, 8):
        made = []
        for device, workers, pinned in (("cpu", 0, False), ("cuda", 0, False), ("cuda", 2, True)):
            cases = open_case_source("memory", found, Preprocess(recipe), 2)
            source = LoaderSource(
                recipe, cases, Order(len(cases), 1, 0), torch.device(device), Loading(workers, pin_memory=pinned)
            )
            stream = source.batches(position)
            made.append([next(stream) for _ in range(3)])
            source.close()
        for cpu, alone, helped in zip(*made, strict=True):
            assert cpu.positions == alone.positions == helped.positions
            assert cpu.names == alone.names == helped.names
            for other in (alone, helped):
                assert torch.equal(cpu.image, other.image.cpu())
                assert torch.equal(cpu.label, other.label.cpu())


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=["float32", "fp16", "bf16"])
@pytest.mark.parametrize("spec", [AdamWSpec(kind="adamw"), SGDSpec(kind="sgd")], ids=["adamw", "sgd"])
def test_a_step_that_is_not_finite_changes_nothing_on_a_gpu(dtype: torch.dtype | None, spec) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.BatchNorm3d(4), torch.nn.ReLU(), torch.nn.Conv3d(4, 2, 1)
    ).cuda()
    loss = build_loss(CrossEntropyLossSpec(kind="cross_entropy"))
    step = Step(net, loss, build_optimizer(spec, net.parameters()), Precision("cuda", dtype, None), 1)

    def batch(bad: bool) -> Batch:
        image = torch.randn(2, 1, 8, 8, 8, device="cuda")
        label = (image > 0).to(torch.uint8)
        if bad:
            image[0, 0, 0, 0, 0] = float("inf")
        return Batch(image, label, (0, 1), ("case", "case"))

    for _ in range(20):  # until fp16's loss scale has settled
        step(iter([batch(False)]), 1e-3)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items() if "num_batches" not in name}
    assert not torch.isfinite(step(iter([batch(True)]), 1e-3))
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in before.items())
    assert int(step.bad_streak) == 1
    step(iter([batch(False)]), 1e-3)
    step(iter([batch(False)]), 1e-3)
    assert not torch.equal(before["0.weight"], net.state_dict()["0.weight"])
    assert int(step.bad_streak) == 0


def test_a_resume_goes_on_with_the_cpus_order(tiny, phantoms: Path, tmp_path: Path) -> None:
    """The first step after a resume sees the batch of an unbroken run: in float32 its loss is that of a CPU's run too."""
    recipe = tiny(acceleration__tf32="off", network__dropout=0.0, augment={}, training__epochs=2)
    on_cpu = train(recipe, data=phantoms, run=tmp_path / "cpu", device="cpu")
    stop = StopRequest()

    class StopAtFour:
        def on_event(self, event: Event) -> None:
            if isinstance(event, StepLogged) and event.step == 4:
                stop.ask("a test", 143)

        def close(self) -> None: ...

    train(recipe, data=phantoms, run=tmp_path / "gpu", device="cuda", stop=stop, observers=[StopAtFour()])
    resume(tmp_path / "gpu")
    assert losses(tmp_path / "gpu") == pytest.approx(losses(on_cpu.run), rel=1e-2)


@pytest.mark.parametrize(
    "settings",
    [
        {"data__copy_stream": "off"},
        {"data__copy_stream": "on", "data__pin_memory": "off"},
        {"data__worker_kind": "thread", "data__workers": 2},
        {"data__workers": 2},
        {"data__cache__kind": "none"},
        {"acceleration__expandable_segments": "off"},
    ],
    ids=str,
)
def test_how_batches_come_changes_no_loss(settings: dict, tiny, phantoms: Path, tmp_path: Path) -> None:
    deterministic = {"acceleration__tf32": "off", "network__dropout": 0.0, "training__epochs": 2}
    plain = train(tiny(**deterministic), data=phantoms, run=tmp_path / "plain", device="cuda")
    other = train(tiny(**deterministic, **settings), data=phantoms, run=tmp_path / "other", device="cuda")
    assert losses(other.run) == pytest.approx(losses(plain.run), rel=2e-3)


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_compiled_and_recomputed_steps_learn_the_same(amp: str, tiny, phantoms: Path, tmp_path: Path) -> None:
    shared = {"acceleration__amp": amp, "acceleration__tf32": "off", "network__dropout": 0.0, "training__epochs": 2}
    plain = train(tiny(**shared), data=phantoms, run=tmp_path / "plain", device="cuda")
    for name, settings in (
        ("compiled", {"acceleration__compile": "on"}),
        ("recomputed", {"acceleration__activation_checkpointing": "on"}),
        ("both", {"acceleration__compile": "on", "acceleration__activation_checkpointing": "on"}),
    ):
        other = train(tiny(**shared, **settings), data=phantoms, run=tmp_path / name, device="cuda")
        tolerance = 2e-3 if amp == "off" else 5e-2
        assert losses(other.run) == pytest.approx(losses(plain.run), rel=tolerance), name


def test_no_memory_for_a_step_is_a_sentence_or_activation_checkpointing(tiny, phantoms: Path, tmp_path: Path) -> None:
    from fasttrain.engine.planning.choices import choose_step
    from fasttrain.machine.hardware import survey

    hardware = survey("cuda")
    huge = tiny(training__batch_size=1_000_000, acceleration__activation_checkpointing="auto").recipe
    with pytest.raises(OutOfMemoryError, match="do not fit into the .* GiB that .* has free"):
        choose_step(huge, hardware, None)
    assert torch.cuda.memory_allocated() < 1 << 30
    fits = choose_step(tiny(training__batch_size=2).recipe, hardware, None)
    assert not fits.checkpointing
    assert fits.seconds is not None


class OneBatch:
    """The same batch for ever, on the device from the start."""

    waited_for = False

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def batches(self, first_position: int):
        while True:
            yield self.batch

    def close(self) -> None: ...


def deep(width: int = 64) -> torch.nn.Module:
    """Much to compute for few launches."""
    layers = [torch.nn.Conv3d(width if number else 1, width, 3, padding=1) for number in range(6)]
    return torch.nn.Sequential(*layers, torch.nn.Conv3d(width, 3, 1)).cuda()


@pytest.mark.parametrize("captured", [False, True])
def test_an_epochs_seconds_are_those_of_the_device(captured: bool) -> None:
    """The host is many steps ahead when it has launched the last one of an epoch."""
    network = deep()
    image = torch.randn(2, 1, 48, 48, 48, device="cuda")
    batch = Batch(image, (image > 0).to(torch.uint8), (), ())
    step = Step(
        network,
        build_loss(CrossEntropyLossSpec(kind="cross_entropy")),
        build_optimizer(AdamWSpec(kind="adamw"), network.parameters()),
        Precision("cuda", None, None),
        1,
        captured=captured,
    )
    trainer = Trainer(TrainState(step), OneBatch(batch), lambda _: 1e-4, 40)
    for _ in trainer.steps():
        pass
    trainer.settle()
    trainer.begin_epoch()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in trainer.steps():
        pass
    trainer.settle()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    assert trainer.state.progress.epoch_seconds > 0.9 * took
    assert trainer.state.progress.epoch_seconds < 1.01 * took


@pytest.mark.parametrize("optimizer", [{"kind": "sgd"}, {"kind": "adamw"}, {"kind": "adam"}, {"kind": "novograd"}])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_a_recorded_step_is_the_step(optimizer: dict, dtype: torch.dtype | None) -> None:
    """Weights, average, learning rate and skipped steps as kernel by kernel."""
    torch.backends.cudnn.allow_tf32 = False
    outcomes = []
    for captured in (False, True):
        torch.manual_seed(0)
        layers = [
            torch.nn.Conv3d(1, 8, 3, padding=1),
            torch.nn.BatchNorm3d(8),
            torch.nn.ReLU(),
            torch.nn.Conv3d(8, 3, 1),
        ]
        network = torch.nn.Sequential(*layers).cuda()
        spec = TypeAdapter(OptimizerSpec).validate_python(optimizer)
        step = Step(
            network,
            build_loss(CrossEntropyLossSpec(kind="cross_entropy")),
            build_optimizer(spec, network.parameters()),
            Precision("cuda", dtype, None),
            2,
            clip_norm=1.0,
            ema=Ema(network, 0.9),
            captured=captured,
        )
        generator = torch.Generator().manual_seed(1)
        losses = []
        for number in range(12):
            images = [torch.randn(2, 1, 12, 12, 12, generator=generator).cuda() for _ in range(2)]
            if number == 7:
                images[1][0, 0, 0, 0, 0] = float("nan")
            batches = [Batch(image, (image > 0).to(torch.uint8), (), ()) for image in images]
            losses.append(float(step(iter(batches), 1e-2 / (number + 1), number)))
        assert step.warning is None
        assert step.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 12)
        kept = [[p.detach().clone() for p in one.parameters()] for one in (network, step.ema.network)]
        outcomes.append((losses, *kept))
    (losses, weights, average), (other_losses, other_weights, other_average) = outcomes
    for found in (losses, other_losses):
        assert [value == value for value in found] == [number != 7 for number in range(12)]
    assert torch.allclose(torch.tensor(losses), torch.tensor(other_losses), rtol=2e-3, equal_nan=True)
    for one, other in zip([*weights, *average], [*other_weights, *other_average], strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=2e-3)
