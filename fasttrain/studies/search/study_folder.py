"""Owns the names in the folder of a study, and how such a folder is known; nothing of Optuna is loaded for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fasttrain.errors import RecipeError, StorageError

RECORD = "study.json"
BASE = "base.yaml"


@dataclass(frozen=True)
class StudyFolder:
    """Where a study keeps its trials, its pictures and, by default, its storage."""

    path: Path

    @property
    def record(self) -> Path:
        """What the study is, in JSON; it tells that the folder holds a study."""
        return self.path / RECORD

    @property
    def base(self) -> Path:
        """The recipe that trials change."""
        return self.path / BASE

    @property
    def processes(self) -> Path:
        """A file for each process that works on it, locked while it lives."""
        return self.path / "processes"

    @property
    def plots(self) -> Path:
        """History, importance, parallel coordinates."""
        return self.path / "plots"

    def new_trial(self, number: int) -> Path:
        """Where a trial that has no run yet gets one: never where another run lies, such as that of a study whose database was
        wiped, since that would be resumed and its score taken for this trial's.
        """
        name = f"trial-{number:04d}"
        found, again = self.path / name, 2
        while found.exists():
            found, again = self.path / f"{name}-{again}", again + 1
        return found

    def holds_a_study(self) -> bool:
        """Whether a search was begun here."""
        return self.record.is_file()

    def make(self) -> None:
        """Raises RecipeError where something else lies here, StorageError where it cannot be made."""
        try:
            if self.path.exists() and not self.path.is_dir():
                raise RecipeError(f"--folder {self.path}: is a file; name a new folder")
            if self.path.is_dir() and not self.holds_a_study() and any(self._foreign()):
                raise RecipeError(f"--folder {self.path}: is not empty and holds no study; name a new folder")
            self.processes.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be made: {error.strerror}; choose another with --folder") from error

    def _foreign(self) -> list[Path]:
        ours = (
            "processes",
            "study.db",
            "study.db-journal",
            "study.db.taking",
            "journal.log",
            "journal.log.lock",
            "logs",
            BASE,
        )
        return [path for path in self.path.iterdir() if path.name not in ours and not path.name.startswith(".")]


def newest_study(base: Path) -> StudyFolder | None:
    """The study under `base` that was last begun or gone on with."""
    found = [StudyFolder(path) for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
    studies = [one for one in found if one.holds_a_study()]
    return max(studies, key=lambda one: one.record.stat().st_mtime, default=None)
