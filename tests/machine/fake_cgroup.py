"""Control groups made of plain files, as the kernel shows them."""

from __future__ import annotations

from pathlib import Path


def put(folder: Path, **files: object) -> None:
    """Writes the files of a group; `__` in a name stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def own(root: Path, text: str) -> Path:
    """What /proc/self/cgroup would say."""
    path = root.parent / "self"
    path.write_text(text)
    return path
