"""Owns what this process may use of the host: CPUs by affinity and cgroup quota, memory by cgroup limit, shared memory.

Inside a container psutil and os.cpu_count report the host's numbers; the kernel enforces these.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from pathlib import Path

from fasttrain.errors import MachineError

_CGROUP = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_PROCESS_LIMITS = ((resource.RLIMIT_AS, "vms", "-v"), (resource.RLIMIT_DATA, "data", "-d"))
"""Each with psutil's name for what counts against it, and the option by which a shell sets it."""


def cpu_limit(cgroup: Path = _CGROUP, own_group: Path = Path("/proc/self/cgroup")) -> int:
    """CPUs this process may keep busy: the affinity mask, cut by the cgroup's quota (v2 `cpu.max`, v1 `cpu.cfs_quota_us`)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quotas = [quota for folder in _folders(cgroup, own_group, "cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([count, *(int(quota) for quota in quotas)]))


def memory_limit_bytes(cgroup: Path = _CGROUP, own_group: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest cgroup memory limit over this process (v2 `memory.max`, v1 `memory.limit_in_bytes`); None: no limit."""
    limits = []
    for folder in _folders(cgroup, own_group, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            # v1 writes "no limit" as a huge number near 2**63
            if text is not None and text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def disk_free_bytes(folder: Path) -> int:
    """What an ordinary user may still write where `folder` lies or will lie; 0 where that cannot be found out."""
    there = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    try:
        usage = os.statvfs(there or folder)
    except OSError:
        return 0
    return usage.f_bavail * usage.f_frsize


def memory_free_bytes(cgroup: Path = _CGROUP, own_group: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that can still be taken: the host's available memory, or what the cgroup's limit leaves, if that is less."""
    return memory_free(cgroup, own_group)[0]


def memory_free(cgroup: Path = _CGROUP, own_group: Path = Path("/proc/self/cgroup")) -> tuple[int, str]:
    """`memory_free_bytes`, and what bounds it: `the host`, `the cgroup's limit`, or a limit that a shell set (`ulimit -v`).

    Raises MachineError where the system tells of no memory at all.
    """
    free, bound = _host_free(), "the host"
    for folder in _folders(cgroup, own_group, "memory"):
        for limit_name, use_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, use = _read(folder / limit_name), _read(folder / use_name)
            if limit is not None and use is not None and limit.isdigit() and use.isdigit() and int(limit) < 1 << 60:
                # The page cache counts as use but is given back on demand
                left = int(limit) - int(use) + _reclaimable(folder)
                if left < free:
                    free, bound = left, "the cgroup's limit"
    for left, by in _limits_left():
        if left < free:
            free, bound = left, by
    return max(free, 0), bound


def _host_free() -> int:
    import psutil

    try:
        return int(psutil.virtual_memory().available)
    except (OSError, psutil.Error, ValueError, KeyError):
        # Without /proc the C library still asks the kernel, which then counts no page cache that it would give back
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            raise MachineError(
                "how much memory is free cannot be found out, since /proc is not there; mount it (`mount -t proc proc /proc`)"
            ) from None


def _limits_left() -> list[tuple[int, str]]:
    """What the limits of a process leave of this one's address space and data, each with the name that a message has for it."""
    import psutil

    limits = [(resource.getrlimit(number)[0], used, name) for number, used, name in _PROCESS_LIMITS]
    bounded = [one for one in limits if one[0] != resource.RLIM_INFINITY]
    if not bounded:
        return []
    try:
        mine = psutil.Process().memory_info()
    except (OSError, psutil.Error):
        mine = None
    return [
        (limit - int(getattr(mine, used, 0)), f"the limit of this process (ulimit {name})")
        for limit, used, name in bounded
    ]


def oom_kills(cgroup: Path = _CGROUP, own_group: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many processes of this cgroup the system has killed for want of memory (`oom_kill` of v2 `memory.events`, of v1
    `memory.oom_control`); None where the kernel does not say.
    """
    for folder in _folders(cgroup, own_group, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            for line in (_read(folder / name) or "").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdigit():
                    return int(value)
    return None


def shared_memory_free_bytes(folder: Path = _SHARED_MEMORY) -> int | None:
    """What may still be written to shared memory, 0 where there is none to use; None where nothing bounds it."""
    if not _locks_can_be_made():
        return 0
    if sys.platform != "linux":
        return None
    try:
        room = os.statvfs(folder)
    except OSError:
        return 0
    if not os.access(folder, os.W_OK | os.X_OK) or room.f_flag & os.ST_RDONLY:
        return 0
    # A tmpfs that was mounted without a bound says so by having no blocks
    return room.f_bavail * room.f_frsize if room.f_blocks else None


def _locks_can_be_made() -> bool:
    """Whether processes can share a lock, which each queue between them needs and which Linux keeps in /dev/shm as well."""
    try:
        multiprocessing.Lock()
    except (OSError, ImportError):
        return False
    return True


def _folders(cgroup: Path, own_group: Path, controller: str) -> list[Path]:
    """The cgroup folders that bind this process: its own and every parent up to the mount, v2 and v1 layouts alike."""
    folders = []
    for line in (_read(own_group) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = cgroup
        elif controller in controllers.split(","):
            base = cgroup / controller if (cgroup / controller).is_dir() else cgroup / controllers
        else:
            continue
        own = base / path.lstrip("/")
        folders += [own, *[parent for parent in own.parents if base == parent or base in parent.parents]]
    return [*folders, cgroup, cgroup / controller]


def _quota(folder: Path) -> float | None:
    text = _read(folder / "cpu.max")
    if text is not None:
        parts = text.split()
        if len(parts) == 2 and all(part.isdigit() for part in parts) and int(parts[1]):
            return int(parts[0]) / int(parts[1])
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    # v1 writes "no quota" as -1
    if quota is not None and period is not None and quota.isdigit() and period.isdigit() and int(quota) and int(period):
        return int(quota) / int(period)
    return None


def _reclaimable(folder: Path) -> int:
    found = dict(line.split(" ", 1) for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
    # v1 counts a group alone in `inactive_file`, with its children in the total; its use and limit count the children
    value = found.get("total_inactive_file", found.get("inactive_file", "0"))
    return int(value) if value.isdigit() else 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
