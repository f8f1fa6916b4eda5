"""A trial that is to go on and whose run lost its checkpoints begins anew in another folder: the study is not stuck at it."""

from pathlib import Path

import pytest
from search_parts import MadePool, ended, made_search

from fasttrain.studies.search.processes import go_on_with

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
