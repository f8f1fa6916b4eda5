"""Each acceleration on and off: it changes how fast a step is, not what it learns; and what is refused or falls back says so."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from fasttrain import train
from fasttrain.checkpoints import read_checkpoint
from fasttrain.delivery import open_run
from fasttrain.engine.checkpointing import checkpoint_blocks
from fasttrain.engine.optimisation.ema import Ema
from fasttrain.engine.optimisation.optim import build_optimizer
from fasttrain.engine.optimisation.patience import lower_rate, out_of_patience
from fasttrain.engine.run import RunResult, resume
from fasttrain.engine.state import Progress
from fasttrain.engine.step import Precision, Step
from fasttrain.engine.stop import StopRequest
from fasttrain.losses import build_loss
from fasttrain.networks import build_network
from fasttrain.recipe.training_spec import AdamWSpec, DiceCELossSpec, EarlyStoppingSpec, PlateauSchedule, SGDSpec
from fasttrain.samples import Batch
from fasttrain.telemetry.events import Event, Message, StepLogged


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "StepLogged"]


def train_in_two(recipe, data: Path, run: Path, step: int) -> None:
    """Trains a recipe with a stop at a step and a resume."""
    stop = StopRequest()

    class Stopper:
        def on_event(self, event: Event) -> None:
            if isinstance(event, StepLogged) and event.step == step:
                stop.ask("a test", 143)

        def close(self) -> None: ...

    train(recipe, data=data, run=run, device="cpu", observers=[Stopper()], stop=stop)
    resume(run)


SWITCHES = {
    "cache none": {"data__cache__kind": "none"},
    "cache disk": {"data__cache__kind": "disk"},
    "cache lmdb": {"data__cache__kind": "lmdb"},
    "processes": {"data__workers": 2},
    "threads": {"data__workers": 2, "data__worker_kind": "thread"},
    "disk and processes": {"data__cache__kind": "disk", "data__workers": 2},
    "lmdb and threads": {"data__cache__kind": "lmdb", "data__workers": 2, "data__worker_kind": "thread"},
    "prefetch": {"data__workers": 1, "data__prefetch_factor": 5},
    "checkpointing": {"acceleration__activation_checkpointing": "on"},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_these_change_nothing_to_the_bit(name: str, tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path) -> None:
    if "lmdb" in name:
        pytest.importorskip("lmdb")
    folder = {"data__cache__folder": str(tmp_path / "volumes")}
    recipe = tiny(training__epochs=2, schedule=whole_schedule(tiny), **folder, **SWITCHES[name])
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cpu")
    unbroken = train(tiny(training__epochs=2), data=phantoms, run=tmp_path / "plain", device="cpu")
    assert losses(result.run) == losses(unbroken.run)
    assert result.summary["cases"] == unbroken.summary["cases"]


def whole_schedule(tiny) -> dict:
    return tiny().recipe.schedule.model_dump()


CLOSE = {
    # Dropout draws in the order of memory, so that another layout drops other values
    "channels_last": ({"acceleration__channels_last": "on", "network__dropout": 0.0}, 1e-4),
    "optimizer not fused": ({"acceleration__fused_optimizer": "off"}, 1e-4),
    "bf16": ({"acceleration__amp": "bf16"}, 0.05),
}


@pytest.mark.parametrize("name", CLOSE)
def test_these_change_no_more_than_rounding(name: str, tiny, phantoms: Path, tmp_path: Path) -> None:
    settings, tolerance = CLOSE[name]
    dropout = {"network__dropout": settings.get("network__dropout", 0.1)}
    plain = train(tiny(training__epochs=2, **dropout), data=phantoms, run=tmp_path / "plain", device="cpu")
    other = train(tiny(training__epochs=2, **settings), data=phantoms, run=tmp_path / "other", device="cpu")
    assert losses(other.run) == pytest.approx(losses(plain.run), rel=tolerance)
    # A switch that is off everywhere would be as close. In another layout losses may agree to the last bit; gradients do not
    ours, theirs = (read_checkpoint(run / "checkpoints" / "last.pt")["network"] for run in (plain.run, other.run))
    assert any(not torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_moving_window_resumes_where_it_was(workers: int, tiny, phantoms: Path, tmp_path: Path) -> None:
    settings = {
        "data__cache": {"kind": "smart", "cache_cases": 2, "replace_rate": 0.5},
        "data__workers": workers,
        "training__iterations_per_epoch": 3,
    }
    whole = train(tiny(**settings), data=phantoms, run=tmp_path / "whole", device="cpu")
    run = tmp_path / "run"
    train_in_two(tiny(**settings), phantoms, run, step=7)
    assert losses(run) == losses(whole.run)
    assert len(losses(run)) == 12


def test_without_a_set_length_an_epoch_is_a_pass_over_the_window(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(
        data__cache={"kind": "smart", "cache_cases": 3, "replace_rate": 0.5},
        data__samples_per_case=1,
        training__iterations_per_epoch=None,
        training__batch_size=1,
        training__epochs=1,
    )
    assert train(recipe, data=phantoms, run=tmp_path / "run", device="cpu").summary["steps"] == 3


# Activation checkpointing


NETWORKS = [
    {"kind": "unet", "features": [4, 8, 16], "strides": [2, 2], "norm": "batch", "dropout": 0.3},
    {"kind": "dynunet", "features": [4, 8, 8], "strides": [2, 2], "deep_supervision": 1, "dropout": 0.2},
    {"kind": "segresnet", "features": 8},
]


@pytest.mark.parametrize("spec", NETWORKS, ids=lambda spec: spec["kind"])
def test_blocks_computed_again_give_the_same_bits(spec: dict, tiny) -> None:
    if spec["kind"] == "segresnet":
        spec = {"kind": "segresnet"}
    recipe = tiny(network=spec).recipe
    torch.manual_seed(0)
    plain = build_network(recipe.network, recipe.patch.size, 1, 3)
    thrifty = copy.deepcopy(plain)
    assert checkpoint_blocks(thrifty) >= 3
    image = torch.randn(2, 1, *recipe.patch.size)
    for network in (plain, thrifty):
        torch.manual_seed(1)
        network.train()
        output = network(image)
        outputs = output if isinstance(output, list | tuple) else [output]
        sum(one.square().mean() for one in outputs).backward()
    for one, other in zip(plain.parameters(), thrifty.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(plain.buffers(), thrifty.buffers(), strict=True):
        assert torch.equal(one, other)
    assert list(plain.state_dict()) == list(thrifty.state_dict())


def test_blocks_computed_again_keep_less(tiny) -> None:
    recipe = tiny(network=NETWORKS[0], patch__size=[32, 32, 32]).recipe
    kept = []
    for thrifty in (False, True):
        network = build_network(recipe.network, recipe.patch.size, 1, 3).train()
        if thrifty:
            checkpoint_blocks(network)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            network(torch.randn(1, 1, 32, 32, 32))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] * 0.7


# Steps: clipping, averages, the compiler


def made_step(tiny, optimizer=None, **more) -> tuple[Step, Batch]:
    recipe = tiny(network__dropout=0.0).recipe
    torch.manual_seed(0)
    network = build_network(recipe.network, recipe.patch.size, 1, 3)
    batch = Batch(torch.randn(2, 1, 16, 16, 16), torch.randint(0, 3, (2, 1, 16, 16, 16), dtype=torch.uint8), (), ())
    loss = build_loss(DiceCELossSpec(kind="dice_ce"))
    spec = optimizer or SGDSpec(kind="sgd", learning_rate=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)
    ema = Ema(network, more.pop("decay")) if "decay" in more else None
    step = Step(
        network, loss, build_optimizer(spec, network.parameters()), Precision("cpu", None, None), 1, ema=ema, **more
    )
    return step, batch


def moved(step: Step, batch: Batch, rate: float) -> float:
    before = [parameter.detach().clone() for parameter in step.network.parameters()]
    step(iter([batch]), rate)
    after = [parameter.detach() for parameter in step.network.parameters()]
    return math.sqrt(sum(float((one - other).square().sum()) for one, other in zip(before, after, strict=True)))


def test_gradients_are_clipped_to_their_norm(tiny) -> None:
    free, batch = made_step(tiny)
    norm = moved(free, batch, 0.1) / 0.1
    assert norm > 0.05
    clipped, _ = made_step(tiny, clip_norm=norm / 10)
    assert moved(clipped, batch, 0.1) == pytest.approx(0.1 * norm / 10, rel=1e-3)
    loose, _ = made_step(tiny, clip_norm=norm * 10)
    assert moved(loose, batch, 0.1) == pytest.approx(0.1 * norm, rel=1e-4)


def test_a_clipped_step_that_is_not_finite_changes_nothing(tiny) -> None:
    step, batch = made_step(tiny, AdamWSpec(kind="adamw"), clip_norm=1.0, decay=0.9)
    bad = Batch(torch.full_like(batch.image, float("nan")), batch.label, (), ())
    assert moved(step, bad, 0.1) == 0.0
    assert moved(step, batch, 0.1) > 0.0
    assert all(torch.isfinite(value).all() for value in step.ema.network.state_dict().values())


def test_the_average_follows_by_its_rule(tiny) -> None:
    step, batch = made_step(tiny, decay=0.15)
    expected = [parameter.detach().clone() for parameter in step.network.parameters()]
    for number in range(4):
        step(iter([batch]), 0.1, number)
        decay = min(0.15, (1 + number) / (10 + number))
        expected = [
            decay * one + (1 - decay) * new.detach()
            for one, new in zip(expected, step.network.parameters(), strict=True)
        ]
    for one, own in zip(expected, step.ema.network.parameters(), strict=True):
        torch.testing.assert_close(one, own)


def test_the_average_is_scored_saved_resumed_and_predicts(tiny, phantoms: Path, tmp_path: Path) -> None:
    settings = {"training__ema": {"decay": 0.9}, "training__epochs": 2, "training__clip_norm": 12.0}
    whole = train(tiny(**settings), data=phantoms, run=tmp_path / "whole", device="cpu")
    plain = train(tiny(training__epochs=2), data=phantoms, run=tmp_path / "plain", device="cpu")
    assert losses(whole.run) == pytest.approx(losses(plain.run), rel=1e-3)
    state = read_checkpoint(whole.run / "checkpoints/last.pt")
    assert any(not torch.equal(state["ema"][name], state["network"][name]) for name in state["network"])
    run = tmp_path / "run"
    train_in_two(tiny(**settings), phantoms, run, step=4)
    again = read_checkpoint(run / "checkpoints/last.pt")
    assert all(torch.equal(again["ema"][name], state["ema"][name]) for name in state["ema"])
    best = read_checkpoint(whole.run / "checkpoints/best.pt")["ema"]
    used = open_run(whole.run, "cpu").predictor.network.state_dict()
    assert all(torch.equal(best[name], used[name]) for name in best)


def test_a_compiler_that_fails_is_told_and_the_step_is_the_same(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, batch = made_step(tiny)
    expected = float(plain(iter([batch]), 0.1))

    def broken(*_: object, **__: object):
        raise RuntimeError("gcc: not found")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **more: original(module, backend=broken, **more))
    step, _ = made_step(tiny, compiled=True)
    assert float(step(iter([batch]), 0.1)) == expected
    assert step.warning is not None
    assert "torch.compile failed, so the network runs without it" in step.warning
    assert "gcc: not found" in step.warning
    for one, other in zip(plain.network.parameters(), step.network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_fault_of_the_network_is_not_the_compilers(tiny) -> None:
    step, batch = made_step(tiny, compiled=False)
    step._unproved = True
    with pytest.raises(RuntimeError):
        step(iter([Batch(batch.image[:, :, :5], batch.label, (), ())]), 0.1)


def test_a_compiled_step_through_a_backend_that_works(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, batch = made_step(tiny)
    expected = [float(plain(iter([batch]), 0.1)) for _ in range(3)]
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **more: original(module, backend="aot_eager", **more))
    step, _ = made_step(tiny, compiled=True)
    assert [float(step(iter([batch]), 0.1)) for _ in range(3)] == pytest.approx(expected, rel=1e-5)
    assert step.warning is None


# Scores that rise no more


def test_the_rate_falls_as_torchs_plateau_lets_it_fall() -> None:
    scores = [0.1, 0.3, 0.3, 0.29, 0.3, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.6] + [0.2] * 12
    spec = PlateauSchedule(kind="plateau", factor=0.5, patience=3, threshold=0.01, least=0.1)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    # torch waits for one validation more than its `patience`
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max", factor=0.5, patience=2, threshold=0.01, threshold_mode="abs", min_lr=0.1
    )
    progress, own, reference = Progress(), [], []
    for score in scores:
        lower_rate(spec, progress, score)
        theirs.step(score)
        own.append(progress.rate_factor)
        reference.append(optimizer.param_groups[0]["lr"])
    assert own == pytest.approx(reference)
    assert own[-1] == 0.125 or own[-1] == pytest.approx(0.1)


def test_patience_counts_validations_without_a_rise() -> None:
    spec, progress = EarlyStoppingSpec(patience=3, threshold=0.01), Progress()
    ends = [out_of_patience(spec, progress, score) for score in (0.1, 0.2, 0.205, 0.19, 0.3, 0.3, 0.3, 0.3)]
    assert ends == [False] * 7 + [True]


class Heard:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Message):
            self.messages.append(event.text)

    def close(self) -> None: ...


def test_a_run_whose_score_rises_no_more_ends_as_done(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(
        training__epochs=30,
        training__iterations_per_epoch=1,
        training__early_stopping={"patience": 2, "threshold": 0.9},
    )
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cpu")
    assert (result.exit_code, result.summary["status"], result.summary["epochs"]) == (0, "done", 3)
    assert result.summary["stopped_by"] == "early stopping, no better for 2 validations"
    assert resume(tmp_path / "run").summary == result.summary


def test_a_plateau_lowers_the_rate_and_a_resume_knows_it(tiny, phantoms: Path, tmp_path: Path) -> None:
    heard = Heard()
    settings = {
        "schedule": {"kind": "plateau", "factor": 0.1, "patience": 1, "threshold": 0.9},
        "training__epochs": 4,
        "training__iterations_per_epoch": 2,
    }
    whole = train(tiny(**settings), data=phantoms, run=tmp_path / "whole", device="cpu", observers=[heard])
    assert len([text for text in heard.messages if "the learning rate is now" in text]) == 3
    state = read_checkpoint(whole.run / "checkpoints/last.pt")
    assert state["progress"]["rate_factor"] == pytest.approx(1e-3)
    run = tmp_path / "run"
    train_in_two(tiny(**settings), phantoms, run, step=5)
    assert losses(run) == losses(whole.run)
