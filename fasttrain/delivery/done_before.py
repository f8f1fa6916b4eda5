"""Owns which predictions of a folder are done: complete, made by these weights of these inputs, and unchanged since."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fasttrain.delivery.trained import TrainedRun
from fasttrain.errors import StorageError
from fasttrain.samples import Case
from fasttrain.whole_files import ends_within_a_line

RECORD = ".fasttrain_predictions.jsonl"
"""In the folder of the predictions, a line a file. Of several about one any may hold: the last may be of what never came."""


class DoneBefore:
    """The record of `folder` for one run as it is opened. A line that cannot be read counts for nothing, so that what it told of
    is not taken for done.
    """

    def __init__(self, folder: Path, run: TrainedRun) -> None:
        self._path = folder / RECORD
        checkpoints = (
            [run.checkpoint] if run.checkpoint.is_file() else sorted(run.checkpoint.glob("fold_*/checkpoints/best.pt"))
        )
        self._made_by = {
            "weights": [_state(path) for path in checkpoints],
            "epoch": run.epoch,
            "mirror": list(run.recipe.validation.mirror),
        }
        self._lines: dict[str, list[Any]] = {}
        for line in _lines_of(self._path):
            try:
                record = json.loads(line)
                self._lines.setdefault(record["prediction"], []).append(record)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue

    def holds(self, case: Case, path: Path) -> bool:
        """Whether the prediction of a case is done."""
        lines = self._lines.get(path.name)
        return lines is not None and path.exists() and self._record(case, path, path) in lines

    def note(self, case: Case, path: Path, made: Path) -> None:
        """Writes down that the prediction of a case is done, which lies in `made` and is about to be renamed to `path`: before
        it is there, so that none can be there without. Raises StorageError where that cannot be written.
        """
        record = self._record(case, path, made)
        self._lines.setdefault(path.name, []).append(record)
        try:
            torn = self._path.exists() and ends_within_a_line(self._path)
            with self._path.open("ab") as stream:
                stream.write(b"\n" * torn + json.dumps(record, ensure_ascii=True).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror or error}") from error

    def _record(self, case: Case, path: Path, made: Path) -> dict[str, Any]:
        inputs = [_state(file) for image in case.images for file in _files_of(image)]
        output = [os.path.abspath(path), *_state(made)[1:]]
        return {"prediction": path.name, **self._made_by, "inputs": inputs, "output": output}


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _files_of(image: Path) -> Iterable[Path]:
    """A DICOM series is the files of its folder."""
    return sorted(path for path in image.rglob("*") if path.is_file()) if image.is_dir() else (image,)


def _state(path: Path) -> list[Any]:
    """What tells a file from one that was written in its place."""
    try:
        found = path.stat()
    except OSError:
        return [os.path.abspath(path)]
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]
