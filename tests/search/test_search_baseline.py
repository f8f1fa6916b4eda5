"""The trial that a search begins with: the recipe's own values, queued once, told as such, never where one lies outside."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from search_parts import MadePool, ended, epoch, made_search, recipe_with, states

from fasttrain.cli.search_text import best_rows, rows_of
from fasttrain.recipe import ResolvedRecipe, resolve
from fasttrain.studies.search.baseline import own_values
from fasttrain.studies.search.beginning import with_space
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.processes import go_on_with
from fasttrain.studies.search.standing import standing_of
from fasttrain.studies.search.study import BASELINE, counted_trials, open_kept
from fasttrain.studies.search.study_folder import StudyFolder

RECIPES = Path(__file__).parents[2] / "recipes"


def of(space: dict[str, Any], values: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    """What `own_values` gives for the demo with this space."""
    resolved: ResolvedRecipe = resolve("demo", {"search": {"space": space}, **(values or {})})
    base, _ = with_space(resolved)
    assert base.recipe.search is not None
    return own_values(base, base.recipe.search.space)


def by_scores(*scores: float) -> MadePool:
    """Trials that end with these scores, one after another."""
    left = list(scores)
    return MadePool(lambda task: [ended(left.pop(0))])


@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_the_first_trial_has_the_recipes_own_values(tmp_path: Path, storage: str) -> None:
    search, told = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), storage=storage)
    search.run()
    trials = search.study.optuna.get_trials(deepcopy=False)
    own = search.wanted.base.recipe.optimizer.learning_rate
    assert trials[0].params == {"optimizer.learning_rate": own}
    assert [bool(trial.user_attrs.get(BASELINE)) for trial in trials] == [True, False, False, False]
    assert all(trial.params["optimizer.learning_rate"] != own for trial in trials[1:])
    assert f"trial 0: learning_rate={own:.3g} (the recipe's own values)" in told


@pytest.mark.parametrize("search", [{"baseline": False}, {"sampler": {"kind": "grid"}}])
def test_none_is_queued_where_that_is_off_or_a_grid_has_its_own(tmp_path: Path, search: dict[str, Any]) -> None:
    made, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), recipe_with(**search))
    assert states(made) == []
    made.run()
    assert not any(trial.user_attrs.get(BASELINE) for trial in made.study.optuna.get_trials(deepcopy=False))


def test_it_is_queued_once_however_often_the_search_begins(tmp_path: Path) -> None:
    for _ in range(3):
        search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), storage="sqlite")
        assert states(search) == ["WAITING"]


@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_one_that_waits_with_values_that_were_changed_since_is_taken_back(tmp_path: Path, storage: str) -> None:
    made_search(tmp_path / "s", MadePool(lambda task: [ended()]), storage=storage)
    changed = resolve(
        "demo",
        {"search": recipe_with().recipe.search.model_dump(), "training.epochs": 6, "optimizer.learning_rate": 0.002},
    )
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), changed, storage=storage)
    assert states(search) == ["FAIL", "WAITING"]
    off = recipe_with(baseline=False)
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), off, storage=storage, trials=2)
    assert states(search) == ["FAIL", "FAIL"]
    search.run()
    trials = search.study.optuna.get_trials(deepcopy=False)
    assert [trial.state.name for trial in trials] == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]
    found = standing_of(open_kept(StudyFolder(tmp_path / "s")))
    assert (found["trials"], found["failures"], found["baseline"]) == (2, {}, None)


def test_one_that_has_begun_is_not_taken_back(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), storage="sqlite")
    study = search.study.optuna
    trial = study.ask()
    trial.set_user_attr("run", "trial-0000")
    study.tell(trial.number, state=require_optuna().trial.TrialState.FAIL)
    go_on_with(study, study.get_trials()[0])
    search, _ = made_search(
        tmp_path / "s", MadePool(lambda task: [ended()]), recipe_with(baseline=False), storage="sqlite"
    )
    assert states(search) == ["FAIL", "WAITING"]


def test_a_study_that_has_trials_gets_none(tmp_path: Path) -> None:
    without, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), recipe_with(baseline=False), trials=1)
    without.run()
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]))
    assert states(search) == ["COMPLETE"]


def test_where_a_value_lies_outside_it_says_so_and_queues_none(tmp_path: Path) -> None:
    space = {"optimizer.learning_rate": {"kind": "float", "low": 1e-5, "high": 1e-4}}
    search, told = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), recipe_with(space=space))
    assert states(search) == []
    assert told == ["no trial has the recipe's own values: optimizer.learning_rate lies outside of search.space there"]


def test_where_several_values_lie_outside_it_names_all(tmp_path: Path) -> None:
    space = {
        "optimizer.learning_rate": {"kind": "float", "low": 1e-5, "high": 1e-4},
        "patch.foreground": {"kind": "float", "low": 0.1, "high": 0.2},
    }
    _, told = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), recipe_with(space=space))
    names = "optimizer.learning_rate, patch.foreground"
    assert told == [f"no trial has the recipe's own values: {names} lie outside of search.space there"]


def test_one_that_was_queued_twice_runs_once(tmp_path: Path) -> None:
    pool = MadePool(lambda task: [ended()])
    search, _ = made_search(tmp_path / "s", pool)
    params = {"optimizer.learning_rate": search.wanted.base.recipe.optimizer.learning_rate}
    search.study.optuna.enqueue_trial(params, user_attrs={BASELINE: True})
    search.run()
    assert states(search) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert len(pool.tasks) == 4
    found = standing_of(open_kept(StudyFolder(tmp_path / "s")))
    assert (found["trials"], found["failures"]) == (4, {})


def test_of_two_that_were_queued_one_counts_though_no_more_trials_are_wanted(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), trials=1)
    params = {"optimizer.learning_rate": search.wanted.base.recipe.optimizer.learning_rate}
    search.study.optuna.enqueue_trial(params, user_attrs={BASELINE: True})
    search.run()
    assert standing_of(open_kept(StudyFolder(tmp_path / "s")))["trials"] == 1
    more, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), trials=2)
    more.run()
    assert states(more) == ["COMPLETE", "FAIL", "COMPLETE"]


def test_of_two_that_were_queued_the_one_that_has_run_goes_on(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]))
    study = search.study.optuna
    params = {"optimizer.learning_rate": search.wanted.base.recipe.optimizer.learning_rate}
    study.enqueue_trial(params, user_attrs={BASELINE: True})
    trial = study.ask()
    study.tell(trial.number, state=require_optuna().trial.TrialState.FAIL)
    go_on_with(study, study.get_trials()[0])
    search.run()
    assert states(search) == ["FAIL", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert standing_of(open_kept(StudyFolder(tmp_path / "s")))["baseline"]["trial"] == 2


def test_one_that_died_stays_the_baseline_as_it_goes_on(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]))
    study = search.study.optuna
    trial = study.ask()
    study.tell(trial.number, state=require_optuna().trial.TrialState.FAIL)
    go_on_with(study, study.get_trials()[0])
    assert [trial.number for trial in counted_trials(study.get_trials())] == [1]
    search.run()
    assert standing_of(open_kept(StudyFolder(tmp_path / "s")))["baseline"]["trial"] == 1


@pytest.mark.parametrize("baseline", [True, False])
def test_it_is_not_pruned_where_another_would_be(tmp_path: Path, baseline: bool) -> None:
    others = threading.Semaphore(0)

    def script(task: dict[str, Any]) -> list[dict[str, Any]]:
        if Path(task["run"]).name != "trial-0000":
            others.release()
            return [*(epoch(number, 0.9) for number in range(1, 7)), ended(0.9)]
        for _ in range(3):
            assert others.acquire(timeout=60.0)
        time.sleep(0.5)
        return [*(epoch(number, 0.1) for number in range(1, 7)), ended(0.1)]

    pool = MadePool(script)
    pruner = {"kind": "halving", "min_epochs": 1, "factor": 2, "patience": 0}
    search, _ = made_search(tmp_path / "s", pool, recipe_with(pruner=pruner, baseline=baseline), parallel=4)
    search.run()
    assert any(word.get("prune") for word in pool.heard) is not baseline


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        ((0.5, 0.7), "dice 0.5000 by trial 0 with the recipe's own values"),
        ((0.7, 0.5), "none did better than the recipe's own values"),
    ],
)
def test_the_status_tells_whether_the_search_gained_anything(
    tmp_path: Path, scores: tuple[float, ...], told: str
) -> None:
    search, _ = made_search(tmp_path / "s", by_scores(*scores), trials=2)
    search.run()
    found = standing_of(open_kept(StudyFolder(tmp_path / "s")))
    assert found["baseline"] == {"trial": 0, "state": "complete", "values": {"score": scores[0]}}
    assert dict(rows_of(found))["baseline"] == told
    best = dict(best_rows({"best": found["best"], "metric": "dice", "written": None}))["trial"]
    assert ("(the recipe's own values)" in best) is (scores[0] > scores[1])


def test_of_several_objectives_none_is_said_to_do_better_in_all_of_them(tmp_path: Path) -> None:
    pool = by_scores(0.5, 0.7)
    search, _ = made_search(tmp_path / "s", pool, recipe_with(objectives=["score", "seconds"]), trials=2)
    search.study.optuna.add_trial(
        require_optuna().create_trial(values=[0.9, 3.0], user_attrs={"run": "trial-0001"}),
    )
    search.run()
    found = standing_of(open_kept(StudyFolder(tmp_path / "s")))
    assert dict(rows_of(found))["baseline"] == "none did better than the recipe's own values in all objectives"


def test_the_status_of_a_study_without_one_says_nothing(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", by_scores(0.5), recipe_with(baseline=False), trials=1)
    search.run()
    found = standing_of(open_kept(StudyFolder(tmp_path / "s")))
    assert found["baseline"] is None
    assert "baseline" not in dict(rows_of(found))


def test_a_choice_may_be_written_otherwise_than_the_recipe_has_it() -> None:
    flip = {"kind": "categorical", "choices": [None, {"probability": 0.25}, {"probability": 0.5}]}
    values, outside = of({"augment.flip": flip}, {"augment.flip": {"probability": 0.5, "axes": [0, 1, 2]}})
    assert (values, outside) == ({"augment.flip": {"probability": 0.5}}, [])
    values, outside = of({"augment.flip": flip}, {"augment.flip": None})
    assert (values, outside) == ({"augment.flip": None}, [])
    values, outside = of({"augment.flip": flip}, {"augment.flip": {"probability": 0.75}})
    assert (values, outside) == ({}, ["augment.flip"])


def test_conditions_hold_for_the_recipes_own_values() -> None:
    space = {
        "optimizer.kind": {"kind": "categorical", "choices": ["adamw", "sgd"]},
        "optimizer.momentum": {"kind": "float", "low": 0.8, "high": 0.995, "when": {"optimizer.kind": "sgd"}},
    }
    assert of(space) == ({"optimizer.kind": "adamw"}, [])
    values, outside = of(space, {"optimizer": {"kind": "sgd", "learning_rate": 0.01, "momentum": 0.9}})
    assert (values, outside) == ({"optimizer.kind": "sgd", "optimizer.momentum": 0.9}, [])


@pytest.mark.parametrize(
    ("entry", "inside"),
    [
        ({"kind": "int", "low": 1, "high": 8}, True),
        ({"kind": "int", "low": 2, "high": 8, "step": 2}, True),
        ({"kind": "int", "low": 1, "high": 7, "step": 2}, False),
        ({"kind": "int", "low": 3, "high": 8}, False),
    ],
)
def test_a_value_between_two_steps_lies_outside(entry: dict[str, Any], inside: bool) -> None:
    values, outside = of({"training.batch_size": entry}, {"training.batch_size": 2})
    assert (values, outside) == (({"training.batch_size": 2}, []) if inside else ({}, ["training.batch_size"]))


def test_a_value_of_a_section_that_is_null_lies_outside() -> None:
    space = {"augment.noise.probability": {"kind": "float", "low": 0.0, "high": 0.5}}
    assert of(space, {"augment.noise": None}) == ({}, ["augment.noise.probability"])


def test_every_recipe_lies_in_the_space_of_its_own_task() -> None:
    for name in sorted(path.stem for path in RECIPES.glob("*.yaml")):
        base, _ = with_space(resolve(name))
        assert base.recipe.search is not None
        values, outside = own_values(base, base.recipe.search.space)
        assert (outside, len(values) > 2) == ([], True), name


@pytest.mark.parametrize(
    "values",
    [
        {"patch.foreground": 0.95},
        {"patch.foreground": 0.0},
        {"optimizer.learning_rate": 0.45648},
        {"schedule.warmup": 0.75, "augment.noise.probability": 1.0},
        {"loss": {"kind": "dice_ce", "ce_weight": 9.0}},
        {"loss": {"kind": "tversky", "beta": 0.95}},
        {"network.dropout": 0.5},
    ],
)
def test_the_space_of_a_task_reaches_as_far_as_the_recipes_own_values(values: dict[str, Any]) -> None:
    base, _ = with_space(resolve("demo", values))
    assert base.recipe.search is not None
    assert own_values(base, base.recipe.search.space)[1] == []


def test_optuna_says_nothing_of_itself_in_the_searchs_name() -> None:
    require_optuna()
    with warnings.catch_warnings(record=True) as heard:
        require_optuna()
        for module in ("optuna.study.study", "fasttrain.studies.search.storage"):
            warnings.warn_explicit("Heartbeat of storage", UserWarning, "file.py", 1, module=module)
        warnings.warn_explicit("what others say", UserWarning, "file.py", 1, module="fasttrain.engine.run")
    assert [str(one.message) for one in heard] == ["what others say"]
