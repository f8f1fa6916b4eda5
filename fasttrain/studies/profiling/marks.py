"""Owns the lines that torch's profiler (Kineto) marks its start and end with on stderr, which tell a reader nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

_MARKS = (b"USDT:", b"STAGE:")
"""Kineto's log level that leaves these out leaves out its errors too, such as a driver's refusal to count kernels."""


@contextlib.contextmanager
def unmarked_errors() -> Iterator[None]:
    """What is written to file descriptor 2 meanwhile, by C++ too, follows at the end without the marks.

    For moments: what is written in a process that is killed within is lost.
    """
    try:
        former = os.dup(2)
    except OSError:  # closed: nobody reads it
        yield
        return
    try:
        with tempfile.TemporaryFile() as kept:
            os.dup2(kept.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(former, 2)
                kept.seek(0)
                _pass_on(former, b"".join(line for line in kept if not line.startswith(_MARKS)))
    finally:
        os.close(former)


def _pass_on(descriptor: int, text: bytes) -> None:
    # A reader that is gone, or a full disk behind stderr, is no reason to lose the profile
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(descriptor, text) :]
