"""Owns where a study is stored: SQLite, Optuna's journal file, PostgreSQL or MySQL; how it is opened, and asked with patience."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fasttrain.errors import MachineError, RecipeError, StorageError
from fasttrain.machine.mounts import fate_of, mount_of
from fasttrain.studies.search.extra import require_optuna

SQLITE, JOURNAL, SERVER = "sqlite", "journal", "server"
BUSY_SECONDS = 90
"""For which SQLite waits for another process by itself."""
PATIENCE_SECONDS = 600.0
"""For which a storage that does not answer is asked again."""
STOPPED_SECONDS = 10.0
"""For which it is once the search was told to stop."""
FULL_SECONDS = 10.0
"""For which it is on a full disk: seldom somebody empties that, and trials end of it, too."""
_LOST = ("no such table", "malformed", "not a database")
"""What SQLite says of a file that no waiting mends."""
HEARTBEAT_SECONDS = 15
GRACE_SECONDS = 90
"""Without a heartbeat, after which a trial on a database counts as dead."""
_MAKING_SECONDS = 30.0
"""For which processes that begin at once may be in each other's way while one makes the tables of a database."""
_DRIVERS = {"postgresql": "psycopg", "postgres": "psycopg", "mysql": "pymysql", "mariadb": "pymysql"}
_PASSWORD = re.compile(r"(://[^:/@]*):[^@]*@")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Place:
    """kind: `sqlite`, `journal` or `server`; url: SQLAlchemy's, or the path of a journal."""

    kind: str
    url: str

    @property
    def shown(self) -> str:
        """Without a password."""
        return without_password(self.url)

    @property
    def path(self) -> Path | None:
        """The file, where it is one."""
        if self.kind == SERVER:
            return None
        return Path(self.url.removeprefix("sqlite:///"))


def without_password(url: str) -> str:
    """A URL without its password."""
    return _PASSWORD.sub(r"\1@", url)


def place_of(asked: str | None, folder: Path) -> Place:
    """What `--storage` means: nothing is SQLite in the study's folder, `journal` a journal there; a file by its ending; a URL.

    Raises RecipeError for anything else.
    """
    if asked is None or asked == "sqlite":
        return Place(SQLITE, f"sqlite:///{folder.absolute() / 'study.db'}")
    if asked == "journal":
        return Place(JOURNAL, str(folder.absolute() / "journal.log"))
    scheme, mark, rest = asked.partition("://")
    if not mark:
        ending = Path(asked).suffix
        if ending in (".db", ".sqlite", ".sqlite3"):
            return Place(SQLITE, f"sqlite:///{Path(asked).absolute()}")
        if ending in (".log", ".journal"):
            return Place(JOURNAL, str(Path(asked).absolute()))
    elif scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return Place(SQLITE, f"sqlite:///{Path(rest.removeprefix('/')).absolute()}")
    elif scheme.split("+")[0] in _DRIVERS:
        kind = scheme.split("+")[0]
        dialect = "postgresql" if kind.startswith("postgres") else "mysql"
        return Place(SERVER, f"{dialect}+{_DRIVERS[kind]}://{rest}" if "+" not in scheme else asked)
    raise RecipeError(
        f"--storage {without_password(asked)}: should be sqlite, journal, a file that ends in .db or .log, or a URL such "
        "as postgresql://user@host/database or mysql://user@host/database"
    )


def network_warning(place: Place) -> str | None:
    """A sentence where SQLite lies on a network disk, whose locks it cannot rely on."""
    if place.kind != SQLITE or place.path is None:
        return None
    mount = mount_of(place.path.parent)
    if mount is None or fate_of(mount, in_a_container=False) != "network":
        return None
    return (
        f"{place.path} lies on a network disk ({mount.kind}), where SQLite's locks may fail and a study be damaged; begin it "
        "with --storage journal, or with a database"
    )


def open_storage(place: Place, stale: Callable[[Any, Any], None] | None = None) -> Any:
    """Optuna's storage. stale: called with the study and a trial that a database had no heartbeat of.

    Raises StorageError where it cannot be reached or is locked, MachineError where its driver is missing.
    """
    optuna = require_optuna()
    if place.path is not None:
        try:
            place.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{place.path.parent} cannot be made: {error.strerror}; choose another --storage"
            ) from error
    began = time.monotonic()
    while True:
        try:
            return _opened(optuna, place, stale)
        except ImportError as error:
            raise MachineError(
                f"--storage {place.shown}: its driver is not installed ({error}): pip install 'fasttrain[search]'"
            ) from error
        except Exception as error:
            if not _made_twice(error) or time.monotonic() - began > _MAKING_SECONDS:
                raise _unusable(place, error) from error
            time.sleep(0.3)


def _opened(optuna: Any, place: Place, stale: Callable[[Any, Any], None] | None) -> Any:
    if place.kind == JOURNAL:
        from fasttrain.studies.search.journal import WholeLineJournal

        return optuna.storages.JournalStorage(WholeLineJournal(place.url))
    settings: dict[str, Any] = {"pool_pre_ping": True}
    if place.kind == SQLITE:
        settings["connect_args"] = {"timeout": BUSY_SECONDS}
    elif place.url.startswith("mysql+pymysql:"):
        settings["connect_args"] = _mysql_password(place.url)
    return optuna.storages.RDBStorage(
        place.url,
        engine_kwargs=settings,
        heartbeat_interval=HEARTBEAT_SECONDS,
        grace_period=GRACE_SECONDS,
        heartbeat_stale_trial_callback=stale,
    )


def _mysql_password(url: str) -> dict[str, str]:
    """Where PyMySQL takes a password that the URL does not hold, as the clients of MySQL do; those of PostgreSQL look by
    themselves.
    """
    if _PASSWORD.search(url):
        return {}
    if "MYSQL_PWD" in os.environ:
        return {"password": os.environ["MYSQL_PWD"]}
    options = Path("~/.my.cnf").expanduser()
    return {"read_default_file": str(options)} if options.is_file() else {}


def _made_twice(error: BaseException) -> bool:
    """Whether another process made the tables of a new database at this very moment: they are there a moment later."""
    return any(
        "already exists" in str(one) or "alembic_version" in str(one) or "UniqueViolation" in type(one).__name__
        for one in _chain(error)
    )


def patiently(
    place: Place,
    ask: Callable[[], Found],
    waiting: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Found:
    """What `ask` gives; it is asked again while the storage is locked or does not answer, for ten minutes, on a full disk for ten
    seconds.

    waiting: told of it once. stopped: whether it is to end soon. Raises StorageError then, and at once where the file is lost.
    """
    began, pause, told = time.monotonic(), 0.2, False
    stopped_at: float | None = None
    while True:
        try:
            return ask()
        except Exception as error:
            if not _of_the_storage(error):
                raise
            now = time.monotonic()
            if stopped_at is None and stopped():
                stopped_at = now
            hurried = stopped_at is not None and now - stopped_at > STOPPED_SECONDS
            limit = FULL_SECONDS if _is_full(error) else PATIENCE_SECONDS
            if hurried or now - began > limit or _is_lost(place, error):
                raise _unusable(place, error) from error
            if not told:
                waiting(f"the study's storage does not answer ({_first_line(_chain(error)[-1])}); it is asked again")
                told = True
            time.sleep(pause)
            pause = min(pause * 1.5, 5.0)


def _of_the_storage(error: BaseException) -> bool:
    names = {type(one).__name__ for one in _chain(error)}
    return bool(names & {"OperationalError", "StorageInternalError", "DBAPIError", "InterfaceError"}) or (
        isinstance(error, OSError) and not isinstance(error, StorageError)
    )


def _is_full(error: BaseException) -> bool:
    last = _chain(error)[-1]
    full = isinstance(last, OSError) and last.errno in (errno.ENOSPC, errno.EDQUOT)
    # SQLite's own words
    return full or "database or disk is full" in str(last)


def _is_lost(place: Place, error: BaseException) -> bool:
    if place.kind != SQLITE or place.path is None:
        return False
    return not place.path.exists() or any(word in str(_chain(error)[-1]) for word in _LOST)


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _unusable(place: Place, error: BaseException) -> StorageError:
    last = _chain(error)[-1]
    what = _first_line(last)
    if "locked" in what:
        what = f"another process has held it locked for more than {BUSY_SECONDS} s"
    elif place.kind == SQLITE and place.path is not None and not place.path.exists():
        what = "the file is no longer there"
    elif any(word in what for word in _LOST):
        what = f"it is no sound SQLite file ({what})"
    return StorageError(
        f"the study's storage {place.shown} cannot be used: {what}; what ran is kept in the trials' folders: give the command "
        "again once it can be, or name another with --storage"
    )


def _first_line(error: BaseException) -> str:
    # MySQL's faults are a number and a sentence
    said = error.args[1] if len(error.args) == 2 and isinstance(error.args[1], str) else str(error)
    text = os.fsdecode(said) if said else type(error).__name__
    return without_password(text.splitlines()[0])[:200]
