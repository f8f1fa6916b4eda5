"""A study on MySQL or MariaDB: two processes share it, and its password is taken from where MySQL's own clients take it."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_server import place_for, wait_for
from search_parts import two_processes_share

from fasttrain.errors import StorageError
from fasttrain.studies.search.storage import open_storage, place_of

pytest.importorskip("optuna")
pytest.importorskip("pymysql")

ACCOUNT = """
create database study;
create user me@'127.0.0.1' identified by 'secret';
grant all on study.* to me@'127.0.0.1';
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A MariaDB on loopback, by Debian's package, as a user that is not root; without the password."""
    binary, make = shutil.which("mariadbd") or "/usr/sbin/mariadbd", shutil.which("mariadb-install-db")
    if make is None or not Path(binary).exists():
        pytest.skip("MariaDB is not installed (apt-get install mariadb-server)")
    user, folder, port = place_for("mysql", "ftmy")
    place = [f"--datadir={folder / 'data'}", f"--socket={folder / 'socket'}"]
    words = [make, "--no-defaults", place[0], "--auth-root-authentication-method=normal", "--skip-test-db"]
    subprocess.run([*user, *words], check=True, capture_output=True, cwd=folder)
    (folder / "account.sql").write_text(ACCOUNT.lstrip())
    options = [*place, f"--port={port}", "--bind-address=127.0.0.1", f"--init-file={folder / 'account.sql'}"]
    options += [f"--pid-file={folder / 'pid'}"]
    server = subprocess.Popen(
        [*user, binary, "--no-defaults", *options], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port)
        yield f"mysql://me@127.0.0.1:{port}/study"
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "pid").read_text()), 15)
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def test_two_processes_share_it_and_no_trial_runs_twice(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYSQL_PWD", "secret")
    two_processes_share(url, tmp_path / "s")
    assert "secret" not in (tmp_path / "s" / "study.json").read_text()


def test_the_password_is_taken_from_the_file_of_mysql(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MYSQL_PWD", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError, match="cannot be used: Access denied for user") as refused:
        open_storage(place_of(url, tmp_path))
    assert refused.value.exit_code == 6
    (tmp_path / ".my.cnf").write_text("[client]\npassword = secret\n")
    assert open_storage(place_of(url, tmp_path)).get_all_studies() is not None
    open_storage(place_of(url.replace("me@", "me:secret@"), tmp_path))
