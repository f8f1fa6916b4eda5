"""A study on PostgreSQL: two processes share it, and one that dies without a word is found by its heartbeats."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_server import place_for, wait_for
from search_parts import MadePool, ended, made_search, recipe_with, states, two_processes_share

from fasttrain.studies.search import processes, storage
from fasttrain.studies.search.study import counted_trials

pytest.importorskip("optuna")
pytest.importorskip("psycopg")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on loopback, by Debian's package, as a user that is not root."""
    found = [
        *sorted(Path("/usr/lib/postgresql").glob("*/bin")),
        *(Path(path).parent for path in [shutil.which("initdb")] if path),
    ]
    if not found:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    user, folder, port = place_for("postgres", "ftpg")
    place = folder / "data"
    make = [*user, str(found[-1] / "initdb"), "-D", str(place), "-U", "fasttrain", "--auth=trust", "--no-sync"]
    subprocess.run(make, check=True, capture_output=True, cwd=folder)
    words = [
        *user,
        str(found[-1] / "postgres"),
        "-D",
        str(place),
        "-p",
        str(port),
        "-h",
        "127.0.0.1",
        "-k",
        str(folder),
        "-F",
    ]
    server = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        time.sleep(0.5)
        yield f"postgresql://fasttrain:secret@127.0.0.1:{port}/postgres"
    finally:
        stop = [*user, str(found[-1] / "pg_ctl"), "-D", str(place), "stop", "-m", "immediate"]
        subprocess.run(stop, capture_output=True, cwd=folder)
        server.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def test_two_processes_share_it_and_no_trial_runs_twice(url: str, tmp_path: Path) -> None:
    two_processes_share(url, tmp_path / "s")
    assert "secret" not in (tmp_path / "s" / "study.json").read_text()


def test_a_trial_without_a_heartbeat_is_failed_and_gone_on_with(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr(storage, "GRACE_SECONDS", 2)
    resolved = recipe_with().with_values({("name",): "other"}, "--set")
    pool = MadePool(lambda task: [ended()])
    search, _ = made_search(tmp_path / "t", pool, resolved, storage=url, trials=2, name="stale")
    study = search.study.optuna
    lost = study.ask()
    lost.suggest_float("optimizer.learning_rate", 1e-4, 1e-2, log=True)
    # Of another pod, whose folder cannot be seen from here
    lost.set_user_attr("process", "another-pod-1-abc")
    study._storage.record_heartbeat(lost._trial_id)
    assert processes.reclaim(search.study, search.presence.name, search.asked) == []
    time.sleep(3.0)
    search.run()
    assert states(search)[0] == "FAIL"
    counted = counted_trials(study.trials)
    assert [trial.state.name for trial in counted] == ["COMPLETE", "COMPLETE"]
    assert study.trials[1].params == study.trials[0].params
