"""Owns lines of JSON over a socket between the search and one of its workers."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from typing import Any


class Lines:
    """Threads may send at once; one reads. What is sent to a side that has gone is lost without a word."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._left = b""
        self.over = False
        """True once the other side has gone."""

    def send(self, record: dict[str, Any]) -> None:
        """One line."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(record).encode() + b"\n")

    def next(self, seconds: float | None) -> dict[str, Any] | None:
        """The next line; None after so many seconds without one, and where there will be none any more."""
        while b"\n" not in self._left:
            if not select.select([self._connection], [], [], seconds)[0]:
                return None
            try:
                piece = self._connection.recv(1 << 16)
            except OSError:
                piece = b""
            if not piece:
                self.over = True
                return None
            self._left += piece
        line, self._left = self._left.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._connection.close()
