"""Optimisers and schedules: MONAI's and torch's numbers, steps left out on the device, state through a checkpoint."""

from __future__ import annotations

import copy
import io
import typing

import pytest
import torch
from monai.optimizers import Novograd
from torch import nn

from fasttrain.engine.optimisation.novograd import DeviceNovograd
from fasttrain.engine.optimisation.optim import OPTIMIZERS, build_optimizer, learning_rate
from fasttrain.engine.step import Precision, Step, takes_flag
from fasttrain.losses import build_loss
from fasttrain.recipe.training_spec import (
    AdamSpec,
    AdamWSpec,
    CrossEntropyLossSpec,
    MuonSpec,
    NovogradSpec,
    OneCycleSchedule,
    OptimizerSpec,
    SGDSpec,
)
from fasttrain.samples import Batch

SPECS: dict[str, OptimizerSpec] = {
    "sgd": SGDSpec(kind="sgd"),
    "adamw": AdamWSpec(kind="adamw"),
    "adam": AdamSpec(kind="adam", weight_decay=1e-2),
    "novograd": NovogradSpec(kind="novograd", weight_decay=1e-3, grad_averaging=True),
    "muon": MuonSpec(kind="muon"),
}
every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 2, 1))


def batch(seed: int, value: float | None = None) -> Batch:
    image = torch.randn(2, 1, 6, 6, 6, generator=torch.Generator().manual_seed(seed))
    label = (image > 0).to(torch.uint8)
    if value is not None:
        image[0, 0, 0, 0, 0] = value
    return Batch(image, label, (0, 1), ("case", "case"))


def step_of(net: nn.Module, spec: OptimizerSpec) -> Step:
    loss = build_loss(CrossEntropyLossSpec(kind="cross_entropy"))
    return Step(net, loss, build_optimizer(spec, net.parameters(), True), Precision("cpu", None, None), 1)


def tensors_of(step: Step) -> list[torch.Tensor]:
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    return [*step.network.parameters(), *(torch.as_tensor(value) for value in states)]


def test_every_optimiser_of_the_recipe_is_built() -> None:
    union, _ = typing.get_args(OptimizerSpec)
    kinds = {typing.get_args(spec.model_fields["kind"].annotation)[0] for spec in typing.get_args(union)}
    assert set(OPTIMIZERS) == kinds == set(SPECS)


@every
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_that_is_not_finite_changes_nothing(spec: OptimizerSpec, value: float, first: bool) -> None:
    step = step_of(network(), spec)
    if not first:
        step(iter([batch(1)]), 1e-2)
    before = [tensor.clone() for tensor in tensors_of(step)]
    assert takes_flag(step.optimizer)
    step(iter([batch(2, value)]), 1e-2)
    after = tensors_of(step)
    # In the very first step the state is made: zeros, as if it had not been taken
    grown = [tensor for tensor in after[len(before) :] if tensor.any()]
    assert not grown
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=False))
    step(iter([batch(3)]), 1e-2)
    assert not torch.equal(before[0], tensors_of(step)[0])


@every
def test_a_skipped_step_leaves_no_trace_in_later_ones(spec: OptimizerSpec) -> None:
    one, other = step_of(network(), spec), step_of(network(), spec)
    for seed in (1, 2, 3):
        one(iter([batch(seed)]), 1e-2)
        other(iter([batch(9, float("nan"))]), 1e-2)
        other(iter([batch(seed)]), 1e-2)
    for a, b in zip(one.network.parameters(), other.network.parameters(), strict=True):
        assert torch.equal(a, b)


@every
def test_the_state_survives_a_checkpoint(spec: OptimizerSpec) -> None:
    whole, broken = step_of(network(), spec), step_of(network(), spec)
    for seed in (1, 2):
        whole(iter([batch(seed)]), 1e-2)
        broken(iter([batch(seed)]), 1e-2)
    file = io.BytesIO()
    torch.save({"network": broken.network.state_dict(), "optimizer": broken.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = step_of(network(seed=5), spec)
    resumed.network.load_state_dict(saved["network"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    for seed in (3, 4):
        assert torch.equal(whole(iter([batch(seed)]), 1e-2), resumed(iter([batch(seed)]), 1e-2))
    for a, b in zip(tensors_of(whole), tensors_of(resumed), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("grad_averaging", [False, True])
def test_novograd_is_monais(weight_decay: float, grad_averaging: bool) -> None:
    # Without a norm: the gradient of a bias before one is rounding noise, which Novograd would bring to full size
    torch.manual_seed(0)
    start = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 1))
    ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
    settings = {"lr": 0.02, "betas": (0.9, 0.7), "weight_decay": weight_decay, "grad_averaging": grad_averaging}
    pairs = [(ours, DeviceNovograd(ours.parameters(), **settings)), (theirs, Novograd(theirs.parameters(), **settings))]
    for seed in range(5):
        made = batch(seed)
        for net, optimizer in pairs:
            optimizer.zero_grad()
            loss = build_loss(CrossEntropyLossSpec(kind="cross_entropy"))(net(made.image), made.label)
            (0.0 * loss if seed == 0 else loss).backward()  # a first gradient of zero begins no running norm
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.equal(next(ours.parameters()), next(start.parameters()))


def test_the_first_step_of_sgd_is_torchs() -> None:
    """Momentum buffers of zeros from the start are what torch makes of a first gradient."""
    ours, theirs = network(), network()
    spec = SGDSpec(kind="sgd", momentum=0.9, nesterov=True)
    step = step_of(ours, spec)
    reference = torch.optim.SGD(
        theirs.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=spec.weight_decay
    )
    for seed in range(3):
        made = batch(seed)
        step(iter([made]), 1e-2)
        reference.zero_grad()
        build_loss(CrossEntropyLossSpec(kind="cross_entropy"))(theirs(made.image), made.label).backward()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_novograd_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = DeviceNovograd([weight], lr=0.5, betas=(0.5, 0.75), eps=0.0)
    for gradient in ([3.0, 4.0], [0.0, 10.0]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        assert weight.grad.tolist() == gradient
    # norms² 25, then 0.75 × 25 + 0.25 × 100 = 43.75; averages (0.6, 0.8), then half of that and the gradient / √43.75
    second = (0.3, 0.4 + 10 / 43.75**0.5)
    expected = [1 - 0.5 * (0.6 + second[0]), 2 - 0.5 * (0.8 + second[1])]
    assert weight.tolist() == pytest.approx(expected, abs=1e-6)


def test_novograd_divides_by_the_scale_of_a_gradient_scaler() -> None:
    plain, scaled = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    optimizers = [DeviceNovograd([weight], lr=0.1) for weight in (plain, scaled)]
    plain.grad, scaled.grad = torch.tensor([3.0, 4.0]), 1024 * torch.tensor([3.0, 4.0])
    optimizers[1].grad_scale = torch.tensor(1024.0)
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(plain, scaled)
    with pytest.raises(ValueError, match="no closure"):
        optimizers[0].step(lambda: 1.0)


def test_novograd_leaves_weights_without_a_gradient_alone() -> None:
    frozen, free = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = DeviceNovograd([frozen, free], lr=0.1, weight_decay=0.1)
    optimizer.step()
    free.grad = torch.ones(2)
    optimizer.step()
    assert frozen.tolist() == [1, 1]
    assert not torch.equal(free, torch.ones(2))
    assert frozen not in optimizer.state


@pytest.mark.parametrize("spec", [SPECS["adam"]])
def test_adam_adds_its_decay_to_the_gradient(spec: AdamSpec) -> None:
    ours, theirs = network(), network()
    step = step_of(ours, spec)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2, weight_decay=spec.weight_decay)
    for seed in range(3):
        made = batch(seed)
        step(iter([made]), 1e-2)
        reference.zero_grad()
        build_loss(CrossEntropyLossSpec(kind="cross_entropy"))(theirs(made.image), made.label).backward()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("total", [2, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.3, 0.55, 1.0])
@pytest.mark.parametrize(("start", "end"), [(25.0, 1e4), (10.0, 1.0)])
def test_one_cycle_is_torchs(total: int, warmup: float, start: float, end: float) -> None:
    spec = OneCycleSchedule(kind="one_cycle", warmup=warmup, start_divisor=start, end_divisor=end)
    ours = learning_rate(spec, 0.2, total)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=0.2,
        total_steps=total,
        pct_start=warmup,
        div_factor=start,
        final_div_factor=end,
        cycle_momentum=False,
    )
    for step in range(total):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-15), step
        optimizer.step()
        if step < total - 1:
            theirs.step()


def test_one_cycle_by_hand_and_at_its_edges() -> None:
    ours = learning_rate(OneCycleSchedule(kind="one_cycle", warmup=0.5, start_divisor=10, end_divisor=100), 1.0, 10)
    assert [ours(step) for step in (0, 2, 4, 9)] == pytest.approx([0.1, 0.55, 1.0, 0.001])
    # A rise of one step, on which torch divides by zero, and steps beyond the last
    assert learning_rate(OneCycleSchedule(kind="one_cycle", warmup=0.5), 1.0, 2)(0) == 1.0
    assert ours(10) == ours(9)


def test_a_copied_optimiser_state_is_plain() -> None:
    """`weights_only` loading wants tensors and plain values; MONAI's count of steps would come back on the host."""
    step = step_of(network(), SPECS["novograd"])
    step(iter([batch(1)]), 1e-2)
    for state in copy.deepcopy(step.optimizer.state_dict())["state"].values():
        assert set(state) == {"exp_avg", "exp_avg_sq"}
        assert all(isinstance(value, torch.Tensor) for value in state.values())
