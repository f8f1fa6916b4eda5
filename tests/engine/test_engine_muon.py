"""Muon: what it makes of filters, that the rest is AdamW, that a step can be left out on the device and recorded as a graph."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

from fasttrain.engine.optimisation.muon import Muon, is_filter, orthogonalised
from fasttrain.engine.step import takes_flag


def network(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv3d(1, 16, 3, padding=1),
        nn.InstanceNorm3d(16, affine=True),
        nn.Conv3d(16, 8, 3),
        nn.Conv3d(8, 2, 1),
    )
    return nn.Sequential(*layers).to(device)


def with_gradients(net: nn.Module, value: float | None = None) -> nn.Module:
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter) if value is None else torch.full_like(parameter, value)
    return net


@pytest.mark.parametrize("shape", [(3, 16, 100), (2, 100, 16), (1, 32, 32)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = torch.randn(shape) * 1e-3
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    turned = orthogonalised(given).float()
    values = torch.einsum("bri,brc,bic->bi", left, turned, right)
    assert values.min() > 0.5
    assert values.max() < 1.3
    # Nothing of it lies outside of them
    assert (turned.norm() ** 2 - (values**2).sum()).abs() < 0.02 * turned.norm() ** 2


def test_a_gradient_of_zero_turns_nothing() -> None:
    assert torch.equal(orthogonalised(torch.zeros(2, 8, 9)).float(), torch.zeros(2, 8, 9))


def test_filters_move_by_a_fifth_of_the_rate_whatever_the_gradient() -> None:
    weight = nn.Parameter(torch.zeros(32, 16, 3, 3, 3))
    optimizer = Muon([weight], lr=1e-2)
    weight.grad = torch.randn_like(weight) * 1e-4
    optimizer.step()
    # Each of 32 directions has a singular value near 1: RMS √(32 / (32 · 432)), times 0.2 √432
    assert weight.square().mean().sqrt().item() == pytest.approx(1e-2 * 0.2, rel=0.2)


def test_other_weights_go_by_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(7)), nn.Parameter(torch.empty(7))
    theirs.data.copy_(ours.data)
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    pair = Muon([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(6):
        ours.grad = torch.randn(7)
        theirs.grad = ours.grad.clone()
        for optimizer in pair:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("saved_at", [None, 2, 5], ids=["unbroken", "saved before", "saved after"])
@pytest.mark.parametrize("left_out", [(), (1, 6)], ids=["all steps", "steps left out"])
def test_a_weight_whose_gradient_comes_late_goes_by_its_own_updates(
    saved_at: int | None, left_out: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four weights with gradients in steps of its own moves as an AdamW of its own would move it."""
    torch.manual_seed(0)
    steps = {0: range(9), 1: range(4, 9), 2: (0, 1, 5, 7), 3: range(9)}
    ours = [nn.Parameter(torch.randn(7)) for _ in steps]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer, others = Muon(ours, **settings), [torch.optim.AdamW([weight], **settings) for weight in theirs]
    # The order in a group is not that of the first gradients
    optimizer.param_groups[0]["params"].reverse()
    parts, genuine = [], Muon._adapt
    monkeypatch.setattr(Muon, "_adapt", lambda *given: parts.append(len(given[1].weights)) or genuine(*given))
    for step in range(9):
        if step == saved_at:
            again = Muon(ours, **settings)
            again.param_groups[0]["params"].reverse()
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = again
        optimizer.found_inf = torch.tensor(float(step in left_out))
        for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            own.grad = torch.randn(7) if step in steps[number] else None
            other.grad = None if own.grad is None else own.grad.clone()
            if step not in left_out:
                others[number].step()
        optimizer.step()
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
    assert sum(parts) == sum(map(len, steps.values()))
    # Those with gradients in the same steps go together
    assert parts[:4] == [3, 3, 2, 2]
    assert parts.count(2) >= 7


def test_weights_with_gradients_in_every_step_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    net, parts, genuine = network(), [], Muon._adapt
    optimizer = Muon(net.parameters())
    monkeypatch.setattr(Muon, "_adapt", lambda *given: parts.append(len(given[1].weights)) or genuine(*given))
    for step in range(3):
        with_gradients(net)
        optimizer.found_inf = torch.tensor(float(step == 1))
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert parts == [sum(not is_filter(parameter) for parameter in net.parameters())] * 3


def test_what_is_a_filter() -> None:
    assert is_filter(torch.zeros(16, 1, 3, 3, 3))
    assert is_filter(torch.zeros(8, 8, 1, 1))
    assert not is_filter(torch.zeros(3, 32, 1, 1, 1)), "a head of three classes"
    assert not is_filter(torch.zeros(16)), "a bias"
    assert not is_filter(torch.zeros(64, 64)), "a linear layer of an attention block"


def state_of(optimizer: Muon) -> list[Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


def test_a_step_with_the_flag_up_changes_nothing() -> None:
    net = with_gradients(network())
    optimizer = Muon(net.parameters(), lr=1e-2, weight_decay=0.1)
    assert takes_flag(optimizer)
    optimizer.step()
    with_gradients(net, float("nan"))
    before = [parameter.detach().clone() for parameter in net.parameters()], state_of(optimizer)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = [parameter.detach() for parameter in net.parameters()], state_of(optimizer)
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(old, new) for old, new in zip(one, other, strict=True))
    with_gradients(net)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not torch.equal(before[0][0], next(net.parameters()))


def test_gradients_of_a_scaled_loss_are_brought_back() -> None:
    plain, scaled = with_gradients(network()), network()
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        other.grad = one.grad * 1024
    pair = Muon(plain.parameters()), Muon(scaled.parameters())
    pair[1].grad_scale = torch.tensor(1024.0)
    for optimizer in pair:
        optimizer.step()
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def test_a_state_that_was_saved_goes_on_alike() -> None:
    net = with_gradients(network())
    optimizer = Muon(net.parameters(), lr=1e-2)
    optimizer.step()
    buffer = io.BytesIO()
    torch.save({"network": net.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    again = with_gradients(network())
    restored = Muon(again.parameters(), lr=1e-2)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    again.load_state_dict(saved["network"])
    restored.load_state_dict(saved["optimizer"])
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        other.grad = one.grad.clone()
    optimizer.step()
    restored.step()
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), again.parameters(), strict=True))


def test_weights_without_a_gradient_stay() -> None:
    net = network()
    optimizer = Muon(net.parameters(), weight_decay=0.1)
    before = copy.deepcopy(net.state_dict())
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("flag", [None, 0.0, 1.0])
def test_recorded_steps_are_the_steps(flag: float | None, late: bool) -> None:
    nets = [with_gradients(network("cuda")) for _ in range(2)]
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        other.grad = one.grad.clone()
    plain, recorded = (Muon(net.parameters(), lr=1e-2, weight_decay=0.1) for net in nets)
    if late:
        # Norms and biases of the first layers have had a step more than the head
        for net, optimizer in zip(nets, (plain, recorded), strict=True):
            kept = [(parameter, parameter.grad) for parameter in net[-1].parameters()]
            for parameter, _ in kept:
                parameter.grad = None
            optimizer.step()
            for parameter, gradient in kept:
                parameter.grad = gradient
    if flag is not None:
        plain.found_inf = recorded.found_inf = torch.full((), flag, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        recorded.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    recorded.param_groups[0]["lr"] = torch.full((), 1e-2, device="cuda")
    with torch.cuda.graph(graph):
        recorded.step()
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        plain.step()
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert math.isfinite(sum(parameter.sum().item() for parameter in nets[1].parameters()))
