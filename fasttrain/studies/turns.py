"""Owns what is said where two studies measure on one device at once: each takes from the other, and neither would know."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fasttrain.telemetry.events import Event, Message


@contextlib.contextmanager
def told_of_others(
    cache: Path, machine: Mapping[str, Any], emit: Callable[[Event], None], ranks: int = 1
) -> Iterator[None]:
    """A scope in which this process measures on a device, or so many ranks on as many; a warning where another does so already.

    It is known by a lock on a file of the cache folder, which ends with the process however that ends.
    """
    several = ranks > 1 and machine.get("gpu_bytes") is not None
    devices = [f"cuda:{rank}" for rank in range(ranks)] if several else [machine.get("device")]
    with contextlib.ExitStack() as stack:
        # Where there is nowhere to write, or no locks are known, nothing can be said
        with contextlib.suppress(OSError):
            try:
                for device in devices:
                    name = f"{os.uname().nodename} {device} {machine.get('device_name')}"
                    path = cache / "tuned" / f"measuring-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
                    stream = stack.enter_context(open(path, "ab"))
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                emit(
                    Message(
                        f"another tune or tune-batch measures on {machine.get('device_name')} now, so the rates of both come "
                        "out too low, and less memory is free; measure again once it has ended",
                        "warning",
                    )
                )
        yield
