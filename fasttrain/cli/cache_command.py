"""Owns `data cache`: what fasttrain has stored on this machine, as a table, and the freeing of its space."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fasttrain.cli.figures import one_line
from fasttrain.cli.printing import print_json, print_table, tell
from fasttrain.errors import EXIT_DONE, EXIT_STORAGE, RecipeError, StorageError

if TYPE_CHECKING:
    from fasttrain.data.inventory import Cleared, StoredSet

_DAY_SECONDS = 86400.0
_SHOWN_DIGITS = 12


def cache_command(
    listed: Annotated[
        bool, typer.Option("--list", help="Show what is stored (done where --clean is not given).")
    ] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove it, but for what a running process uses.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", help="Only what was last used so many days ago.", metavar="DAYS", min=0.0),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Only volumes stored for the recipe of this name.", metavar="NAME")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Look in this data.cache.folder, not in the usual one.", metavar="DIR"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Show or remove what runs have stored: preprocessed volumes, facts of checked files, compiled code.

    All of it is made again when it is needed. The usual folder is $FASTTRAIN_CACHE, else the user's cache folder, else
    ./runs/.fasttrain-cache.
    """
    if listed and clean:
        raise RecipeError("--list and --clean exclude each other; give one of them")
    where, sets, nothing = _chosen(folder, recipe, older_than)
    if clean:
        return _clean(where, sets, nothing, json)
    if json:
        print_json(
            {"folder": str(where), "sets": [_record(one) for one in sets], "bytes": sum(one.bytes for one in sets)}
        )
    else:
        _show(where, sets, nothing)
    return EXIT_DONE


def _chosen(folder: Path | None, recipe: str | None, older_than: float | None) -> tuple[Path, list[StoredSet], str]:
    """The folder, the sets that were asked for, and what to say where these are none."""
    from fasttrain.data.inventory import find_sets
    from fasttrain.machine.cache_folder import own_cache_folder

    if folder is not None:
        where = folder.expanduser().absolute()
        if not where.is_dir():
            what = "is a file" if where.exists() else "does not exist"
            raise RecipeError(f"--folder {where} {what}; name a data.cache.folder, or leave it out for the usual one")
        sets = find_sets(None, where)
    else:
        where = own_cache_folder()
        sets = find_sets(where, where / "volumes")
    nothing = f"nothing is stored in {where}" + ("" if where.is_dir() else ", which does not exist yet")
    if recipe is not None and sets:
        names = sorted({name for one in sets if one.note is not None for name in one.note.recipes})
        if recipe not in names:
            known = f"volumes are stored for {', '.join(names)}" if names else "no volumes are stored"
            nothing = f"nothing is stored for the recipe {recipe} in {where}; {known}"
        sets = [one for one in sets if one.note is not None and recipe in one.note.recipes]
    if older_than is not None:
        now = time.time()
        # What a clock that went wrong dated in the future was used just now
        older = [one for one in sets if max(now - one.last_used, 0.0) >= older_than * _DAY_SECONDS]
        if sets and not older:
            nothing = f"nothing in {where} was last used {older_than:g} days ago or earlier"
        sets = older
    return where, sorted(sets, key=lambda one: (one.kind, -one.last_used, one.name)), nothing


def _show(where: Path, sets: list[StoredSet], nothing: str) -> None:
    if not sets:
        print(one_line(nothing))
        return
    head = ("kind", "name", "entries", "size", "last used", "type", "part", "recipes", "data")
    print_table([head, *(tuple(map(one_line, _row(one))) for one in sets)])
    print(one_line(f"{_size_text(sum(one.bytes for one in sets))} in {where}"))


def _row(one: StoredSet) -> tuple[str, ...]:
    note = one.note
    used = datetime.datetime.fromtimestamp(one.last_used).strftime("%Y-%m-%d %H:%M")
    of_note = ("–",) * 4 if note is None else (note.dtype, note.part, ", ".join(note.recipes), ", ".join(note.data))
    entries = "–" if one.entries is None else str(one.entries)
    return (one.kind, one.name[:_SHOWN_DIGITS], entries, _size_text(one.bytes), used, *of_note)


def _clean(where: Path, sets: list[StoredSet], nothing: str, as_json: bool) -> int:
    """Raises StorageError, after all else is done, with what could not be removed though nobody uses it."""
    from fasttrain.data.inventory import clear

    done = clear(sets)
    freed = sum(one.freed_bytes for one in done)
    faults = [f"{one.stored.path}: {one.left}; remove it by hand, as its owner" for one in done if one.failed]
    if as_json:
        records = [_cleared_record(one) for one in done]
        print_json({"folder": str(where), "sets": records, "freed_bytes": freed, "faults": faults})
        for fault in faults:  # not raised, since the document is written
            tell(f"fasttrain: {one_line(fault)}")
        return EXIT_STORAGE if faults else EXIT_DONE
    for one in done:
        _tell_cleared(one)
    print(one_line(f"freed {_size_text(freed)} in {where}" if done else nothing))
    if faults:
        raise StorageError(faults)
    return EXIT_DONE


def _tell_cleared(one: Cleared) -> None:
    stored = one.stored
    for_whom = f" for {', '.join(stored.note.recipes)}" if stored.note is not None else ""
    if one.left is None:
        print(one_line(f"removed {stored.kind} {stored.path}{for_whom}: {_size_text(one.freed_bytes)}"))
    elif not one.failed:
        tell(one_line(f"fasttrain: {stored.kind} {stored.path}{for_whom} is left: {one.left}"))
    if one.others:
        tell(one_line(f"fasttrain: {stored.path} holds {one.others} more that fasttrain did not write"))


def _record(one: StoredSet) -> dict[str, Any]:
    note = one.note
    return {
        "kind": one.kind,
        "name": one.name,
        "path": str(one.path),
        "entries": one.entries,
        "bytes": one.bytes,
        "last_used": datetime.datetime.fromtimestamp(one.last_used, datetime.timezone.utc).isoformat(
            timespec="seconds"
        ),
        "made": None if note is None else note.made,
        "storage_dtype": None if note is None else note.dtype,
        "part": None if note is None else note.part,
        "recipes": [] if note is None else list(note.recipes),
        "data": [] if note is None else list(note.data),
    }


def _cleared_record(one: Cleared) -> dict[str, Any]:
    return {**_record(one.stored), "freed_bytes": one.freed_bytes, "left": one.left, "others": one.others}


def _size_text(count: int) -> str:
    """`31.2 MiB`, in the largest unit of which there is one."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
