"""A space is checked against the recipe before anything runs, and its values come out as a recipe."""

from pathlib import Path

import pytest

from fasttrain.errors import RecipeError
from fasttrain.recipe import bundled_recipes, resolve
from fasttrain.recipe.searched import active, in_order, with_searched
from fasttrain.studies.search.beginning import tell_overruled, with_space
from fasttrain.studies.search.choosing import grid_of, grid_size, label_of
from fasttrain.studies.search.trial_recipe import trial_recipe

pytest.importorskip("optuna")
LOG = {"kind": "float", "low": 1e-4, "high": 1e-2, "log": True}


def searched(**space):
    return resolve("demo", {"search": {"space": {path.replace("__", "."): entry for path, entry in space.items()}}})


def faults_of(**space) -> str:
    with pytest.raises(RecipeError) as error:
        searched(**space)
    return "\n".join(error.value.faults)


def test_an_entry_without_a_kind_is_told_which_there_are() -> None:
    with pytest.raises(RecipeError, match=r"optimizer.learning_rate: needs a `kind`: one of float, int, categorical$"):
        resolve("demo", {"search.space": {"optimizer.learning_rate": {"low": 0.1, "high": 1}}})


def test_a_path_that_is_none_is_refused_with_near_ones() -> None:
    assert "did you mean optimizer.learning_rate" in faults_of(optimizer__learning_rte=LOG)


def test_every_range_is_tried_at_both_ends_and_all_faults_come_at_once() -> None:
    told = faults_of(
        augment__noise__probability={"kind": "float", "low": 0.1, "high": 2},
        training__accumulate={"kind": "int", "low": 0, "high": 4},
        patch__size={"kind": "categorical", "choices": [[48, 48, 48], [47, 48, 48]]},
        loss__kind={"kind": "categorical", "choices": ["dice_ce", "dice_cee"]},
    )
    assert "augment.noise.probability.high: 2 cannot be: should be less than or equal to 1" in told
    assert "training.accumulate.low: 0 cannot be" in told
    assert "patch.size.choices: [47, 48, 48] cannot be: patch.size[0]: 47 is not a multiple of 8" in told
    assert "loss.kind.choices: dice_cee cannot be" in told
    assert "low" not in told.split("augment.noise.probability")[1].split("\n")[0].replace("low:", "")


def test_a_misspelt_name_hides_no_fault_of_another_and_an_end_that_is_refused_is_told_once() -> None:
    told = faults_of(
        optimizer__learning_rte=LOG,
        optimizer__weight_decay={"kind": "float", "low": -1, "high": 1},
        training__batch_size={"kind": "int", "low": -2, "high": 8},
    ).splitlines()
    assert len(told) == 3, told
    assert "optimizer.learning_rte: a recipe has no value of that name" in told[0]
    assert "optimizer.weight_decay.low: -1 cannot be" in told[1]
    assert "training.batch_size.low: -2 cannot be" in told[2]


def test_a_number_with_a_fraction_does_not_fit_a_whole_one() -> None:
    assert "training.batch_size" in faults_of(training__batch_size={"kind": "float", "low": 1, "high": 4})
    searched(training__batch_size={"kind": "int", "low": 1, "high": 4})


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"training__epochs": {"kind": "int", "low": 2, "high": 4}}, "search.epochs sets it"),
        ({"data__split__validation": {"kind": "int", "low": 2, "high": 4}}, "data.split cannot be searched"),
        ({"optimizer__learning_rate": {"kind": "float", "low": 1, "high": 0.1}}, "low 1 is above high 0.1"),
        ({"optimizer__learning_rate": {"kind": "float", "low": 0, "high": 0.1, "log": True}}, "needs a low above 0"),
        ({"optimizer__learning_rate": {**LOG, "when": {"optimizer.kind": "sgd"}}}, "which is no entry of the space"),
        ({"optimizer__momentum": {"kind": "float", "low": 0.8, "high": 0.9}}, "no such key"),
    ],
)
def test_what_cannot_be_searched_is_refused(space, told) -> None:
    assert told in faults_of(**space)


def test_a_condition_that_never_holds_is_refused() -> None:
    kinds = {"kind": "categorical", "choices": ["adamw", "sgd"]}
    momentum = {"kind": "float", "low": 0.8, "high": 0.9, "when": {"optimizer.kind": "sgdd"}}
    assert "optimizer.kind is never sgdd" in faults_of(optimizer__kind=kinds, optimizer__momentum=momentum)


def test_conditional_values_and_a_kind_that_keeps_what_its_new_kind_has() -> None:
    kinds = {"kind": "categorical", "choices": ["adamw", "sgd"]}
    momentum = {"kind": "float", "low": 0.8, "high": 0.9, "when": {"optimizer.kind": ["sgd"]}}
    base, _ = with_space(searched(optimizer__momentum=momentum, optimizer__kind=kinds))
    space = base.recipe.search.space
    assert in_order(space) == ["optimizer.kind", "optimizer.momentum"]
    assert active(space, "optimizer.momentum", {"optimizer.kind": "sgd"})
    assert not active(space, "optimizer.momentum", {"optimizer.kind": "adamw"})
    found = trial_recipe(base, {"optimizer.momentum": 0.85, "optimizer.kind": "sgd"}, "search, trial 3")
    assert (found.recipe.optimizer.kind, found.recipe.optimizer.momentum, found.recipe.optimizer.learning_rate) == (
        "sgd",
        0.85,
        3e-3,
    )
    assert found.recipe.search is None
    assert "search, trial 3" in found.as_yaml()


def test_a_section_that_is_off_can_be_searched_and_reads_back(tmp_path: Path) -> None:
    base, _ = with_space(searched(augment__rotate__probability={"kind": "float", "low": 0.1, "high": 0.5}))
    assert base.recipe.augment.rotate is None
    found = trial_recipe(base, {"augment.rotate.probability": 0.25}, "search")
    (tmp_path / "r.yaml").write_text(found.as_yaml())
    assert resolve(str(tmp_path / "r.yaml")).recipe == found.recipe


def test_values_in_lists_and_untouched_base() -> None:
    raw = {"patch": {"size": (48, 48, 48)}, "augment": {"flip": None}}
    assert with_searched(raw, {"patch.size[1]": 32})["patch"]["size"] == [48, 32, 48]
    assert raw["patch"]["size"] == (48, 48, 48)


@pytest.mark.parametrize("name", sorted(bundled_recipes()))
def test_the_space_of_its_own_fits_every_bundled_recipe(name: str) -> None:
    resolved = resolve(name)
    base, told = with_space(resolved)
    assert "optimizer.learning_rate" in base.recipe.search.space
    assert "search.space is empty" in str(told)
    same, said = with_space(base)
    assert said is None
    assert same.recipe.search.space == base.recipe.search.space


def test_a_value_of_the_command_line_that_trials_do_not_take_is_told() -> None:
    def told(*assignments: str) -> list[str]:
        said: list[str] = []
        tell_overruled(resolve("demo", list(assignments)), lambda one: said.append(one.text))
        return said

    assert told() == []
    assert told("training.epochs=4", "search.validate_every=2", "validation.every=2") == []
    assert told("training.epochs=60", "search.epochs=null") == []
    found = told("training.epochs=60", "validation.every=5")
    assert len(found) == 2
    assert "--set search.epochs=60 changes that" in found[0]
    assert "--set search.validate_every=5 changes that" in found[1]


def test_grids() -> None:
    kinds = {"kind": "categorical", "choices": [None, {"probability": 0.5}]}
    base, _ = with_space(
        searched(
            optimizer__learning_rate=LOG,
            augment__flip=kinds,
            training__batch_size={"kind": "int", "low": 1, "high": 3, "step": 2},
        )
    )
    grid = grid_of(base.recipe.search.space, 3)
    assert grid["optimizer.learning_rate"] == [1e-4, 1e-3, 1e-2]
    assert grid["training.batch_size"] == [1, 3]
    assert grid["augment.flip"] == [None, label_of({"probability": 0.5})]
    assert grid_size(base.recipe.search, base.recipe.search.space) is None


def test_training_does_not_look_at_the_section(tmp_path: Path) -> None:
    from fasttrain.studies.lock import matters

    assert matters(searched(optimizer__learning_rate=LOG).recipe) == matters(resolve("demo").recipe)
