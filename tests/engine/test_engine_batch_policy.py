"""What another batch size changes besides, and the step down that changes nothing of what is learnt."""

import pytest

from fasttrain.engine.planning.batch_policy import possible_batch, stepped_down, with_batch
from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve


def recipe(**more: object):
    return resolve(
        "demo",
        {
            "training.batch_size": 4,
            "optimizer.learning_rate": 0.01,
            **{k.replace("__", "."): v for k, v in more.items()},
        },
    )


@pytest.mark.parametrize(
    ("policy", "batch", "rate", "accumulate"),
    [
        ("keep_lr", 16, 0.01, 2),
        ("scale_linear", 16, 0.04, 2),
        ("scale_linear", 1, 0.0025, 2),
        ("scale_sqrt", 16, 0.02, 2),
        ("keep_effective", 2, 0.01, 4),
        ("keep_effective", 8, 0.01, 1),
    ],
)
def test_each_policy(policy: str, batch: int, rate: float, accumulate: int) -> None:
    changed = with_batch(recipe(training__batch_policy=policy, training__accumulate=2), batch)
    training = changed.recipe.training
    assert (training.batch_size, training.accumulate) == (batch, accumulate)
    assert changed.recipe.optimizer.learning_rate == pytest.approx(rate)
    assert changed.origins["training", "batch_size"] == "tuned"
    assert "# tuned" in changed.as_yaml()


def test_the_same_size_changes_nothing() -> None:
    own = recipe(training__batch_policy="scale_linear")
    assert with_batch(own, 4) is own


def test_an_effective_batch_that_is_no_multiple_is_refused() -> None:
    own = recipe(training__batch_policy="keep_effective")
    assert [size for size in range(1, 9) if possible_batch(own.recipe, size)] == [1, 2, 4]
    with pytest.raises(RecipeError, match=r"training\.batch_size 3: .* keep_effective keeps 4 patches a step"):
        with_batch(own, 3)


@pytest.mark.parametrize(("batch", "smaller", "passes"), [(4, 2, 2), (9, 3, 3), (5, 1, 5), (2, 1, 2)])
def test_a_step_down_keeps_effective_batch_and_rate(batch: int, smaller: int, passes: int) -> None:
    own = recipe(training__batch_size=batch, training__batch_policy="scale_linear")
    less = stepped_down(own)
    assert (less.recipe.training.batch_size, less.recipe.training.accumulate) == (smaller, passes)
    assert less.recipe.optimizer.learning_rate == own.recipe.optimizer.learning_rate


def test_below_one_patch_there_is_no_step_down() -> None:
    assert stepped_down(recipe(training__batch_size=1)) is None
