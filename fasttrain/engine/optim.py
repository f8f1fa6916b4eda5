"""Owns the optimisers by name and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from fasttrain.recipe.training_spec import AdamWSpec, CosineSchedule, OptimizerSpec, PolySchedule, ScheduleSpec, SGDSpec

LearningRate = Callable[[int], float]
"""From the number of steps already taken to the learning rate of the next."""


def _sgd(spec: SGDSpec, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(
        parameters,
        lr=spec.learning_rate,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay,
        fused=True,
    )


def _adamw(spec: AdamWSpec, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
        fused=True,
    )


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": _sgd, "adamw": _adamw}


def build_optimizer(spec: OptimizerSpec, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """A fused optimiser: one kernel for all weights, and it can leave a step out on a flag that stays on the device."""
    return OPTIMIZERS[spec.kind](spec, list(parameters))


def _constant(spec: ScheduleSpec, share: float) -> float:
    return 1.0


def _poly(spec: PolySchedule, share: float) -> float:
    return (1.0 - share) ** spec.power


def _cosine(spec: CosineSchedule, share: float) -> float:
    return spec.final + (1.0 - spec.final) * 0.5 * (1.0 + math.cos(math.pi * share))


SCHEDULES: dict[str, Callable[..., float]] = {"constant": _constant, "poly": _poly, "cosine": _cosine}


def learning_rate(spec: ScheduleSpec, peak: float, total_steps: int) -> LearningRate:
    """The schedule over `total_steps`: a linear rise to `peak` over the share `warmup`, then the schedule's own curve."""
    warmup_steps = round(spec.warmup * total_steps)
    curve = SCHEDULES[spec.kind]

    def at(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        share = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        return peak * curve(spec, min(share, 1.0))

    return at
