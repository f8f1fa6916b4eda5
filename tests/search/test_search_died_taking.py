"""A process that dies as it begins a study, or takes a trial and has not written its name there: nothing is left half done."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from search_parts import MadePool, ended, made_search, recipe_with, states

from fasttrain.studies.search import processes, storage
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.processes import Presence, reclaim
from fasttrain.studies.search.standing import standing_of
from fasttrain.studies.search.study import open_kept
from fasttrain.studies.search.study_folder import StudyFolder

pytest.importorskip("optuna")
_DIES = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from search_parts import MadePool, ended, made_search
search, _ = made_search(Path(sys.argv[1]), MadePool(lambda task: [ended()]), storage=sys.argv[2])
search.study.optuna.ask()
os.kill(os.getpid(), signal.SIGKILL)
"""
_BEGINS = """
import os, signal, sys
from pathlib import Path
import optuna
sys.path.insert(0, sys.argv[2])
from search_parts import MadePool, made_search, recipe_with
left, note = int(sys.argv[3]), optuna.Study.set_user_attr
def noted(*values):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    note(*values)
optuna.Study.set_user_attr = noted
made_search(Path(sys.argv[1]), MadePool(lambda task: []), recipe_with(objectives=["score", "seconds"]))
"""


@pytest.mark.parametrize("left", range(3))
def test_a_study_that_was_begun_in_part_is_begun_whole(left: int, tmp_path: Path) -> None:
    words = [sys.executable, "-c", _BEGINS, str(tmp_path / "s"), str(Path(__file__).parent), str(left)]
    assert subprocess.run(words, timeout=60).returncode == -signal.SIGKILL
    resolved = recipe_with(objectives=["score", "seconds"])
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), resolved, trials=2)
    search.run()
    found = standing_of(open_kept(StudyFolder(tmp_path / "s")))
    assert found["baseline"]["values"] == {"score": 0.5, "seconds": 2.0}
    assert found["metric"] is not None


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_the_next_start_goes_on_with_its_trial(kind: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", _DIES, str(tmp_path / "s"), kind, str(Path(__file__).parent)]
    assert subprocess.run(words, timeout=60).returncode == -signal.SIGKILL
    search, told = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), storage=kind)
    assert states(search) == ["RUNNING"]
    search.run()
    assert states(search) == ["FAIL"] + ["COMPLETE"] * 4
    text = "trial 0: its process died before it began; it is tried again"
    assert told[0] == text
    found = standing_of(open_kept(StudyFolder(tmp_path / "s")))
    assert (found["trials"], found["states"]["complete"]["count"]) == (4, 4)
    assert found["baseline"]["trial"] == 1
    own = search.wanted.base.recipe.optimizer.learning_rate
    assert search.study.optuna.trials[1].params == {"optimizer.learning_rate": own}


def test_one_that_another_process_may_be_taking_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]))
    other = Presence(search.study.folder)
    search.study.optuna.ask()
    assert reclaim(search.study, search.presence.name, search.asked) == []
    monkeypatch.setattr(processes, "_QUIET_SECONDS", 0.0)
    assert len(reclaim(search.study, search.presence.name, search.asked)) == 1
    other.close()


def test_who_was_taken_for_dead_takes_another(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]))
    study = search.study.optuna
    ask, fail = study.ask, require_optuna().trial.TrialState.FAIL

    def slow() -> object:
        trial = ask()
        study.ask = ask
        study.tell(trial.number, state=fail)
        processes.go_on_with(study, study.get_trials()[trial.number])
        return trial

    study.ask = slow
    search.run()
    assert states(search) == ["FAIL"] + ["COMPLETE"] * 4


def test_a_trial_has_a_heartbeat_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr(storage, "GRACE_SECONDS", 1)
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), recipe_with(), storage="sqlite")
    trial = search._next()
    assert trial is not None
    study = search.study.optuna
    give_up = time.monotonic() + 60
    while not (stale := study._storage._get_stale_trial_ids(study._study_id)) and time.monotonic() < give_up:
        time.sleep(0.2)
    assert stale == [trial._trial_id]
