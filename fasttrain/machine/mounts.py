"""Owns what a folder lies on: its mount, read from /proc/self/mountinfo, and whether that outlives the machine or container."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fasttrain.machine.limits import disk_free_bytes

_MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
_LAYERS = ("overlay", "aufs", "fuse.fuse-overlayfs")
_OVER_THE_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "wekafs", "9p", "virtiofs", "afs",
)  # fmt: skip
_OF_THE_SYSTEM = ("proc", "sysfs", "dev", "cgroup", "mqueue", "fuse.lxcfs", "squashfs", "securityfs", "debugfs", "nsfs")
_SYSTEM_PLACES = (
    "/proc",
    "/sys",
    "/dev",
    "/etc",
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/boot",
    "/run",
    "/var/run",
)
_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_MARKING = ("RUNPOD_POD_ID", "KUBERNETES_SERVICE_HOST", "container", "SINGULARITY_CONTAINER", "APPTAINER_CONTAINER")

Fate = Literal["memory", "container", "volume", "network", "disk"]
"""What becomes of files: lost with the container or machine (in memory, or in the container's own layer); kept on a volume of
the container, over the network, or on a disk of this machine.
"""


@dataclass(frozen=True)
class Mount:
    """`place`: where it is mounted; `kind`: the file system's type; `source`: the device or server."""

    place: Path
    kind: str
    source: str


def mount_of(folder: Path, mounts: str | None = None) -> Mount | None:
    """The deepest mount that holds `folder` (or will), of two at one place the later one, which covers the other.

    `mounts` is the text of /proc/self/mountinfo; None where there is none, as on macOS.
    """
    text = _text() if mounts is None else mounts
    best: Mount | None = None
    folder = _there(folder).resolve()
    for line in (text or "").splitlines():
        mount = _mount(line)
        if mount is None or mount.place not in (folder, *folder.parents):
            continue
        if best is None or len(mount.place.parts) >= len(best.place.parts):
            best = mount
    return best


def fate_of(mount: Mount, in_a_container: bool) -> Fate:
    """What becomes of files on a mount when the container or the machine ends.

    A container's root is its own layer whatever its type: containerd can make it of btrfs, zfs or a block device, too.
    """
    if mount.kind in IN_MEMORY:
        return "memory"
    if mount.kind in _LAYERS:
        return "container"
    if mount.kind in _OVER_THE_NETWORK or mount.kind.startswith("fuse"):
        return "network"
    if in_a_container:
        return "container" if mount.place == Path("/") else "volume"
    return "disk"


def kept_places(in_a_container: bool, mounts: str | None = None) -> list[Path]:
    """Folders on volumes that outlive the container and can be written, the roomiest first; none on a plain machine."""
    lines = ((_text() if mounts is None else mounts) or "").splitlines()
    found = {
        mount.place
        for mount in filter(None, map(_mount, lines))
        if fate_of(mount, in_a_container) in ("volume", "network") and not mount.kind.startswith(_OF_THE_SYSTEM)
    }
    places = [
        place
        for place in found
        if not any(place.is_relative_to(top) for top in _SYSTEM_PLACES)
        and place.is_dir()
        and os.access(place, os.W_OK | os.X_OK)
    ]
    return sorted(places, key=lambda place: (-disk_free_bytes(place), str(place)))


def in_container(environ: Mapping[str, str], mounts: str | None = None) -> bool:
    """Whether this process lives in a container, by the marks that Docker, Podman, Kubernetes and RunPod leave."""
    if any(environ.get(name) for name in _MARKING) or any(mark.exists() for mark in _MARKS):
        return True
    root = mount_of(Path("/"), mounts)
    return root is not None and root.kind in _LAYERS


def _there(folder: Path) -> Path:
    folder = folder.absolute()
    return next((place for place in (folder, *folder.parents) if place.exists()), folder)


def _text() -> str | None:
    try:
        return _MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return None


def _mount(line: str) -> Mount | None:
    """`36 35 98:0 /root /place rw,noatime master:1 - ext3 /dev/root rw`; the fields before the dash vary in number (proc(5))."""
    before, dash, after = line.partition(" - ")
    first, last = before.split(" "), after.split(" ")
    if not dash or len(first) < 6 or len(last) < 2:
        return None
    return Mount(Path(_unescaped(first[4])), last[0], _unescaped(last[1]))


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\043", "#"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
