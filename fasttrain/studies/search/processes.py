"""Owns how a process that works on a study is known to live, and what becomes of the trials of one that died.

Each holds a lock on a file of its own in the study's folder, which ends with it however it dies. Databases know trials of other
machines by Optuna's heartbeats as well; a journal has none, so a file that nobody can lock from here tells by its time of change.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import IO, Any

from fasttrain.errors import StorageError
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.storage import SERVER
from fasttrain.studies.search.study import BASELINE, Study, superseded
from fasttrain.studies.search.study_folder import StudyFolder
from fasttrain.studies.search.taking import alone

_QUIET_SECONDS = 180.0
"""A process of another machine whose file was not touched for longer, and is locked by nobody, is dead."""
_MARK = "folder-"
_GOES_ON = "goes_on"
"""Of a trial that is marked failed and then queued again: the process that is about to do both."""
_CARRIED = ("run", "lowered", "interruptions", BASELINE)
"""What the trial that goes on knows of the one that died."""


_HERE: set[str] = set()
"""Of this very process, which sees no lock of its own, and would give it up by closing the file once more."""


class Presence:
    """This process's file, locked until it ends."""

    def __init__(self, folder: StudyFolder) -> None:
        self.name = f"{os.uname().nodename}-{os.getpid()}-{_made_mark(folder)}{secrets.token_hex(3)}"
        self._path = folder.processes / f"{self.name}.lock"
        try:
            self._stream: IO[bytes] = open(self._path, "ab", buffering=0)  # noqa: SIM115 - held until the end
            with contextlib.suppress(OSError):
                fcntl.lockf(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}; choose another --folder") from error
        _HERE.add(self.name)

    def show(self) -> None:
        """A sign of life for other machines."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def close(self) -> None:
        """Leaves the study."""
        _HERE.discard(self.name)
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._stream.close()


def any_at_work(folder: StudyFolder) -> bool:
    """Whether a process is at work on the study, as far as can be seen: on trials, on the data before, or between."""
    return any(not is_dead(folder, path.stem) for path in folder.processes.glob("*.lock"))


def is_dead(folder: StudyFolder, name: str) -> bool:
    """Whether the process of that name is known to be gone; False where that cannot be seen from here."""
    if name in _HERE:
        return False
    path = folder.processes / f"{name}.lock"
    here = name.startswith(f"{os.uname().nodename}-")
    try:
        with open(path, "r+b", buffering=0) as stream:
            try:
                os.lockf(stream.fileno(), os.F_TEST, 0)
            except (PermissionError, BlockingIOError):
                return False
            return here or time.time() - os.fstat(stream.fileno()).st_mtime > _QUIET_SECONDS
    except FileNotFoundError:
        # It left in order, and its trials with it; of another folder's processes nothing is known, here or elsewhere
        return here and name.rpartition("-")[2].startswith(_mark(folder))
    except OSError:
        return False


def _mark(folder: StudyFolder) -> str:
    """What the names of the folder's processes have in common: a study in a database may have several folders on a machine."""
    return min((path.name.removeprefix(_MARK) for path in folder.processes.glob(f"{_MARK}*")), default="")


def _made_mark(folder: StudyFolder) -> str:
    if not _mark(folder):
        (folder.processes / f"{_MARK}{secrets.token_hex(3)}").touch()
    return _mark(folder)


def go_on_with(study: Any, trial: Any) -> None:
    """A trial that died is queued again with its values, to go on from its checkpoint; as Optuna's own callback does it."""
    optuna = require_optuna()
    system = {"failed_trial": trial.number, **trial.system_attrs}
    system["retry_history"] = [*trial.system_attrs.get("retry_history", ()), trial.number]
    study.add_trial(
        optuna.create_trial(
            state=optuna.trial.TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={key: trial.user_attrs[key] for key in _CARRIED if key in trial.user_attrs},
            system_attrs=system,
            intermediate_values=trial.intermediate_values,
        )
    )


def set_aside(study: Any, trial: Any, own: str, asked: Asked) -> None:
    """Ends a trial that another one goes on with. Where this process, `own`, ends in between, the next one finishes that."""
    state = require_optuna().trial.TrialState.FAIL
    asked(lambda: study._storage.set_trial_user_attr(trial._trial_id, _GOES_ON, own))
    asked(lambda: study.tell(trial.number, state=state))
    asked(lambda: go_on_with(study, trial))


def deaths_of(trial: Any) -> int:
    """How often it died before, interruptions that a person asked for not counted."""
    return len(trial.system_attrs.get("retry_history", ())) - int(trial.user_attrs.get("interruptions", 0))


def stale_callback(retries: int) -> Callable[[Any, Any], None]:
    """What a database does with a trial that it had no heartbeat of."""

    def stale(study: Any, trial: Any) -> None:
        if deaths_of(trial) < retries:
            go_on_with(study, trial)

    return stale


Asked = Callable[[Callable[[], Any]], Any]
"""Gives what the storage says to a question, as patiently as the search is now."""


def reclaim(study: Study, own: str, asked: Asked) -> list[str]:
    """Marks dead trials failed and queues them again where they may be tried again; a sentence each."""
    optuna = require_optuna()
    running = optuna.trial.TrialState.RUNNING
    if study.place.kind == SERVER or study.place.kind == "sqlite":
        asked(lambda: optuna.storages.fail_stale_trials(study.optuna))
    told = []
    trials = asked(lambda: study.optuna.get_trials(deepcopy=False, states=(running,)))
    for trial in trials:
        name = trial.user_attrs.get("process")
        if name == own or not (
            _taken_by_a_dead_one(study, trial, own) if name is None else is_dead(study.folder, name)
        ):
            continue
        reason = "its process died before it began" if name is None else f"its process {name} died"
        if (text := give_up(study, trial, reason, own, asked)) is not None:
            told.append(text)
    return told + _finish_setting_aside(study, asked)


def _taken_by_a_dead_one(study: Study, trial: Any, own: str) -> bool:
    """Whether what took a trial ended before it wrote its name there, which takes as long as the sampler draws.

    In the study's own folder that is so where no other process is; elsewhere after a while.
    """
    path = study.place.path
    if path is not None and path.parent == study.folder.path.absolute():
        others = [lock.stem for lock in study.folder.processes.glob("*.lock") if lock.stem != own]
        if all(is_dead(study.folder, name) for name in others):
            return True
    began = trial.datetime_start
    return began is not None and (datetime.now() - began).total_seconds() > _QUIET_SECONDS


def _finish_setting_aside(study: Study, asked: Asked) -> list[str]:
    """Queues what a process that is gone had marked failed and was about to queue again; a sentence each."""

    def left() -> list[Any]:
        fail = require_optuna().trial.TrialState.FAIL
        trials = asked(lambda: study.optuna.get_trials(deepcopy=False))
        gone = superseded(trials)
        return [
            trial
            for trial in trials
            if trial.state == fail
            and trial.number not in gone
            and is_dead(study.folder, trial.user_attrs.get(_GOES_ON, ""))
        ]

    if not left():
        return []
    # It is not to be queued twice
    with alone(study.folder.processes / "setting-aside"):
        found = left()
        for trial in found:
            asked(partial(go_on_with, study.optuna, trial))
    return [f"trial {trial.number}: it was to go on and was not queued; it goes on now" for trial in found]


def give_up(study: Study, trial: Any, reason: str, own: str, asked: Asked) -> str | None:
    """Marks a trial that nobody is at work on failed, and queues it again unless it died too often; None where another process
    did so meanwhile.
    """
    optuna = require_optuna()
    goes_on = deaths_of(trial) < study.spec.retries

    def fail() -> bool:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            study.optuna._storage.set_trial_user_attr(trial._trial_id, "reason", reason)
            if goes_on:
                study.optuna._storage.set_trial_user_attr(trial._trial_id, _GOES_ON, own)
        try:
            study.optuna.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return False
        return True

    if not asked(fail):
        return None
    if not goes_on:
        return f"trial {trial.number}: {reason}; it is not tried again after {deaths_of(trial) + 1} deaths"
    asked(lambda: go_on_with(study.optuna, trial))
    how = "it goes on from its newest checkpoint" if "run" in trial.user_attrs else "it is tried again"
    return f"trial {trial.number}: {reason}; {how}"
