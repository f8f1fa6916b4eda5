"""Trials of a study: counted, pruned, failed, lowered, dead and gone on with, by workers that only say what they are told."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from search_parts import MadePool, ended, epoch, made_search, recipe_with, states

from fasttrain.cli.search_text import rows_of
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import MachineError, RecipeError, StorageError
from fasttrain.studies.search import running
from fasttrain.studies.search.processes import Presence, go_on_with, is_dead, set_aside
from fasttrain.studies.search.standing import standing_of
from fasttrain.studies.search.study import counted_trials, open_kept
from fasttrain.studies.search.study_folder import StudyFolder

optuna = pytest.importorskip("optuna")


def test_as_many_trials_as_asked_for_and_no_more_when_asked_again(tmp_path: Path) -> None:
    pool = MadePool(lambda task: [{"ready": 1.0}, epoch(1, 0.3), ended(0.4)])
    search, _ = made_search(tmp_path / "s", pool)
    search.run()
    assert states(search) == ["COMPLETE"] * 4
    assert pool.workers == 1
    assert len({task["recipe"] for task in pool.tasks}) == 4
    again, _ = made_search(tmp_path / "s", pool)
    again.run()
    assert len(states(again)) == 4
    assert [Path(task["run"]).name for task in pool.tasks] == [f"trial-{number:04d}" for number in range(4)]


def test_a_search_that_has_said_nothing_for_long_says_where_its_trials_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(task):
        told_so_far = len(told)
        # The first search is not to wait until it says so
        give_up = time.monotonic() + (60 if running._SILENT_SECONDS < 1 else 0.5)
        while len(told) == told_so_far and len(pool.tasks) == 2 and time.monotonic() < give_up:
            time.sleep(0.05)
        return [epoch(2, 0.3), ended(0.4)] if len(pool.tasks) == 1 else [ended(0.4)]

    pool = MadePool(script)
    search, told = made_search(tmp_path / "s", pool, trials=2)
    search.run()
    assert not any("getting ready" in one for one in told), "30 s are not over"
    pool.tasks.clear()
    pool.tasks.append({})
    monkeypatch.setattr(running, "_SILENT_SECONDS", 0.3)
    search, told = made_search(tmp_path / "s", pool, trials=3)
    search.run()
    assert "trial 2: getting ready" in told


def test_a_trial_that_trains_is_not_told_as_getting_ready(tmp_path: Path) -> None:
    stood = []

    def script(task):
        stood.append(search.stands[0])
        yield {"ready": 1.0}
        give_up = time.monotonic() + 60
        while search.stands[0] != "training" and time.monotonic() < give_up:
            time.sleep(0.02)
        stood.append(search.stands[0])
        yield ended()

    search, _ = made_search(tmp_path / "s", MadePool(script), trials=1)
    search.run()
    assert stood == ["getting ready", "training"]


def test_a_hopeless_trial_is_pruned_and_told(tmp_path: Path) -> None:
    scores = iter([0.9, 0.8, 0.85, 0.9, 0.9, 0.1])
    pruned = {"status": "stopped", "stopped_by": "pruned", "epochs": 2}

    def script(task):
        score = next(scores)
        bad = score < 0.5
        return [epoch(1, score), epoch(2, score), ended(score, summary=pruned if bad else {})]

    pool = MadePool(script)
    resolved = recipe_with(pruner={"kind": "median", "min_epochs": 1, "patience": 0})
    search, told = made_search(tmp_path / "s", pool, resolved, trials=6)
    search.run()
    assert states(search) == ["COMPLETE"] * 5 + ["PRUNED"]
    assert [word["prune"] for word in pool.heard[-2:]] == [True, True]
    assert not any(word["prune"] for word in pool.heard[:-2])
    found = standing_of(open_kept(StudyFolder(tmp_path / "s")))
    assert found["pruning_rate"] == pytest.approx(1 / 6)
    assert found["best"][0]["values"]["score"] == 0.9
    assert any("pruned after epoch 2" in one for one in told)


def test_memory_that_ran_out_lowers_the_batch_once(tmp_path: Path) -> None:
    out = {"ended": {"status": "memory", "faults": ["out of memory"], "exit_code": 5, "retires": True, "spans": {}}}
    pool = MadePool(lambda task: [ended()] if '"batch_size":1' in task["recipe"] else [out])
    search, told = made_search(tmp_path / "s", pool, trials=1)
    search.run()
    assert states(search) == ["COMPLETE"]
    assert '"accumulate":2' in pool.tasks[1]["recipe"]
    assert pool.tasks[1]["anew"]
    assert any("training.batch_size 2 → 1" in one for one in told)
    pool = MadePool(lambda task: [out])
    search, told = made_search(tmp_path / "t", pool, trials=1)
    search.run()
    assert states(search) == ["FAIL"]
    assert len(pool.tasks) == 2
    found = standing_of(open_kept(StudyFolder(tmp_path / "t")))
    assert (found["out_of_memory"], found["failures"]) == (2, {"0": "out of memory"})


def test_a_trial_whose_process_dies_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    died = []

    def script(task):
        if not died:
            died.append(task["run"])
            return None
        return [ended()]

    pool = MadePool(script)
    search, told = made_search(tmp_path / "s", pool, trials=2)
    search.run()
    assert states(search) == ["FAIL", "COMPLETE", "COMPLETE"]
    assert pool.tasks[1]["run"] == died[0]
    assert len(counted_trials(search.study.optuna.trials)) == 2
    assert any("SIGKILL" in one or "signal 9" in one for one in told)


def test_a_trial_that_dies_every_time_is_given_up(tmp_path: Path) -> None:
    pool = MadePool(lambda task: None if "trial-0000" in task["run"] else [ended()])
    search, _ = made_search(tmp_path / "s", pool, recipe_with(retries=2), trials=2)
    search.run()
    counted = counted_trials(search.study.optuna.trials)
    assert sorted(trial.state.name for trial in counted) == ["COMPLETE", "FAIL"]
    assert sum("trial-0000" in task["run"] for task in pool.tasks) == 3


def test_dead_processes_are_known_by_their_lock_and_living_ones_left_alone(tmp_path: Path) -> None:
    pool = MadePool(lambda task: [ended()])
    search, _ = made_search(tmp_path / "s", pool, trials=3)
    study = search.study.optuna
    dead = study.ask()
    dead.suggest_float("optimizer.learning_rate", 1e-4, 1e-2, log=True)
    gone = Presence(search.study.folder)
    dead.set_user_attr("process", gone.name)
    gone.close()
    dead.set_user_attr("run", "trial-0000")
    living = study.ask()
    living.set_user_attr("process", "elsewhere-1-abc")
    (search.study.folder.processes / "elsewhere-1-abc.lock").write_bytes(b"")
    search.run_until_left_alone = threading.Thread(target=search.run, daemon=True)
    search.run_until_left_alone.start()
    search.run_until_left_alone.join(30)
    assert not search.run_until_left_alone.is_alive()
    names = states(search)
    assert names[0] == "FAIL"
    assert names[1] == "RUNNING"
    assert names[2:] == ["COMPLETE", "COMPLETE"]
    assert study.trials[2].params == study.trials[0].params


@pytest.mark.parametrize("left_by", ["the dead", "the living", "nobody"])
def test_what_was_set_aside_and_not_queued_goes_on(left_by: str, tmp_path: Path) -> None:
    """As where a disk was full, or a kill came, between the two."""
    pool = MadePool(lambda task: [ended()])
    search, _ = made_search(tmp_path / "s", pool, trials=2)
    study, other = search.study.optuna, Presence(search.study.folder)
    trial = study.ask()
    trial.suggest_float("optimizer.learning_rate", 1e-4, 1e-2, log=True)
    trial.set_user_attr("run", "trial-0000")
    queued: list[str] = []

    def full(ask: Callable[[], object]) -> object:
        # The third is to queue it
        queued.append("")
        if len(queued) == 3:
            raise StorageError("full")
        return ask()

    if left_by == "nobody":
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        with pytest.raises(StorageError, match="full"):
            set_aside(study, study.trials[0], other.name, full)
    if left_by == "the dead":
        other.close()
    search.run()
    goes_on = left_by == "the dead"
    assert states(search) == ["FAIL", *["COMPLETE"] * (1 + goes_on)]
    assert len(counted_trials(study.trials)) == 2
    assert sum("trial-0000" in task["run"] for task in pool.tasks) == int(goes_on)
    other.close()


def test_a_process_that_works_on_the_study_in_another_folder_is_not_dead(tmp_path: Path) -> None:
    """Two directories of one machine, and one database: the lock of the other one's process is not here."""
    folders = [StudyFolder(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        folder.make()
    here = [Presence(folder) for folder in folders]
    for one in here:
        one.close()
    found = [[is_dead(folder, one.name) for one in here] for folder in folders]
    assert found == [[True, False], [False, True]]


def test_a_stop_saves_what_runs_and_the_next_start_goes_on(tmp_path: Path) -> None:
    stop = StopRequest()

    def script(task):
        stop.ask("SIGTERM", 143)
        return [ended(None, summary={"status": "stopped", "stopped_by": "SIGTERM"})]

    search, told = made_search(tmp_path / "s", MadePool(script), trials=2, stop=stop)
    search.run()
    assert states(search) == ["FAIL", "WAITING"]
    assert any("it goes on when" in one for one in told)
    pool = MadePool(lambda task: [ended()])
    search, _ = made_search(tmp_path / "s", pool, trials=2)
    search.run()
    assert states(search) == ["FAIL", "COMPLETE", "COMPLETE"]
    assert Path(pool.tasks[0]["run"]).name == "trial-0000"


def test_a_full_disk_ends_the_search_and_no_trial_is_lost(tmp_path: Path) -> None:
    full = {"ended": {"status": "failed", "faults": ["no space"], "exit_code": 6, "retires": True, "spans": {}}}
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [full]), trials=3)
    with pytest.raises(StorageError, match="no space"):
        search.run()
    assert states(search) == ["FAIL", "WAITING"]


def test_trials_that_all_fail_end_the_search(tmp_path: Path) -> None:
    broken = {
        "ended": {"status": "failed", "faults": ["a kernel crashed"], "exit_code": 4, "retires": True, "spans": {}}
    }
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [broken]), trials=20)
    with pytest.raises(MachineError, match="5 trials in a row failed, the last one so: a kernel crashed"):
        search.run()
    assert states(search) == ["FAIL"] * 5


def test_another_recipe_is_refused_with_what_differs(tmp_path: Path) -> None:
    pool = MadePool(lambda task: [ended()])
    made_search(tmp_path / "s", pool)
    made_search(tmp_path / "s", pool, recipe_with(sampler={"kind": "random"}, trials=9))
    other = recipe_with().with_values({("training", "batch_size"): 4, ("patch", "foreground"): 0.2}, "--set")
    with pytest.raises(
        RecipeError, match=r"patch.foreground 0.6 → 0.2; training.batch_size 2 → 4; leave that as it was"
    ):
        made_search(tmp_path / "s", pool, other)
    searched = recipe_with().with_values({("optimizer", "learning_rate"): 1e-3}, "--set")
    made_search(tmp_path / "s", pool, searched)


def test_several_objectives_are_not_pruned_and_say_so(tmp_path: Path) -> None:
    pool = MadePool(lambda task: [epoch(1, 0.5), ended(0.5)])
    resolved = recipe_with(objectives=["score", "seconds", "memory"], pruner={"kind": "hyperband"})
    search, told = made_search(tmp_path / "s", pool, resolved, trials=2)
    search.run()
    assert search.study.optuna.trials[0].values == [0.5, 2.0, 1.0]
    assert any("no trial is pruned" in one for one in told)
    assert pool.workers == 2
    assert len(standing_of(open_kept(StudyFolder(tmp_path / "s")))["best"]) == 2


@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_two_searches_share_a_study_and_none_is_one_too_many(tmp_path: Path, storage: str) -> None:
    def slow(task):
        time.sleep(0.1)
        return [ended()]

    pools = [MadePool(slow), MadePool(slow)]
    both = [made_search(tmp_path / "s", pool, storage=storage, trials=7)[0] for pool in pools]
    threads = [threading.Thread(target=search.run) for search in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(counted_trials(both[0].study.optuna.trials)) == 7
    runs = [task["run"] for pool in pools for task in pool.tasks]
    assert len(runs) == len(set(runs)) == 7
    assert all(pool.tasks for pool in pools)


@pytest.mark.parametrize("kind", ["tpe", "random", "grid", "gp", "cmaes"])
@pytest.mark.parametrize("pruner", ["hyperband"])
def test_every_sampler_gives_values_within_the_space(tmp_path: Path, kind: str, pruner: str) -> None:
    scores = iter((0.5, 0.1, 0.9, 0.3, 0.6))
    pool = MadePool(lambda task: [epoch(3, 0.5), ended(next(scores))])
    resolved = recipe_with(sampler={"kind": kind, "startup": 2, "grid_points": 5}, pruner={"kind": pruner})
    search, _ = made_search(tmp_path / "s", pool, resolved, trials=5)
    search.run()
    rates = [trial.params["optimizer.learning_rate"] for trial in search.study.optuna.trials]
    assert len(rates) == 5
    # A Gaussian process may find the end of the range best each time
    assert len(set(rates)) > (2 if kind == "gp" else 3)
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)


def test_gone_on_with_keeps_its_values_and_scores(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]))
    study = search.study.optuna
    trial = study.ask()
    trial.suggest_float("optimizer.learning_rate", 1e-4, 1e-2, log=True)
    trial.report(0.4, 1)
    go_on_with(study, study.trials[0])
    again = study.ask()
    assert (
        again.suggest_float("optimizer.learning_rate", 1e-4, 1e-2, log=True)
        == study.trials[0].params["optimizer.learning_rate"]
    )
    assert study.trials[1].intermediate_values == {1: 0.4}


@pytest.mark.parametrize(("gib", "workers"), [(10.0, 2), (60.0, 1)])
def test_on_a_gpu_the_next_trial_gets_ready_beside_where_both_have_room(
    tmp_path: Path, gib: float, workers: int
) -> None:
    def slow(task):
        time.sleep(0.2)
        return [{"ready": 1.0}, {**epoch(1, 0.5), "gib": gib}, ended()]

    pool = MadePool(slow)
    search, told = made_search(tmp_path / "s", pool, trials=5, parallel=None, on_gpu=True, device_gib=80.0)
    search.run()
    assert states(search) == ["COMPLETE"] * 5
    assert pool.workers == workers
    assert any("there is no room" in one for one in told) == (workers == 1)


def test_a_folder_holds_one_study_and_no_trial_takes_the_run_of_another(tmp_path: Path) -> None:
    pool = MadePool(lambda task: [ended()])
    folder = tmp_path / "s"
    made_search(folder, pool)
    with pytest.raises(RecipeError, match=r"--name other: .* holds study demo; go on with that by --name demo"):
        made_search(folder, pool, name="other")
    (folder / "trial-0000").mkdir()
    search, _ = made_search(folder, pool, trials=2)
    search.run()
    assert [Path(task["run"]).name for task in pool.tasks] == ["trial-0000-2", "trial-0001"]


def test_a_study_whose_storage_or_record_is_gone_is_not_begun_anew_over_its_trials(tmp_path: Path) -> None:
    folder, pool = tmp_path / "s", MadePool(lambda task: [ended()])
    made_search(folder, pool)
    kept = (folder / "journal.log").read_bytes()
    (folder / "journal.log").unlink()
    with pytest.raises(StorageError, match=r"journal.log, where study demo is stored, is gone; bring it back"):
        made_search(folder, pool)
    (folder / "journal.log").write_bytes(kept)
    made_search(folder, pool)
    (folder / "study.json").write_text("{")
    with pytest.raises(
        StorageError, match=r"study.json is damaged: it is no JSON document; bring it back, or name another --f"
    ):
        made_search(folder, pool)


def test_a_trial_left_running_by_a_killed_search_is_told_as_dead(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]))
    folder = search.study.folder
    gone = Presence(folder)
    gone.close()
    for name in (gone.name, "elsewhere-1-abc"):
        search.study.optuna.ask().set_user_attr("process", name)
    found = standing_of(open_kept(folder))
    assert found["states"]["running"]["count"] == 2
    assert found["dead"] == [0]
    assert ("dead", "trial 0, of a search that was killed; the same command again goes on from there") in rows_of(found)
