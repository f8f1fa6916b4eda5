"""Owns what Optuna's journal file lacks on a disk that may fill up and under processes that may be killed: no half line stays.

Optuna's own (`JournalFileBackend.append_logs`, 5.0) appends to whatever is there. Where a write was cut short, the next record
then stands in one line with the half, and nobody can read the study from there on.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from fasttrain.whole_files import ends_within_a_line

_PIECE = 1 << 16


class WholeLineJournal(JournalFileBackend):
    """Optuna's journal file, which stays readable whatever ends a write."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends all of `logs` or none; raises OSError where the disk does not take them."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._lock.acquire()
        try:
            if ends_within_a_line(Path(self._file_path)):
                # Of a process that ended as it wrote: nobody was told that this was kept
                os.truncate(self._file_path, _whole_end(self._file_path))
            end = os.path.getsize(self._file_path)
            try:
                with open(self._file_path, "ab") as file:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                # It is asked again, and would stand there twice
                with contextlib.suppress(OSError):
                    os.truncate(self._file_path, end)
                raise
        finally:
            self._lock.release()


def _whole_end(path: str) -> int:
    """The size in bytes up to the end of the last whole line."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size > 0:
            start = max(size - _PIECE, 0)
            file.seek(start)
            found = file.read(size - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            size = start
    return 0
