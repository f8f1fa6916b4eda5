"""Owns the line between two ranks beside what they compute: JSON, a message a line, over a socket of their own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

_SECONDS_TO_SEND = 2.0
_MOST_WITHOUT_A_LINE = 1 << 20


class Wire:
    """One end. Messages are said from any thread, and heard by one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(_SECONDS_TO_SEND)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def say(self, message: dict[str, Any]) -> bool:
        """Whether it could be handed to the system; that it arrives shows by an answer alone."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            return True
        except (OSError, ValueError):
            return False

    def hear(self) -> list[dict[str, Any]] | None:
        """What has come, without waiting; None where the other end is closed, or is none of ours."""
        try:
            came = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError, TimeoutError):
            return []
        except OSError:
            return None
        if not came:
            return None
        *lines, self._rest = (self._rest + came).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        if len(self._rest) > _MOST_WITHOUT_A_LINE or not all(isinstance(message, dict) for message in messages):
            return None
        return messages

    def close(self) -> None:
        """Nothing more is said."""
        with contextlib.suppress(OSError):
            self._socket.close()


def listen() -> socket.socket:
    """A socket at a free port of all of this machine's addresses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
