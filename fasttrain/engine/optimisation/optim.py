"""Owns the optimisers by name and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from fasttrain.engine.optimisation.muon import Muon
from fasttrain.engine.optimisation.novograd import DeviceNovograd
from fasttrain.recipe.training_spec import (
    AdamSpec,
    AdamWSpec,
    CosineSchedule,
    MuonSpec,
    NovogradSpec,
    OneCycleSchedule,
    OptimizerSpec,
    PolySchedule,
    ScheduleSpec,
    SGDSpec,
)

LearningRate = Callable[[int], float]
"""From the number of steps already taken to the learning rate of the next."""


def _sgd(spec: SGDSpec, parameters: Iterable[nn.Parameter], fused: bool) -> Optimizer:
    optimizer = torch.optim.SGD(
        parameters,
        lr=spec.learning_rate,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay,
        fused=fused or None,
    )
    if spec.momentum > 0:
        # torch's fused SGD makes them without a value in its first step, and keeps whatever is there where that step is skipped
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _adamw(spec: AdamWSpec, parameters: Iterable[nn.Parameter], fused: bool) -> Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
        fused=fused or None,
    )


def _adam(spec: AdamSpec, parameters: Iterable[nn.Parameter], fused: bool) -> Optimizer:
    return torch.optim.Adam(
        parameters,
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
        fused=fused or None,
    )


def _novograd(spec: NovogradSpec, parameters: Iterable[nn.Parameter], fused: bool) -> Optimizer:
    return DeviceNovograd(
        parameters,
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
        grad_averaging=spec.grad_averaging,
    )


def _muon(spec: MuonSpec, parameters: Iterable[nn.Parameter], fused: bool) -> Optimizer:
    return Muon(
        parameters,
        lr=spec.learning_rate,
        momentum=spec.momentum,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
    )


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "adam": _adam,
    "novograd": _novograd,
    "muon": _muon,
}


def build_optimizer(spec: OptimizerSpec, parameters: Iterable[nn.Parameter], fused: bool = True) -> Optimizer:
    """The optimiser of a recipe. With `fused`, torch's own update all weights in one kernel and leave a step out on a flag that
    stays on the device; without, they are torch's default and the host decides. Novograd and Muon are ours and always obey it.
    """
    return OPTIMIZERS[spec.kind](spec, list(parameters), fused)


def _constant(spec: ScheduleSpec, share: float) -> float:
    return 1.0


def _poly(spec: PolySchedule, share: float) -> float:
    return (1.0 - share) ** spec.power


def _cosine(spec: CosineSchedule, share: float) -> float:
    return spec.final + (1.0 - spec.final) * 0.5 * (1.0 + math.cos(math.pi * share))


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "poly": _poly,
    "cosine": _cosine,
    # What scores make of it is a factor in the run's progress
    "plateau": _constant,
}


def learning_rate(spec: ScheduleSpec, peak: float, total_steps: int) -> LearningRate:
    """The schedule over `total_steps`: a linear rise to `peak` over the share `warmup`, then the schedule's own curve.

    One-cycle has a rise of its own.
    """
    if isinstance(spec, OneCycleSchedule):
        return _one_cycle(spec, peak, total_steps)
    warmup_steps = round(spec.warmup * total_steps)
    curve = SCHEDULES[spec.kind]

    def at(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        share = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        return peak * curve(spec, min(share, 1.0))

    return at


def _one_cycle(spec: OneCycleSchedule, peak: float, total_steps: int) -> LearningRate:
    """torch's OneCycleLR with cosines and two phases; it leaves the momentum alone."""
    start = peak / spec.start_divisor
    end = start / spec.end_divisor
    # torch counts so, in parts of a step: the last step of the rise, and the last of all
    top, last = spec.warmup * total_steps - 1, total_steps - 1

    def at(step: int) -> float:
        if step <= top and top > 0:
            return _between(start, peak, step / top)
        return _between(peak, end, min((step - top) / (last - top), 1.0) if last > top else 0.0)

    return at


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))
