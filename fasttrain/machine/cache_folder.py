"""Owns where fasttrain keeps what it can make again: preprocessed volumes, compiled code, tuned settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from fasttrain.machine.mounts import fate_of, mount_of


def cache_folder(
    environ: Mapping[str, str], runs: Path, lasts: Callable[[Path], bool] | None = None
) -> tuple[Path, str]:
    """The folder, which need not exist yet, and why it is that one.

    `$FASTTRAIN_CACHE`; else `$XDG_CACHE_HOME/fasttrain` or `$HOME/.cache/fasttrain`, where that can be written and outlives the
    machine; else `.fasttrain-cache` in `runs`, the folder that runs lie in: on a rented pod HOME ends with the container, and
    what the runs lie on is what its user keeps. `lasts` says whether a folder can be written and is kept (default: `is_kept`).
    """
    if given := environ.get("FASTTRAIN_CACHE"):
        return Path(given).expanduser().absolute(), "$FASTTRAIN_CACHE"
    users = _users_folder(environ)
    if users is not None and (lasts or is_kept)(users):
        return users / "fasttrain", "the user's cache folder"
    why = "HOME is not set" if users is None else f"{users} is not kept or cannot be written"
    return runs.absolute() / ".fasttrain-cache", f"beside the runs, since {why}"


def is_kept(folder: Path, mounts: str | None = None) -> bool:
    """Whether a folder, or the nearest one above it that there is, can be written and lies on a disk that outlives the machine.

    A container's own layer (overlay, aufs) and memory (tmpfs, ramfs) do not. `mounts` is the text of /proc/self/mountinfo; where
    there is none, as on macOS, every disk counts as kept.
    """
    there = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    if there is None or not os.access(there, os.W_OK | os.X_OK):
        return False
    mount = mount_of(there, mounts)
    return mount is None or fate_of(mount, in_a_container=False) not in ("memory", "container")


def own_cache_folder() -> Path:
    """That of this process, whose runs lie in `./runs`."""
    return cache_folder(os.environ, Path("runs"))[0]


def _users_folder(environ: Mapping[str, str]) -> Path | None:
    # By the XDG standard a relative path there is to be ignored
    given, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if given.startswith("/"):
        return Path(given)
    return Path(home) / ".cache" if home.startswith("/") else None
