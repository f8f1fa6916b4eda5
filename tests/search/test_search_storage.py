"""Where a study is stored: what names a storage, what cannot be used, and a lock that is waited for."""

import contextlib
import fcntl
import os
import shlex
import sqlite3
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from small_machine import run_with

from fasttrain.errors import RecipeError, StorageError
from fasttrain.studies.search import storage
from fasttrain.studies.search.pool import remove_left
from fasttrain.studies.search.storage import _made_twice, network_warning, open_storage, patiently, place_of

pytest.importorskip("optuna")


def test_what_names_a_storage(tmp_path: Path) -> None:
    assert place_of(None, tmp_path).path == tmp_path / "study.db"
    assert place_of("journal", tmp_path).path == tmp_path / "journal.log"
    assert place_of(str(tmp_path / "a.db"), tmp_path).kind == "sqlite"
    assert place_of(f"sqlite:///{tmp_path}/b.db", tmp_path).path == tmp_path / "b.db"
    assert place_of("a.journal", tmp_path).kind == "journal"
    found = place_of("postgresql://me:secret@host/base", tmp_path)
    assert found.url == "postgresql+psycopg://me:secret@host/base"
    assert found.shown == "postgresql+psycopg://me@host/base"
    assert place_of("mysql://me@host/base", tmp_path).url.startswith("mysql+pymysql://")


@pytest.mark.parametrize("asked", ["oracle://me:secret@host/base", "study.txt", "sqlite://"])
def test_other_names_are_refused_without_their_password(asked: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="should be sqlite, journal") as error:
        place_of(asked, tmp_path)
    assert "secret" not in str(error.value)


def test_a_server_that_nobody_answers_at(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be used: .*what ran is kept") as error:
        open_storage(place_of("postgresql://me:secret@127.0.0.1:9/base", tmp_path))
    assert "secret" not in str(error.value)
    assert error.value.exit_code == 6


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"no database at all, but some text" * 100)
    with pytest.raises(StorageError, match="no sound SQLite file"):
        open_storage(place_of(None, tmp_path))


def test_tables_that_another_process_made_at_this_moment_are_no_fault(tmp_path: Path) -> None:
    """Both wrote the version of their tables; SQLite's own words."""
    said = []
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as base:
        for table in ("alembic_version", "studies"):
            base.execute(f"create table {table} (version_num integer unique)")
            base.execute(f"insert into {table} values (1)")
            with pytest.raises(sqlite3.IntegrityError) as fault:
                base.execute(f"insert into {table} values (1)")
            said.append(_made_twice(fault.value))
    assert said == [True, False]


def test_a_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import optuna

    monkeypatch.setattr(storage, "BUSY_SECONDS", 0.2)
    place = place_of(None, tmp_path)
    study = optuna.create_study(storage=open_storage(place), study_name="a")
    trial = study.ask()
    told: list[str] = []

    def hold() -> None:
        with contextlib.closing(sqlite3.connect(place.path, isolation_level=None)) as holder:
            holder.execute("BEGIN EXCLUSIVE")
            held.set()
            time.sleep(1.5)
            holder.execute("ROLLBACK")

    held = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    began = time.monotonic()
    patiently(place, lambda: study.tell(trial, 0.5), told.append)
    thread.join()
    assert time.monotonic() - began > 1.0
    assert len(told) == 1
    assert "does not answer (database is locked)" in told[0]
    assert study.trials[0].value == 0.5


def test_patience_ends_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 0.0)

    def locked() -> None:
        with contextlib.closing(sqlite3.connect(place.path, timeout=0.05)) as other:
            other.execute("CREATE TABLE a (b)")

    place = place_of(None, tmp_path)
    with contextlib.closing(sqlite3.connect(place.path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageError, match="held it locked"):
            patiently(place, locked)


@pytest.mark.parametrize("harm", ["deleted", "emptied", "cut", "none"])
def test_a_file_that_is_lost_under_a_study_is_not_waited_for(harm: str, tmp_path: Path) -> None:
    import optuna

    place = place_of(None, tmp_path)
    study = optuna.create_study(storage=open_storage(place), study_name="a")
    trial = study.ask()
    assert place.path is not None
    if harm == "deleted":
        place.path.unlink()
    elif harm != "none":
        os.truncate(place.path, 0 if harm == "emptied" else 5000)
    began = time.monotonic()
    with pytest.raises(StorageError, match="no longer there|no sound SQLite") if harm != "none" else nullcontext():
        patiently(place, lambda: study.tell(trial, 0.5))
        assert harm == "none"
    assert time.monotonic() - began < 20


FILLED = """
import os, sys, time
from pathlib import Path
import optuna
from fasttrain.errors import StorageError
from fasttrain.studies.search import storage
storage.FULL_SECONDS = 1.0
place = storage.place_of({kind!r}, Path({folder!r}))
study = optuna.create_study(storage=storage.open_storage(place), study_name="a")
trials = [study.ask() for _ in range(2)]
with open({folder!r} + "/fill", "wb", buffering=0) as fill:
    try:
        while True:
            fill.write(bytes(512))
    except OSError:
        pass
began = time.monotonic()
def told(trial):
    # More than fits into a page that is there already
    trial.set_user_attr("long", "x" * 20000)
    study.tell(trial, 0.5)
try:
    storage.patiently(place, lambda: told(trials[0]))
except StorageError as error:
    assert {words!r} in str(error), error
else:
    raise SystemExit("told on a full disk")
assert 0.9 < time.monotonic() - began < 20
# Emptied in time it is as if nothing had been
import threading
threading.Timer(0.4, lambda: os.unlink({folder!r} + "/fill")).start()
storage.patiently(place, lambda: told(trials[1]))
assert study.get_trials()[1].state == optuna.trial.TrialState.COMPLETE
"""


@pytest.mark.parametrize(
    ("kind", "words"), [("sqlite", "database or disk is full"), ("journal", "No space left on device")]
)
def test_a_full_disk_is_not_waited_for_long(kind: str, words: str, tmp_path: Path) -> None:
    script = FILLED.format(kind=kind, words=words, folder=str(tmp_path))
    done = run_with(script, f"mount -t tmpfs -o size=1m tmpfs {shlex.quote(str(tmp_path))} &&", namespace=True)
    assert done.returncode == 0, done.stderr


def test_a_search_that_was_told_to_stop_waits_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "STOPPED_SECONDS", 0.5)
    asked = threading.Event()
    threading.Timer(0.5, asked.set).start()

    def away() -> None:
        raise ConnectionRefusedError("nobody answers")

    began = time.monotonic()
    with pytest.raises(StorageError, match="nobody answers"):
        patiently(place_of("mysql://me@host/base", tmp_path), away, stopped=asked.is_set)
    assert 1.0 < time.monotonic() - began < 20
    assert patiently(place_of(None, tmp_path), lambda: 3, stopped=lambda: True) == 3


def test_an_error_that_is_none_of_the_storage_passes_at_once(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        patiently(place_of(None, tmp_path), lambda: 1 / 0)


def test_sqlite_on_a_network_disk_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fasttrain.machine.mounts import Mount

    assert network_warning(place_of(None, tmp_path)) is None or "network" in str(
        network_warning(place_of(None, tmp_path))
    )
    monkeypatch.setattr(storage, "mount_of", lambda folder: Mount(tmp_path, "nfs4", "server:/disk"))
    assert "--storage journal" in str(network_warning(place_of(None, tmp_path)))
    assert network_warning(place_of("journal", tmp_path)) is None


def test_folders_of_sockets_that_killed_searches_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, living, young = (tmp_path / f"fasttrain-search-{name}" for name in ("left", "living", "young"))
    for place in (left, living, young):
        place.mkdir()
        (place / "lock").write_bytes(b"")
        if place != young:
            os.utime(place, (0, 0))
    with open(living / "lock", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_left()
    assert sorted(tmp_path.iterdir()) == [living, young]
