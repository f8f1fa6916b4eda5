"""The step and its parts: accumulation, steps that are not finite, schedules, the measurement."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fasttrain.engine.optimisation.optim import build_optimizer, learning_rate
from fasttrain.engine.planning.choices import choose_step
from fasttrain.engine.planning.sizes import sizes_of
from fasttrain.engine.planning.trial import Candidate, least_seconds, measure
from fasttrain.engine.state import TrainState
from fasttrain.engine.step import Precision, Step
from fasttrain.engine.trainer import MOST_BAD_STEPS_IN_A_ROW, Trainer
from fasttrain.errors import DivergedError
from fasttrain.losses import build_loss
from fasttrain.machine.hardware import Hardware
from fasttrain.recipe.training_spec import (
    AdamWSpec,
    ConstantSchedule,
    CosineSchedule,
    CrossEntropyLossSpec,
    PolySchedule,
    SGDSpec,
)
from fasttrain.samples import Batch
from fasttrain.telemetry.events import Event, Message, Progress

PLAIN = Precision("cpu", None, None)
OPTIMIZERS = [
    AdamWSpec(kind="adamw", learning_rate=1e-2),
    SGDSpec(kind="sgd", learning_rate=1e-2, momentum=0.9, nesterov=True),
]


def network(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 4, 3, padding=1), *([nn.BatchNorm3d(4)] if norm else []), nn.ReLU(), nn.Conv3d(4, 2, 1)]
    return nn.Sequential(*layers)


def batch(seed: int, count: int = 2, value: float | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(count, 1, 6, 6, 6, generator=generator)
    if value is not None:
        image[0, 0, 0, 0, 0] = value
    label = (image > 0).to(torch.uint8)
    return Batch(image, label, tuple(range(count)), ("case",) * count)


def step_of(net: nn.Module, spec=OPTIMIZERS[0], accumulate: int = 1) -> Step:
    loss = build_loss(CrossEntropyLossSpec(kind="cross_entropy"))
    return Step(net, loss, build_optimizer(spec, net.parameters()), PLAIN, accumulate)


class Forever:
    """A source that gives batches from a function of the position."""

    waited_for = True

    def __init__(self, make) -> None:
        self.make = make

    def batches(self, first_position: int):
        position = first_position
        while True:
            made = self.make(position)
            yield made
            position += made.image.shape[0]

    def close(self) -> None: ...


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.kind)
def test_two_accumulated_batches_are_one_of_twice_the_size(spec) -> None:
    one, two = network(norm=False), network(norm=False)
    first, second = batch(1), batch(2)
    both = Batch(torch.cat([first.image, second.image]), torch.cat([first.label, second.label]), (), ())
    loss_one = step_of(one, spec)(iter([both]), 1e-2)
    loss_two = step_of(two, spec, accumulate=2)(iter([first, second]), 1e-2)
    assert float(loss_one) == pytest.approx(float(loss_two), abs=1e-6)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.kind)
def test_a_short_step_weighs_its_batches_by_their_samples(spec) -> None:
    """Two and one of them, in a step that otherwise takes four batches of two."""
    one, two = network(norm=False), network(norm=False)
    first, second = batch(1), batch(2, count=1)
    both = Batch(torch.cat([first.image, second.image]), torch.cat([first.label, second.label]), (), ())
    whole = step_of(one, spec)(iter([both]), 1e-2)
    step = step_of(two, spec, accumulate=4)
    assert float(step.short([first, second], 1e-2)) == pytest.approx(float(whole), abs=1e-6)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    # The next one is whole again
    batches = iter([batch(seed) for seed in range(3, 8)])
    step(batches, 1e-2)
    assert torch.equal(next(batches).image, batch(7).image)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.kind)
def test_a_step_that_is_not_finite_changes_nothing(spec, value: float) -> None:
    net = network(norm=True)
    step = step_of(net, spec)
    step(iter([batch(1)]), 1e-2)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items() if "num_batches" not in name}
    momentum = [{key: value.clone() for key, value in state.items()} for state in step.optimizer.state.values()]
    assert not math.isfinite(float(step(iter([batch(2, value=value)]), 1e-2)))
    for name, tensor in before.items():
        assert torch.equal(tensor, net.state_dict()[name]), name
    for old, new in zip(momentum, step.optimizer.state.values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert int(step.bad_streak) == 1
    # The next good step trains as ever
    assert math.isfinite(float(step(iter([batch(3)]), 1e-2)))
    assert int(step.bad_streak) == 0
    assert not torch.equal(before["0.weight"], net.state_dict()["0.weight"])


def trainer_over(make, steps: int) -> Trainer:
    state = TrainState(step_of(network(norm=True)))
    return Trainer(state, Forever(make), lambda _: 1e-2, steps)


def test_twenty_bad_losses_in_a_row_stop_the_run() -> None:
    trainer = trainer_over(lambda position: batch(position, value=float("nan")), MOST_BAD_STEPS_IN_A_ROW)
    for _ in trainer.steps():
        pass
    with pytest.raises(DivergedError, match="20 losses in a row"):
        trainer.settle()
    assert trainer.state.finite()


class Exploding(nn.Module):
    """A finite loss whose gradient is not: the square root at zero."""

    def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (logits * 0).sum().sqrt() + 1


def test_gradients_that_are_never_finite_stop_the_run_too() -> None:
    net = network(norm=False)
    state = TrainState(Step(net, Exploding(), build_optimizer(OPTIMIZERS[0], net.parameters()), PLAIN, 1))
    trainer = Trainer(state, Forever(batch), lambda _: 1e-2, MOST_BAD_STEPS_IN_A_ROW)
    assert all(float(report.loss) == 1.0 for report in trainer.steps())
    with pytest.raises(DivergedError):
        trainer.settle()


def test_nineteen_bad_losses_and_a_good_one_do_not() -> None:
    bad = MOST_BAD_STEPS_IN_A_ROW - 1
    trainer = trainer_over(
        lambda position: batch(position, value=float("nan") if position // 2 % (bad + 1) < bad else None), 3 * (bad + 1)
    )
    for _ in trainer.steps():
        pass
    assert math.isfinite(trainer.settle())
    assert trainer.state.progress.loss_count == 3


def test_progress_is_right_between_any_two_reports() -> None:
    trainer = trainer_over(batch, 4)
    seen = [(report.step, trainer.state.progress.step, trainer.state.progress.position) for report in trainer.steps()]
    assert seen == [(1, 1, 2), (2, 2, 4), (3, 3, 6), (4, 4, 8)]


@settings(max_examples=80, deadline=None)
@given(
    total=st.integers(1, 500),
    warmup=st.floats(0, 1),
    spec=st.sampled_from(["constant", "poly", "cosine"]),
    final=st.floats(0, 1),
)
def test_a_learning_rate_rises_to_its_peak_and_never_above(total: int, warmup: float, spec: str, final: float) -> None:
    made = {
        "constant": ConstantSchedule(kind="constant", warmup=warmup),
        "poly": PolySchedule(kind="poly", warmup=warmup),
        "cosine": CosineSchedule(kind="cosine", warmup=warmup, final=final),
    }[spec]
    rates = [learning_rate(made, 0.1, total)(step) for step in range(total)]
    assert all(0 <= rate <= 0.1 + 1e-12 for rate in rates)
    peak = max(range(total), key=lambda step: rates[step])
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(rates[: peak + 1]))
    assert all(a + 1e-12 >= b for a, b in itertools.pairwise(rates[peak:]))


def test_learning_rates_by_hand() -> None:
    cosine = learning_rate(CosineSchedule(kind="cosine", warmup=0.1, final=0.0), 1.0, 100)
    assert [cosine(step) for step in (0, 4, 9, 10, 55)] == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5])
    poly = learning_rate(PolySchedule(kind="poly", power=0.9), 0.01, 1000)
    assert poly(500) == pytest.approx(0.01 * 0.5**0.9)
    assert learning_rate(ConstantSchedule(kind="constant"), 0.2, 10)(9) == 0.2


def test_an_epoch_is_a_pass_in_whole_steps(tiny) -> None:
    recipe = tiny(training__iterations_per_epoch=None, training__batch_size=3, data__samples_per_case=2).recipe
    assert sizes_of(recipe, (4, 2, 0), 0).steps_per_epoch == 3  # 8 patches in steps of 3
    assert sizes_of(tiny(training__accumulate=2).recipe, (4, 2, 0), 0).effective_batch == 4


def test_the_measurement_leaves_the_generators_as_they_were(tiny) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    candidates = [Candidate("off", True), Candidate("off", False)]
    seconds = measure(tiny().recipe, Hardware("cpu", "a CPU", 1, 8.0), candidates)
    assert torch.equal(before, torch.get_rng_state())
    assert set(seconds) == set(candidates)
    assert all(value > 0 for value in seconds.values())


class Scripted:
    """A timer that returns given seconds, the last of them for ever, and notes that it was called."""

    def __init__(self, name: str, seconds: list[float], calls: list[str]) -> None:
        self.name, self.seconds, self.calls, self.count = name, seconds, calls, 0

    def __call__(self) -> float:
        self.calls.append(self.name)
        self.count += 1
        return self.seconds[min(self.count, len(self.seconds)) - 1]


def rounds_of(budget: float = 8.0, **script: list[float]) -> tuple[dict[str, float], list[str]]:
    calls: list[str] = []
    timers = {name: Scripted(name, seconds, calls) for name, seconds in script.items()}
    return least_seconds(timers, budget), calls


def test_a_burst_of_load_in_one_round_changes_no_choice() -> None:
    """Measured one after the other, the burst would have hit all of one candidate and none of the other."""
    for burst in range(3):
        slow = [4.0 if number == burst else 1.0 for number in range(6)]
        least, calls = rounds_of(a=slow, b=[4 * seconds * 1.5 for seconds in slow])
        assert least == {"a": 1.0, "b": 6.0}
        assert calls[:4] == ["a", "b", "a", "b"]


def test_a_candidate_that_is_hopeless_in_two_rounds_is_dropped_and_one_burst_drops_none() -> None:
    least, calls = rounds_of(a=[0.1], hopeless=[0.9], unlucky=[0.9, 0.08])
    assert calls.count("hopeless") == 2
    assert calls.count("unlucky") == 6
    assert min(least, key=lambda name: least[name]) == "unlucky"
    assert least["hopeless"] == 0.9


def test_the_budget_bounds_the_rounds_and_three_are_taken_whatever_they_cost() -> None:
    assert len(rounds_of(budget=8.0, a=[10.0], b=[11.0])[1]) == 6
    assert len(rounds_of(budget=8.0, a=[0.5], b=[0.5])[1]) == 12
    assert len(rounds_of(budget=8.0, a=[1.0], b=[1.0])[1]) == 8


def test_a_measurement_is_announced_before_it_and_counted(tiny) -> None:
    events: list[Event] = []
    recipe = tiny(acceleration__amp="auto").recipe
    choose_step(recipe, Hardware("cpu", "a CPU", 1, 8.0), None, events.append)
    assert events[0] == Message("measuring a training step in 2 ways on a CPU: bf16 NCDHW, float32 NCDHW")
    counts = [(event.done, event.total) for event in events[1:]]
    assert all(isinstance(event, Progress) for event in events[1:])
    assert [done for done, _ in counts] == list(range(len(counts)))
    assert all(done < total for done, total in counts)
    events.clear()
    choose_step(tiny().recipe, Hardware("cpu", "a CPU", 1, 8.0), None, events.append)
    assert events == []  # nothing is open, so nothing is measured
