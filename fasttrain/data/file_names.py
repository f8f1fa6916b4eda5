"""Owns how names of files are compared and found: in one Unicode form, whatever the locale, and which are a system's own."""

from __future__ import annotations

import contextlib
import os
import unicodedata
from pathlib import Path

_LEFT_BEHIND = {
    ".ds_store", ".localized", ".appledouble", ".apdisk", "icon\r", "__macosx", ".spotlight-v100", ".trashes", ".fseventsd",
    ".temporaryitems", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information", ".directory",
    "@eadir", ".ipynb_checkpoints",
}  # fmt: skip


def as_text(name: str) -> str:
    """A name from the file system as the text that it is in UTF-8, composed (NFC).

    macOS stores ü as u and ¨ (NFD), others as they are given, so that one name would else be two; and where the locale is C,
    Python hands over the bytes of ü as two escapes. Bytes that are no UTF-8 stay escaped.
    """
    if name.isascii():
        return name
    # Not from this process's file system but from a document: text already
    with contextlib.suppress(UnicodeEncodeError):
        name = os.fsencode(name).decode("utf-8", "surrogateescape")
    return unicodedata.normalize("NFC", name)


def as_file_name(text: str) -> str:
    """The way back: text as the file system's functions of this process take it, whatever the locale."""
    return text if text.isascii() else os.fsdecode(text.encode("utf-8", "surrogateescape"))


def is_left_behind(name: str) -> bool:
    """Whether a file or folder of that name is a system's own: macOS's `._*` and `.DS_Store`, Windows' `Thumbs.db` and so on."""
    return name.startswith("._") or name.lower() in _LEFT_BEHIND


class FileFinder:
    """Finds the files that a document names; remembers the folders it had to list.

    A path is taken as written (relative to `folder`, or absolute), else with backslashes as slashes, else the one whose name
    differs in its Unicode form alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[Path, dict[str, str]] = {}

    def find(self, written: str) -> Path:
        """The path; where nothing of the kind is there, as it was written."""
        try:
            native = as_file_name(written)
        except UnicodeEncodeError:  # half a surrogate pair, which no file can be called
            return self._folder / written
        for path in (native, native.replace("\\", "/")):
            found = self._folder / path
            if os.path.exists(found):
                return found
            if not path.isascii() and os.path.exists(alike := self._alike(found)):
                return alike
        return self._folder / native

    def _alike(self, path: Path) -> Path:
        found = Path(path.anchor)
        for part in path.parts[1:] if path.anchor else path.parts:
            step = found / part
            if part.isascii() or os.path.exists(step):
                found = step
            else:
                found = found / self._names_in(found).get(as_text(part), part)
        return found

    def _names_in(self, folder: Path) -> dict[str, str]:
        if folder not in self._names:
            try:
                self._names[folder] = {as_text(name): name for name in os.listdir(folder)}
            except OSError:
                self._names[folder] = {}
        return self._names[folder]
