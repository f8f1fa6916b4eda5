"""Owns the sections of the optimisation: `loss`, `optimizer`, `schedule`, `training` and `acceleration`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fasttrain.recipe.spec import Float, NonNegativeFloat, PositiveFloat, PositiveInt, Probability, Seed, Spec, Switch


class _DiceTerms(Spec):
    include_background: bool = False
    batch: bool = True
    squared: bool = False
    smooth: NonNegativeFloat = 1e-5


class DiceLossSpec(_DiceTerms):
    """Soft Dice (Milletari et al. 2016); `batch` sums over the batch before dividing, `squared` squares the denominator."""

    kind: Literal["dice"]


class DiceCELossSpec(_DiceTerms):
    """Weighted sum of soft Dice and cross-entropy."""

    kind: Literal["dice_ce"]
    dice_weight: NonNegativeFloat = 1.0
    ce_weight: NonNegativeFloat = 1.0


class CrossEntropyLossSpec(Spec):
    """Cross-entropy over all classes, the background among them."""

    kind: Literal["cross_entropy"]


LossSpec = Annotated[DiceLossSpec | DiceCELossSpec | CrossEntropyLossSpec, Field(discriminator="kind")]


class SGDSpec(Spec):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"]
    learning_rate: PositiveFloat = 0.01
    momentum: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.99
    nesterov: bool = True
    weight_decay: NonNegativeFloat = 3e-5


class AdamWSpec(Spec):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    kind: Literal["adamw"]
    learning_rate: PositiveFloat = 1e-3
    beta1: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.999
    weight_decay: NonNegativeFloat = 1e-2


OptimizerSpec = Annotated[SGDSpec | AdamWSpec, Field(discriminator="kind")]


class _Schedule(Spec):
    warmup: Probability = 0.0


class ConstantSchedule(_Schedule):
    """The optimizer's learning rate throughout, after a linear rise over the share `warmup` of all steps."""

    kind: Literal["constant"]


class PolySchedule(_Schedule):
    """(1 − t)^power over the steps after the warm-up, t from 0 to 1 (nnU-Net's schedule, a step at a time)."""

    kind: Literal["poly"]
    power: PositiveFloat = 0.9


class CosineSchedule(_Schedule):
    """Half a cosine from the learning rate down to the share `final` of it, after the warm-up."""

    kind: Literal["cosine"]
    final: Probability = 0.0


ScheduleSpec = Annotated[ConstantSchedule | PolySchedule | CosineSchedule, Field(discriminator="kind")]


class TrainingSpec(Spec):
    """How long and in what portions.

    `batch_size` is patches per forward pass and device, `accumulate` forward passes per optimiser step. An epoch is one pass
    over the training cases (each giving `data.samples_per_case` patches), or `iterations_per_epoch` optimiser steps.
    """

    epochs: PositiveInt
    iterations_per_epoch: PositiveInt | None = None
    batch_size: PositiveInt
    accumulate: PositiveInt = 1
    seed: Seed = 0


class AccelerationSpec(Spec):
    """What makes a step fast; `auto` lets the machine decide, and the plan says what it decided and why."""

    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"
    channels_last: Switch = "auto"
    tf32: Switch = "auto"
    threads: Literal["auto"] | PositiveInt = "auto"
