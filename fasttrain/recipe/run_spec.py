"""Owns the `validation` and `output` sections: how a run is judged and what it leaves behind."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fasttrain.recipe.spec import Float, NonNegativeInt, OrOff, PositiveInt, Spec


class WindowSpec(Spec):
    """Sliding-window inference: patch-sized windows that overlap, blended into one volume."""

    overlap: Annotated[Float, Field(ge=0.0, le=0.95)] = 0.25
    blend: Literal["gaussian", "constant"] = "gaussian"
    batch_size: PositiveInt = 4


class ValidationSpec(Spec):
    """Whole volumes scored every so many epochs and after the last.

    `grid: original` brings each prediction back to the grid of its file and scores it there; `preprocessed` scores on the
    resampled grid, which is faster and easier on thin structures. `mirror` averages over flips of these axes. Windows are
    computed on the run's device, and `stitching` says where a GPU run sums them: in the GPU's memory or in the host's.
    """

    every: PositiveInt = 1
    window: WindowSpec = WindowSpec()
    stitching: Literal["auto", "gpu", "cpu"] = "auto"
    grid: Literal["original", "preprocessed"] = "original"
    hd95: bool = False
    mirror: tuple[NonNegativeInt, ...] = ()


class Interval(Spec):
    """A distance between checkpoints, read from text such as `1 epoch`, `50 steps` or `5m`."""

    amount: float
    unit: Literal["epochs", "steps", "seconds"]


_INTERVAL = re.compile(
    r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(epochs?|steps?|s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:ours?)?)\s*$"
)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_interval(text: str) -> Interval:
    """Reads `N epochs`, `N steps`, `Ns`, `Nm` or `Nh` (`N seconds`, `N min`, `N hours` …); raises ValueError for anything else,
    zero among it.
    """
    match = _INTERVAL.match(text)
    if match is None or not 0 < float(match[1]) < math.inf:
        raise ValueError(
            f"{text!r} is no interval; write for example '1 epoch', '50 steps', '5m' or '1 epoch, 5m'; for a checkpoint at the "
            "end alone, more epochs than the run has"
        )
    amount, unit = float(match[1]), match[2]
    if not unit.startswith(("epoch", "step")):
        return Interval(amount=amount * _SECONDS[unit[0]], unit="seconds")
    if not amount.is_integer():
        raise ValueError(f"{text!r}: epochs and steps are whole numbers")
    return Interval(amount=amount, unit="steps" if unit.startswith("step") else "epochs")


def parse_intervals(text: str) -> tuple[Interval, ...]:
    """Reads intervals with commas between them, of which the one that passes first counts; raises ValueError as above."""
    try:
        return tuple(parse_interval(part) for part in text.split(","))
    except ValueError as error:
        if "," not in text:
            raise
        raise ValueError(f"{text!r}: {error}") from error


def _check_intervals(text: str) -> str:
    parse_intervals(text)
    return text


class OutputSpec(Spec):
    """What is written into the run folder.

    `checkpoint_every` sets how often `last.pt` is renewed: after so many epochs, steps or so much time, or by whichever of
    several passes first (`1 epoch, 5m`). It is written while training goes on. `keep_every` keeps an `epoch_NNNN.pt` every so
    many epochs (0: none), of which the newest `keep` stay. Every `log_every` steps the loss is read from the device and
    logged. `pictures` draws the worst, the median and the best case after the last validation, with `best` after each new
    best one too.
    `report` writes `report.html` when the run has ended: curves, plan, cases, machine and cost in one file.
    `tensorboard` adds the run's figures as scalars for TensorBoard (`pip install 'fasttrain[tensorboard]'`).
    """

    checkpoint_every: Annotated[str, AfterValidator(_check_intervals)] = "1 epoch, 5m"
    keep_every: NonNegativeInt = 0
    keep: PositiveInt = 3
    log_every: PositiveInt = 10
    plots: bool = True
    pictures: Annotated[Literal["last", "best", "off"], OrOff] = "last"
    report: bool = True
    tensorboard: bool = False
