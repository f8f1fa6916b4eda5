"""Owns the `search` section: which values of the recipe are searched, by what sampler and pruner, and what is judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fasttrain.recipe.spec import Float, Int, NonNegativeInt, PositiveFloat, PositiveInt, Seed, Spec

When = dict[str, Any]


class FloatRange(Spec):
    """A number from `low` to `high`, both included; `log` draws its logarithm evenly, `step` takes every so manieth value.

    `when` names other entries of the space with the value (or a list of values) that they must have for this one to be searched.
    """

    kind: Literal["float"]
    low: Float
    high: Float
    log: bool = False
    step: PositiveFloat | None = None
    when: When = Field(default_factory=dict)

    @model_validator(mode="after")
    def _in_order(self) -> FloatRange:
        _check_range(self.low, self.high, self.log, self.step)
        return self


class IntRange(Spec):
    """A whole number from `low` to `high`, both included; `log`, `step` and `when` as for `float`."""

    kind: Literal["int"]
    low: Int
    high: Int
    log: bool = False
    step: PositiveInt | None = None
    when: When = Field(default_factory=dict)

    @model_validator(mode="after")
    def _in_order(self) -> IntRange:
        _check_range(self.low, self.high, self.log, self.step)
        return self


class Choice(Spec):
    """One of `choices`, which may be anything that the recipe takes there: numbers, text, lists or whole sections; `when` as for
    `float`.
    """

    kind: Literal["categorical"]
    choices: Annotated[tuple[Any, ...], Field(min_length=1)]
    when: When = Field(default_factory=dict)


def _check_range(low: float, high: float, log: bool, step: float | None) -> None:
    if low > high:
        raise ValueError(f"low {low:g} is above high {high:g}")
    if log and low <= 0:
        raise ValueError(f"log: true needs a low above 0, found {low:g}")
    if log and step is not None:
        raise ValueError("log: true and step exclude each other; leave one of them out")


Range = Annotated[FloatRange | IntRange | Choice, Field(discriminator="kind")]


class SamplerSpec(Spec):
    """How the next trial's values are chosen (Optuna's samplers).

    `tpe` models good and bad trials (Bergstra et al. 2011), `gp` is a Gaussian process, `cmaes` an evolution strategy for
    numbers, `random` draws, `grid` goes through all combinations, a range without `step` in `grid_points` values. The first
    `startup` trials of tpe, gp and cmaes are drawn. `seed` repeats the draws of a search that is run by one process; null:
    other ones each time.
    """

    kind: Literal["tpe", "random", "grid", "gp", "cmaes"] = "tpe"
    startup: PositiveInt = 8
    grid_points: Annotated[Int, Field(ge=2, le=1000)] = 4
    seed: Seed | None = None


class PrunerSpec(Spec):
    """Which trials are ended early, by their scores so far (Optuna's pruners).

    `hyperband` (Li et al. 2018) and `halving` compare after `min_epochs`, and `factor` times as many each time; `median` asks
    from `min_epochs` on whether the best so far is below the median of the others. None is ended while its score still rises:
    only after `patience` epochs without a better one (0: at once). With several objectives nothing can be ended early.
    """

    kind: Literal["hyperband", "median", "halving", "none"] = "hyperband"
    min_epochs: PositiveInt = 3
    factor: Annotated[Int, Field(ge=2, le=100)] = 3
    patience: NonNegativeInt = 4


class SearchSpec(Spec):
    """What `fasttrain search` varies and how; training by itself does not look at it.

    `space` names recipe values by their path, such as `optimizer.learning_rate`, each with a range or choices; empty: a space
    of the task's own. `baseline`: the first trial takes the recipe's own values (but of a grid) and is not pruned, so that
    the best is none below them. `objectives`: `score` (the validation's best), and beside it `seconds` of training or
    `memory` (GiB) of the device. `epochs` and `validate_every` are those of each trial, null: the recipe's. `trials` counts
    those of the whole study. `retries`: so often a trial whose process died is gone on with.
    """

    space: dict[str, Range] = Field(default_factory=dict)
    objectives: Annotated[tuple[Literal["score", "seconds", "memory"], ...], Field(min_length=1)] = ("score",)
    trials: PositiveInt = 20
    epochs: PositiveInt | None = None
    validate_every: PositiveInt | None = None
    sampler: SamplerSpec = SamplerSpec()
    pruner: PrunerSpec = PrunerSpec()
    baseline: bool = True
    retries: NonNegativeInt = 2

    @model_validator(mode="after")
    def _once_each(self) -> SearchSpec:
        if len(set(self.objectives)) != len(self.objectives):
            raise ValueError("objectives names one twice")
        if "score" not in self.objectives:
            raise ValueError("objectives needs score; seconds and memory come beside it")
        return self
