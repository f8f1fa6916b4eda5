"""Owns how fasttrain starts a process that runs a module of its own and is spoken to by lines through pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO


def start_own(module: str, stderr: int | IO[bytes] = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Starts `module` of this very fasttrain, wherever that was imported from, in a session of its own: Ctrl-C is for the process
    that asks to answer.
    """
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
