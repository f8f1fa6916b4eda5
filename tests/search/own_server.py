"""Database servers that a test starts on loopback: as whom, where, and when they listen."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest


def place_for(account: str, prefix: str) -> tuple[list[str], Path, int]:
    """The words that run a command as `account` where this is root, since servers refuse that; a folder of that account's, short
    enough for a socket's path; and a free port. Skips where there is no such account.
    """
    user = ["runuser", "-u", account, "--"] if os.getuid() == 0 else []
    if user and subprocess.run([*user, "true"], capture_output=True).returncode:
        pytest.skip(f"this is root, and there is no user {account} to start the server as")
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if user:
        shutil.chown(folder, account)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return user, folder, free.getsockname()[1]


def wait_for(port: int) -> None:
    """Until a server listens there, for 20 s at least."""
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.1)
