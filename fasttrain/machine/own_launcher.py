"""Owns what the ranks of `--gpus N` and the fasttrain that started them tell each other: notes in a folder of the launch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "FASTTRAIN_LAUNCHER"
"""`PID:FOLDER` of the process that started this rank; not set where another launcher did."""
_ASKED = "asked"
_UNSAID = "unsaid"


class OwnLauncher:
    """A launch, seen from a rank or from the process `pid` that began it."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self.folder = folder

    @property
    def variable(self) -> str:
        """What the ranks find in their environment."""
        return f"{self.pid}:{self.folder}"

    @property
    def asked(self) -> bool:
        """Whether the user asked for the stop: else a SIGTERM is the launcher's own, since another rank has ended."""
        return (self.folder / _ASKED).exists()

    @property
    def unsaid(self) -> bool:
        """Whether a signal ended the first rank so early that it left the word to who started it."""
        return (self.folder / _UNSAID).exists()

    def ask(self) -> None:
        """The user asks for a stop, of which all ranks are told next."""
        self._write(_ASKED, "")

    def tell(self, **values: Any) -> None:
        """For the launcher to know at the end: `run`, the folder; `in_use`; `lost`, a sentence. The first of a kind stands."""
        for name, value in values.items():
            self._write(f"{name}.json", json.dumps(value))

    def told(self, name: str) -> Any:
        """What a rank told of that kind; None: nothing."""
        try:
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _write(self, name: str, text: str) -> None:
        # Whole from the start, and once: ranks may tell the same at the same time
        part = self.folder / f".{name}.{os.getpid()}"
        with contextlib.suppress(OSError):
            part.write_text(text, encoding="utf-8")
            try:
                os.link(part, self.folder / name)
            finally:
                part.unlink()


def own_launcher(environ: Mapping[str, str] = os.environ) -> OwnLauncher | None:
    """The launch that this process is a rank of; None where another launcher started it, or none."""
    pid, _, folder = environ.get(VARIABLE, "").partition(":")
    if not pid.isdecimal() or not folder or int(pid) == os.getpid():
        return None
    return OwnLauncher(int(pid), Path(folder))
