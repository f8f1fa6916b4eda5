"""Owns the look at disks: whether what a run writes outlives the container, how much room there is, and how fast they are."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fasttrain.machine.diagnosis.finding import Finding, Scene, in_a_line
from fasttrain.machine.hardware import GIB
from fasttrain.machine.limits import disk_free_bytes
from fasttrain.machine.mounts import Mount, fate_of, kept_places, mount_of
from fasttrain.machine.patience import within
from fasttrain.wording import size_in_memory

_LITTLE_ROOM = 2 * GIB
_NO_ROOM = 64 << 20
_BLOCK = 4 << 20
_MOST_WRITTEN, _MOST_READ = 64 << 20, 128 << 20
_SECONDS = 1.0
"""That a disk is measured for; a slow one is stopped after the block that it is at."""
_PATIENCE_SECONDS = 8.0
_SLOW_WRITE, _SLOW_READ = 20e6, 30e6
_MOST_ENTRIES = 2000
_IMAGES = (".nii.gz", ".nii")


def volumes(scene: Scene) -> Iterator[Finding]:
    """What becomes of runs, caches and data when the pod, the container or the machine ends."""
    places = [("runs", scene.runs), ("caches", scene.cache)]
    if scene.data is not None:
        places.append(("data", scene.data))
    for what, folder in places:
        mount = mount_of(folder)
        if mount is not None:
            yield fate_finding(what, folder, mount, scene)


def fate_finding(what: str, folder: Path, mount: Mount, scene: Scene) -> Finding:
    """Runs and caches that end with the container are a warning; data can be fetched again."""
    name, fate = f"{what} volume", fate_of(mount, scene.container)
    lies = f"{folder} lies on {mount.place} ({mount.kind})"
    if fate == "disk":
        return Finding(name, "ok", f"{lies}, a disk of this machine")
    if fate == "network":
        return Finding(name, "ok", f"{lies}, which outlives the container")
    if fate == "volume":
        return Finding(name, "ok", f"{lies}, {_volume(scene)}")
    lost = "in memory and ends with the machine" if fate == "memory" else "the container's own disk, which ends with it"
    if what == "data":
        return Finding(name, "ok", f"{lies}: {lost}; the data will have to be fetched again")
    kept = next(iter(kept_places(scene.container)), None)
    if kept is None:
        mend = "mount a volume (docker run -v DIR:/workspace …; on a pod, a volume or network volume), and write there"
    elif what == "runs":
        mend = f"cd {kept} before training, or train --run {kept / 'runs'}/NAME"
    else:
        mend = f"export FASTTRAIN_CACHE={kept / '.fasttrain-cache'}"
    return Finding(name, "warning", f"{lies}: {lost}", mend)


def space(scene: Scene) -> Iterator[Finding]:
    """Free room of the disks that runs and caches are written to, against what is known to be needed."""
    yield space_finding("runs space", scene.runs, None if scene.need is None else scene.need())
    if _device(scene.cache) != _device(scene.runs):
        yield space_finding("caches space", scene.cache, None)


def space_finding(name: str, folder: Path, need_bytes: int | None) -> Finding:
    """A fault where a run could not keep its checkpoints."""
    there = _there(folder)
    if _read_only(there):
        return Finding(
            name, "fault", f"the disk of {there} is read-only", "df -h; mount -o remount,rw, or --run another folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, "fault", f"{there} cannot be written", f"chmod u+wx {there}, or --run another folder")
    free = disk_free_bytes(folder)
    told = f"{size_in_memory(free)} free"
    mend = "fasttrain data cache --clean; remove runs and checkpoints that are not needed (du -sh runs/*)"
    if need_bytes is not None:
        told = f"{told}, {size_in_memory(need_bytes)} needed for the checkpoints of this recipe"
    if free < max(_NO_ROOM, need_bytes or 0):
        return Finding(name, "fault", told, mend)
    if free < max(_LITTLE_ROOM, 2 * (need_bytes or 0)):
        return Finding(name, "warning", f"{told}; that is little", mend)
    return Finding(name, "ok", told)


def speed(scene: Scene) -> Iterator[Finding]:
    """How fast the disk of runs is written, and that of data is read."""
    try:
        written = within(_PATIENCE_SECONDS, lambda: write_rate(_there(scene.runs)))
    except Exception as error:
        yield Finding("runs speed", "warning", f"cannot be written: {_told(error)}", "df -h; mount")
    else:
        if written is not None:
            yield _rate_finding(
                "runs speed", "written", written, _SLOW_WRITE, "a checkpoint will be waited for", "--run a local disk"
            )
    if scene.data is None:
        told = "no data folder to read: $FASTTRAIN_DATA is not set and ./data is not there"
        yield Finding("data speed", "ok", f"{told} (--data DIR names one)")
        return
    data = scene.data
    try:
        read = within(_PATIENCE_SECONDS, lambda: read_rate(data))
    except Exception as error:
        yield Finding(
            "data speed", "fault", f"{data} cannot be read: {_told(error)}", "df -h; mount; fasttrain check --data DIR"
        )
    else:
        if read is None:
            yield Finding("data speed", "ok", f"{data} holds no image to read")
        else:
            mend = f"cp -r {data} to a local disk, and --data there"
            yield _rate_finding("data speed", "read", read, _SLOW_READ, "the first epoch will wait for it", mend)


def write_rate(folder: Path) -> float | None:
    """Bytes a second that reach the disk, of a file that is removed again; None where there is too little room to try."""
    if disk_free_bytes(folder) < 2 * _MOST_WRITTEN:
        return None
    path = folder / f".fasttrain-doctor-{os.getpid()}.part"
    block, written = os.urandom(_BLOCK), 0
    try:
        began = time.perf_counter()
        with open(path, "xb", buffering=0) as stream:
            while written < _MOST_WRITTEN and time.perf_counter() - began < _SECONDS:
                written += stream.write(block)
                os.fsync(stream.fileno())
        return written / (time.perf_counter() - began)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def read_rate(folder: Path) -> float | None:
    """Bytes a second of the images in a folder, read past the system's memory of them where it lets go; None: no images."""
    files = _largest_images(folder)
    if not files:
        return None
    read, spent = 0, 0.0
    for path in files:
        with open(path, "rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while (block := stream.read(_BLOCK)) and spent + time.perf_counter() - began < _SECONDS:
                read += len(block)
                if read >= _MOST_READ:
                    break
            spent += time.perf_counter() - began
        if spent >= _SECONDS or read >= _MOST_READ:
            break
    return read / max(spent, 1e-6) if read else None


def _largest_images(folder: Path) -> list[Path]:
    found: list[tuple[int, Path]] = []
    seen = 0
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders.sort()
        for name in sorted(names):
            seen += 1
            path = Path(place, name)
            if name.endswith(_IMAGES) and path.is_file():
                found.append((path.stat().st_size, path))
            if seen >= _MOST_ENTRIES:
                return [path for _, path in sorted(found, reverse=True)[:16]]
    return [path for _, path in sorted(found, reverse=True)[:16]]


def _raise(error: OSError) -> None:
    raise error


def _rate_finding(name: str, done: str, rate: float, slow: float, costs: str, mend: str) -> Finding:
    told = f"{done} at {rate / 1e6:,.0f} MB/s"
    return Finding(name, "ok", told) if rate >= slow else Finding(name, "warning", f"{told}; {costs}", mend)


def _volume(scene: Scene) -> str:
    if scene.environ.get("RUNPOD_POD_ID") is None:
        return "a volume of its own, which outlives the container"
    if scene.environ.get("RUNPOD_VOLUME_ID"):
        return "a network volume, which outlives the pod"
    return "the pod's volume, which outlives a stop of the pod but not its termination"


def _there(folder: Path) -> Path:
    folder = folder.absolute()
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))


def _read_only(folder: Path) -> bool:
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _device(folder: Path) -> int | None:
    try:
        return _there(folder).stat().st_dev
    except OSError:
        return None


def _told(error: Exception) -> str:
    return (
        in_a_line(error)
        if isinstance(error, TimeoutError)
        else str(getattr(error, "strerror", None) or in_a_line(error))
    )
