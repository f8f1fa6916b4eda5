"""Owns the note that lies beside stored volumes: for which recipes and data they were made, and when they were last used."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fasttrain.data.inventory.places import NOTE_FILE
from fasttrain.machine.own_files import make_way, read_regular
from fasttrain.whole_files import without_half_pairs


@dataclass(frozen=True)
class Note:
    """What a set holds, for people: nothing is decided by it but what `data cache --recipe` selects.

    `recipes` and `data` are all that ever opened the set (two recipes that preprocess alike share one), `part` is `training` or
    `validation`, `made` a time in ISO 8601, `entries` the volumes where their files do not show it.
    """

    recipes: tuple[str, ...]
    data: tuple[str, ...]
    part: str
    dtype: str
    made: str
    entries: int | None = None


def note_use(folder: Path, recipe: str, data: str, part: str, dtype: str, entries: int | None = None) -> None:
    """Adds a use to the note in `folder`, whose time of change is that of the last use; leaves it where it cannot be written."""
    former = read_note(folder)
    if former is None:
        made = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        former = Note((), (), part, dtype, made)
    note = replace(
        former,
        recipes=tuple(sorted({*former.recipes, recipe})),
        data=tuple(sorted({*former.data, data})),
        entries=former.entries if entries is None else entries,
    )
    text = without_half_pairs(json.dumps(asdict(note), indent=2, ensure_ascii=False))
    temporary = folder / f".{NOTE_FILE}.{secrets.token_hex(4)}.part"
    # A cache that may only be read serves what it has, and a note that is lost costs nothing
    with contextlib.suppress(OSError):
        try:
            temporary.write_text(text + "\n", encoding="utf-8")
            make_way(folder / NOTE_FILE)
            os.replace(temporary, folder / NOTE_FILE)
        finally:
            temporary.unlink(missing_ok=True)


def read_note(folder: Path) -> Note | None:
    """None where there is none, or none that fasttrain wrote."""
    try:
        found = json.loads(read_regular(folder / NOTE_FILE).decode())
        note = Note(
            recipes=tuple(found["recipes"]),
            data=tuple(found["data"]),
            part=found["part"],
            dtype=found["dtype"],
            made=found["made"],
            entries=found["entries"],
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    texts = (*note.recipes, *note.data, note.part, note.dtype, note.made)
    sound = all(isinstance(text, str) for text in texts) and (note.entries is None or type(note.entries) is int)
    return note if sound else None
