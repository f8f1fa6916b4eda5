"""Owns the sections of the optimisation: `loss`, `optimizer`, `schedule`, `training` and `acceleration`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fasttrain.recipe.spec import (
    Float,
    Int,
    NonNegativeFloat,
    OrOff,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
    Spec,
    Switch,
)


class _Loss(Spec):
    one_channel: ClassVar[bool] = False
    """True where the loss takes the sigmoid of one output channel, not the softmax of one a class."""
    by_regions: ClassVar[bool] = False
    """True where the loss can take a sigmoid of each of `data.regions`, too."""
    weights: ClassVar[tuple[str, ...]] = ()
    """The keys that must not all be 0."""


class OverlapTerms(_Loss):
    """What every loss that divides an overlap by a size has: `batch` sums over the batch before dividing."""

    by_regions = True
    batch: bool = True
    smooth: NonNegativeFloat = 1e-5


class _DiceTerms(OverlapTerms):
    squared: bool = False


class DiceLossSpec(_DiceTerms):
    """Soft Dice (Milletari et al. 2016); `batch` sums over the batch before dividing, `squared` squares the denominator."""

    kind: Literal["dice"]
    include_background: bool = False


class DiceCELossSpec(_DiceTerms):
    """Weighted sum of soft Dice and cross-entropy."""

    by_regions = False
    weights = ("dice_weight", "ce_weight")
    kind: Literal["dice_ce"]
    include_background: bool = False
    dice_weight: NonNegativeFloat = 1.0
    ce_weight: NonNegativeFloat = 1.0


class DiceFocalLossSpec(_DiceTerms):
    """Weighted sum of soft Dice and the focal loss (Lin et al. 2017), the latter over each class's own sigmoid.

    `gamma` lets voxels that are right count less; `alpha` weighs voxels of a class against those outside it, 1 − alpha.
    """

    weights = ("dice_weight", "focal_weight")
    kind: Literal["dice_focal"]
    include_background: bool = False
    dice_weight: NonNegativeFloat = 1.0
    focal_weight: NonNegativeFloat = 1.0
    gamma: NonNegativeFloat = 2.0
    alpha: Probability | None = None


class GeneralisedDiceLossSpec(OverlapTerms):
    """One Dice over all classes (Sudre et al. 2017), each weighted by the inverse of its `volume`, of its `square`, or alike.

    `smooth` is 0 unless set: the inverse squares are so small that MONAI's 1e-5 would outweigh a structure of 10⁵ voxels.
    """

    kind: Literal["generalised_dice"]
    include_background: bool = False
    smooth: NonNegativeFloat = 0.0
    weighting: Literal["square", "volume", "uniform"] = "square"


class TverskyLossSpec(OverlapTerms):
    """Tversky loss (Salehi et al. 2017): `alpha` weighs false positives, `beta` false negatives; with 0.5 each it is Dice."""

    weights = ("alpha", "beta")
    kind: Literal["tversky"]
    include_background: bool = False
    alpha: NonNegativeFloat = 0.3
    beta: NonNegativeFloat = 0.7


class BCEDiceLossSpec(_DiceTerms):
    """Weighted sum of soft Dice and binary cross-entropy, for data with one foreground class, or with `data.regions`."""

    one_channel = True
    weights = ("dice_weight", "bce_weight")
    kind: Literal["bce_dice"]
    dice_weight: NonNegativeFloat = 1.0
    bce_weight: NonNegativeFloat = 1.0


class CrossEntropyLossSpec(_Loss):
    """Cross-entropy over all classes, the background among them."""

    kind: Literal["cross_entropy"]


class MaskedMAELossSpec(_Loss):
    """Mean absolute error of the dose over the possible dose mask, in units of `data.dose_scale`; for `task: dose`."""

    kind: Literal["masked_mae"]


class MaskedMSELossSpec(_Loss):
    """Mean squared error of the dose over the possible dose mask, in units of `data.dose_scale`; for `task: dose`."""

    kind: Literal["masked_mse"]


LossSpec = Annotated[
    DiceLossSpec
    | DiceCELossSpec
    | DiceFocalLossSpec
    | GeneralisedDiceLossSpec
    | TverskyLossSpec
    | BCEDiceLossSpec
    | CrossEntropyLossSpec
    | MaskedMAELossSpec
    | MaskedMSELossSpec,
    Field(discriminator="kind"),
]


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


class AdamSpec(Spec):
    """Adam (Kingma and Ba 2015); `weight_decay` is added to the gradient, not decoupled as in `adamw`."""

    kind: Literal["adam"]
    learning_rate: PositiveFloat = 1e-3
    beta1: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.999
    weight_decay: NonNegativeFloat = 0.0


class NovogradSpec(Spec):
    """Novograd (Ginsburg et al. 2019): momentum of gradients that are each scaled by a running norm of their layer."""

    kind: Literal["novograd"]
    learning_rate: PositiveFloat = 1e-3
    beta1: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.98
    weight_decay: NonNegativeFloat = 0.0
    grad_averaging: bool = False


class MuonSpec(Spec):
    """Muon (Jordan et al. 2024; scaled as Liu et al. 2025 do) for the filters of convolutions, AdamW for all other weights.

    The learning rate is that of both, as for `adamw`; `momentum` is Muon's, `beta1` and `beta2` are AdamW's.
    """

    kind: Literal["muon"]
    learning_rate: PositiveFloat = 1e-3
    momentum: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.95
    beta1: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.95
    weight_decay: NonNegativeFloat = 1e-2


OptimizerSpec = Annotated[SGDSpec | AdamWSpec | AdamSpec | NovogradSpec | MuonSpec, Field(discriminator="kind")]


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


class OneCycleSchedule(_Schedule):
    """Half a cosine up over the share `warmup` of all steps and half a cosine down over the others (Smith and Topin 2019).

    It begins at the optimizer's learning rate divided by `start_divisor` and ends at that beginning divided by `end_divisor`.
    """

    kind: Literal["one_cycle"]
    warmup: Probability = 0.3
    start_divisor: Annotated[Float, Field(ge=1.0)] = 25.0
    end_divisor: Annotated[Float, Field(ge=1.0)] = 1e4


class PlateauSchedule(_Schedule):
    """The learning rate is multiplied by `factor` whenever `patience` validations in a row were not better than the best.

    Better: a mean Dice higher, or a dose score lower, by more than `threshold`. It never falls below the share `least` of the
    optimizer's.
    """

    kind: Literal["plateau"]
    factor: Annotated[Float, Field(gt=0.0, lt=1.0)] = 0.5
    patience: PositiveInt = 5
    threshold: NonNegativeFloat = 1e-4
    least: Probability = 1e-3


ScheduleSpec = Annotated[
    ConstantSchedule | PolySchedule | CosineSchedule | OneCycleSchedule | PlateauSchedule, Field(discriminator="kind")
]


class EMASpec(Spec):
    """An exponential moving average of the weights; validation, `best` and predictions use it.

    After step t it moves towards the weights by 1 − min(`decay`, (1 + t) / (10 + t)): less memory at the beginning.
    """

    decay: Annotated[Float, Field(gt=0.0, lt=1.0)] = 0.999


class EarlyStoppingSpec(Spec):
    """Ends the run after `patience` validations in a row not better than the best by more than `threshold`.

    Better: a mean Dice that is higher, a dose score that is lower.
    """

    patience: PositiveInt
    threshold: NonNegativeFloat = 0.0


class TrainingSpec(Spec):
    """How long and in what portions.

    `batch_size` is patches per forward pass and device, `accumulate` forward passes per optimiser step. An epoch is one pass
    over the training cases (each giving `data.samples_per_case` patches), or `iterations_per_epoch` optimiser steps. Gradients
    are scaled down to a norm of at most `clip_norm` over all weights. `batch_policy` says what else a tuned batch size changes:
    nothing; the learning rate, in proportion to the effective batch or to its square root; or `accumulate`, so that the
    effective batch stays. So it does of several GPUs. `sync_batch_norm` makes batch norms see the patches of all GPUs.
    """

    epochs: PositiveInt
    iterations_per_epoch: PositiveInt | None = None
    batch_size: PositiveInt
    accumulate: PositiveInt = 1
    batch_policy: Literal["keep_lr", "scale_linear", "scale_sqrt", "keep_effective"] = "keep_lr"
    seed: Seed = 0
    clip_norm: PositiveFloat | None = None
    ema: EMASpec | None = None
    early_stopping: EarlyStoppingSpec | None = None
    sync_batch_norm: bool = False


class AccelerationSpec(Spec):
    """What makes a step fast or small; `auto` lets the machine decide, and the plan says what it decided and why.

    `activation_checkpointing` computes the network's blocks again in the backward pass instead of keeping their results.
    `fused_optimizer` updates all weights in one kernel. `expandable_segments` lets the GPU's allocator grow its blocks.
    `fused_layers` computes norms, activations and some convolutions by fasttrain's own kernels. `cuda_graphs` launches a whole
    step at once.
    """

    amp: Annotated[Literal["auto", "bf16", "fp16", "off"], OrOff] = "auto"
    channels_last: Switch = "auto"
    tf32: Switch = "auto"
    fused_layers: Switch = "auto"
    cuda_graphs: Switch = "auto"
    compile: Switch = "auto"
    activation_checkpointing: Switch = "auto"
    fused_optimizer: Switch = "auto"
    expandable_segments: Switch = "auto"
    threads: Literal["auto"] | Annotated[Int, Field(ge=1, le=1024)] = "auto"
