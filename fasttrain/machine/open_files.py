"""Owns how many files this process may have open at once."""

from __future__ import annotations

import contextlib
import resource


def open_file_limit() -> int | None:
    """The number of descriptors to which this process may raise itself; None: no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raise_open_file_limit() -> int | None:
    """Raises the limit to the hard one, which is all that an ordinary user may, and gives what it is then; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems (macOS) call the hard limit infinite and refuse what is above another bound of theirs
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft
