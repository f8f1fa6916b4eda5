"""Owns reading files before they are asked for, by threads of their own, while other work is waited for."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from fasttrain.data.nifti import is_nifti, read_file, read_header
from fasttrain.data.seen_files import SEEN, key_of
from fasttrain.errors import FasttrainError
from fasttrain.samples import Case


@contextlib.contextmanager
def reading_ahead(cases: Sequence[Case], threads: int) -> Iterator[None]:
    """A scope in which `threads` threads read the NIfTI files of `cases` in their order, as many as `SEEN` has room to keep.

    At its end files under way are read to theirs, and no further one is begun. A file that cannot be read is passed over: whoever
    asks for it is told so.
    """
    files = dict.fromkeys(path for case in cases for path in (*case.images, case.label) if path is not None)
    ahead = _Ahead([path for path in files if is_nifti(path)])
    readers = [
        threading.Thread(target=ahead.run, name=f"reading ahead {number}", daemon=True) for number in range(threads)
    ]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        ahead.ended.set()
        for reader in readers:
            reader.join()


class _Ahead:
    def __init__(self, files: Sequence[Path]) -> None:
        self.ended = threading.Event()
        self._todo = iter(files)
        self._taking = threading.Lock()

    def run(self) -> None:
        while not self.ended.is_set():
            with self._taking:
                path = next(self._todo, None)
            if path is None:
                return
            # What is not to be kept would be read for nothing
            with contextlib.suppress(FasttrainError, OSError, MemoryError):
                key = key_of(path)
                if key is not None and not SEEN.has(key) and _whole_bytes(path) <= SEEN.room_bytes:
                    read_file(path)


def _whole_bytes(path: Path) -> int:
    header = read_header(path)
    return math.prod(header.shape) * header.dtype.itemsize
