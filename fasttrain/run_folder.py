"""Owns the names of everything in a run folder, and its claim by one process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from fasttrain.errors import InUseError, RecipeError, StorageError
from fasttrain.whole_files import read_record, told_free, write_json

FORMAT_VERSION = 1

ENVIRONMENT_KEYS = {"format": int, "hardware.device_name": str, "arguments.data": str, "arguments.device": str}
FOLDS_KEYS = {"format": int, "folds": int, "device": str}
PLAN_KEYS = {"amp": str, "channels_last": bool, "cases.training": list, "cases.validation": list}
"""What resume and `open_run` rely on in `environment.json`, `folds.json` and `plan.json`."""
_CLAIMED: set[str] = set()
"""Folders that runs of this process are in; closing a second handle on one would end the first one's record lock."""
_EPOCH_FILE = re.compile(r"^epoch_(\d+)\.pt$")


class RunFolder:
    """One run's folder: `recipe.yaml, environment.json, plan.json, metrics.csv, events.jsonl, summary.json, checkpoints/,
    plots/, pictures/, tensorboard/, tune/, evaluation/, export/, report.html`.

    It is claimed by a lock that ends with its process, so that two processes never write into one run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.csv"
        self.events = path / "events.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.last = self.checkpoints / "last.pt"
        self.best = self.checkpoints / "best.pt"
        self.plots = path / "plots"
        self.pictures = path / "pictures"
        self.tensorboard = path / "tensorboard"
        self.folds = path / "folds.json"
        self.tune = path / "tune"
        self.report = path / "report.html"
        self.evaluation = path / "evaluation"
        self.export = path / "export"
        self.lock = path / "run.lock"
        self._lock: IO[bytes] | None = None

    def fold(self, number: int) -> Path:
        """The run of a fold (from 0), where this folder holds all folds of a split."""
        return self.path / f"fold_{number}"

    def whole(self) -> Path:
        """What a resume should name: the folder of all folds where this run is one of them, else this one."""
        parent = self.path.parent
        return parent if self.path.name.startswith("fold_") and (parent / self.folds.name).exists() else self.path

    def folds_left(self) -> int:
        """How many folds this run and those after it are; 1 for a run by itself."""
        whole = self.whole()
        if whole == self.path:
            return 1
        count = int(read_record(whole / self.folds.name, FOLDS_KEYS)["folds"])
        return max(count - int(self.path.name.removeprefix("fold_")), 1)

    def epoch_file(self, epoch: int) -> Path:
        """Where the periodic checkpoint of an epoch (from 1) lies."""
        return self.checkpoints / f"epoch_{epoch:04d}.pt"

    def epoch_files(self) -> list[Path]:
        """The periodic checkpoints there are, oldest first."""
        found = [(int(match[1]), path) for path in self._checkpoint_files() if (match := _EPOCH_FILE.match(path.name))]
        return [path for _, path in sorted(found)]

    def _checkpoint_files(self) -> list[Path]:
        return list(self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []

    def holds_a_run(self) -> bool:
        """True where a run was begun here."""
        return self.recipe.exists()

    def began(self) -> float | None:
        """When the run began, in Unix seconds, by its first event, which stays what it is when files are copied; None: no run."""
        try:
            with self.events.open("rb") as events:
                record = json.loads(events.readline(1 << 16))
            return datetime.fromisoformat(record["time"]).timestamp()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        times = [path.stat().st_mtime for path in (self.recipe, self.last) if os.path.exists(path)]
        return times[0] if times else None

    def read_summary(self) -> dict[str, Any]:
        """What `summary.json` says; nothing where there is none or it cannot be read."""
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def finished(self) -> bool:
        """True where the summary says that the run went to its end (or to a limit that the user set)."""
        return bool(self.read_summary().get("status") == "done")

    def reopen(self) -> None:
        """A finished run goes on: from now on it is unfinished, also where it is killed before it has a summary of its own."""
        if self.finished():
            write_json(self.summary, {**self.read_summary(), "status": "stopped"})

    def never_trained(self) -> bool:
        """True where the run failed before its first step, so that there is nothing in it to go on from or to keep."""
        summary = self.read_summary()
        nothing = summary.get("status") == "failed" and summary.get("steps") == 0
        return nothing and not self.has_checkpoints()

    def checkpoints_written(self) -> tuple[tuple[str, int, int], ...]:
        """What tells each checkpoint from the one that takes its place."""
        found = []
        for path in sorted(self._checkpoint_files()):
            with contextlib.suppress(OSError):
                written = path.stat()
                found.append((path.name, written.st_ino, written.st_mtime_ns))
        return tuple(found)

    def has_checkpoints(self) -> bool:
        """True where any checkpoint was written, sound or not."""
        return any(path.suffix == ".pt" for path in self._checkpoint_files())

    def check_new(self) -> None:
        """Raises RecipeError or StorageError where a new run cannot go here, before anything slow is done for it.

        A run that failed before its first step (faulty data, too little memory) makes room for the next try.
        """
        try:
            if self.never_trained():
                return
            if self.holds_a_run():
                self.check_not_in_use()
                raise RecipeError(
                    f"{self.path} already holds a run; go on with it by `fasttrain resume {self.path}`, "
                    "or choose another --run"
                )
            if self.path.exists() and not self.path.is_dir():
                raise RecipeError(f"{self.path} is a file; choose another --run")
            if self.path.is_dir() and any(not self._of_a_start(entry) for entry in self.path.iterdir()):
                raise RecipeError(f"{self.path} is not empty and holds no run; choose another --run")
        except OSError as error:
            raise StorageError(
                f"run folder {self.path} cannot be looked into: {error.strerror}; choose another with --run"
            ) from error

    def _of_a_start(self, entry: Path) -> bool:
        """True for what a run leaves that was cut short before it had its recipe, and for what was measured before it."""
        if entry == self.checkpoints:
            return entry.is_dir() and not any(entry.iterdir())
        before = (self.lock, self.environment, self.plan, self.folds, self.tune)
        half = entry.name.startswith(".") and entry.name.endswith(".part")
        return half or entry.name in {path.name for path in before}

    def create(self) -> None:
        """Makes and claims the folder of a new run; RecipeError where it holds one, StorageError where it can't be made."""
        self.check_new()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"run folder {self.path} cannot be made: {error.strerror}; choose another with --run"
            ) from error
        self.claim()
        # Once more: another process may have had the folder since, and be done with it
        self.check_new()
        if self.never_trained():
            for left in (self.recipe, self.environment, self.plan, self.metrics, self.events, self.summary, self.folds):
                left.unlink(missing_ok=True)

    def claim(self) -> None:
        """Takes the folder for this process; raises InUseError where another process has it, StorageError where it cannot be
        written, or where something of another kind has the name of a file that the run will write.
        """
        try:
            # A record lock binds processes only
            if self._key() in _CLAIMED:
                raise OSError(errno.EAGAIN, "claimed by this process")
            # Unbuffered: text that a full disk refused must not come back when the file is closed
            self._lock = open(self.lock, "a+b", buffering=0)  # noqa: SIM115 - held until release()
            # A record lock, not flock: loader workers inherit a flock, and would hold the run of a trainer that was killed
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
            _CLAIMED.add(self._key())
        except OSError as error:
            taken = (self._lock is not None or self._key() in _CLAIMED) and error.errno in (errno.EACCES, errno.EAGAIN)
            holder = self._holder() if taken else ""
            if self._lock is not None:
                self._lock.close()
                self._lock = None
            if taken:
                raise InUseError(self._told_in_use(holder)) from error
            cure = "choose another with --run"
            if os.path.exists(self.recipe):
                cure = "mend its disk or its owner, or copy the run to another folder and go on there"
            raise StorageError(
                f"run folder {self.path} cannot be written: {error.strerror}{told_free(self.path)}; {cure}"
            ) from error
        self._check_kinds()

    def _check_kinds(self) -> None:
        """What could not be written in the end is found before hours are spent on it."""
        files = (
            self.recipe,
            self.environment,
            self.plan,
            self.metrics,
            self.events,
            self.summary,
            self.last,
            self.best,
        )
        folders = (self.checkpoints, self.plots, self.pictures, self.tensorboard)
        faults = [
            f"{path} is a folder, and the run writes a file there; move it away" for path in files if path.is_dir()
        ]
        faults += [
            f"{path} is a file, and the run has a folder there; move it away"
            for path in folders
            if path.exists() and not path.is_dir()
        ]
        if faults:
            self.release()
            raise StorageError(faults)

    def _told_in_use(self, holder: str) -> str:
        return f"run folder {self.path} is in use by {holder}; wait for it, or take another folder"

    def check_not_in_use(self) -> None:
        """Raises InUseError where another process has the folder."""
        if (holder := self.in_use_by()) is not None:
            raise InUseError(self._told_in_use(holder))

    def in_use_by(self) -> str | None:
        """The other process that has the folder, in words; None where none has, or where it is this one's."""
        if self.claimed_here():
            # Closing a second handle would end the claim
            return None
        try:
            with open(self.lock, "r+b", buffering=0) as lock:
                try:
                    os.lockf(lock.fileno(), os.F_TEST, 0)
                except (PermissionError, BlockingIOError):
                    return lock.read().decode(errors="replace").strip() or "another process"
        except OSError:
            pass
        return None

    def _holder(self) -> str:
        # Through the file that is open anyway: closing a second one would end this process's own record locks on it
        with contextlib.suppress(OSError):
            if self._lock is not None:
                self._lock.seek(0)
                return self._lock.read().decode(errors="replace").strip() or "another process"
        return "another process" if self._lock is not None else "this process"

    def claimed_here(self) -> bool:
        """Whether this process has claimed the folder. Then it must not open the lock's file: closing it would end the claim."""
        return self._key() in _CLAIMED

    def _key(self) -> str:
        return os.path.realpath(self.path)

    def release(self) -> None:
        """Gives the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            _CLAIMED.discard(self._key())

    def tidy(self) -> None:
        """Removes what a killed process left half written."""
        for folder in (self.path, self.checkpoints, self.plots, self.pictures):
            for left in folder.glob(".*.part") if folder.is_dir() else ():
                with contextlib.suppress(OSError):
                    left.unlink()
