"""A trial that is to go on and whose run lost what it takes begins anew in another folder: the study is not stuck at it."""

import shutil
from pathlib import Path

import pytest
from search_parts import MadePool, ended, made_search

from fasttrain.engine.run import RunResult
from fasttrain.errors import DataError, StorageError
from fasttrain.studies.search.processes import go_on_with
from fasttrain.studies.search.worker import _is_lost

pytest.importorskip("optuna")


@pytest.mark.parametrize("lost", [True, False])
def test_a_trial_whose_checkpoints_are_gone_begins_anew_elsewhere(lost: bool, tmp_path: Path) -> None:
    said = {"status": "lost", "faults": ["no checkpoint is left"], "exit_code": 6, "retires": True}
    pool = MadePool(lambda task: [{"ended": dict(said)}] if lost and not task["anew"] else [ended()])
    search, told = made_search(tmp_path / "s", pool, trials=1)
    study = search.study.optuna
    trial = study.ask()
    trial.suggest_float("optimizer.learning_rate", 1e-4, 1e-2, log=True)
    trial.set_user_attr("run", "trial-0000")
    (tmp_path / "s" / "trial-0000").mkdir()
    study.tell(trial, state=study.trials[0].state.FAIL)
    go_on_with(study, study.trials[0])
    search.run()
    runs = [Path(task["run"]).name for task in pool.tasks]
    assert runs == (["trial-0000", "trial-0001"] if lost else ["trial-0000"])
    assert study.trials[1].state.name == "COMPLETE"
    assert study.trials[1].user_attrs["run"] == runs[-1]
    assert any("no checkpoint is left: it begins anew in" in text for text in told) == lost


@pytest.mark.parametrize("harm", ["plan.json", "environment.json", "recipe.yaml", "checkpoints", "metrics.csv", "none"])
def test_what_a_run_cannot_go_on_without(harm: str, whole_run: RunResult, tmp_path: Path) -> None:
    run = tmp_path / "trial-0000"
    shutil.copytree(whole_run.run, run)
    # As where it was killed at its very end
    (run / "summary.json").unlink()
    if harm == "checkpoints":
        shutil.rmtree(run / harm)
    elif harm != "none":
        (run / harm).unlink()
    lost = harm not in ("metrics.csv", "none")
    assert _is_lost({"run": str(run), "anew": False}, StorageError("cannot be read")) == lost
    assert not _is_lost({"run": str(run), "anew": True}, StorageError("cannot be read"))
    assert not _is_lost({"run": str(run), "anew": False}, DataError("the cases are no longer the same"))


def test_a_trial_that_had_no_run_yet_lost_none(tmp_path: Path) -> None:
    """What ended it is told as it is."""
    full = {"ended": {"status": "lost", "faults": ["no space"], "exit_code": 6, "retires": True}}
    search, told = made_search(tmp_path / "s", MadePool(lambda task: [full]), trials=1)
    with pytest.raises(StorageError, match="no space"):
        search.run()
    assert not any("anew" in text for text in told)
