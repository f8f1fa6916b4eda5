"""Owns how counts and lists are written in a sentence: `1 epoch`, `3 epochs`, sizes (`1.5 GiB`), a few of many names."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 case`, `1,204 cases`; `plural` where it is not the noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c …`: the first of them, and a sign where there are more."""
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")


def size_in_memory(count: float, decimals: int | None = None) -> str:
    """Bytes as `31 MiB`, from one GiB on as `1.5 GiB`, what is less than one MiB as `640 KiB` or `12 bytes`.

    decimals: as many, in the same unit.
    """
    for unit, size, usual in (("GiB", 1 << 30, 1), ("MiB", 1 << 20, 0), ("KiB", 1 << 10, 0)):
        if count >= size:
            return f"{count / size:.{usual if decimals is None else decimals}f} {unit}"
    return counted(round(count), "byte")


def sizes_apart(needed: float, free: float) -> tuple[str, str]:
    """Two sizes in bytes for one sentence, with as many decimals as it takes to tell them apart."""
    texts = size_in_memory(needed), size_in_memory(free)
    for decimals in range(1, 10):
        if texts[0] != texts[1] or needed == free:
            break
        texts = size_in_memory(needed, decimals), size_in_memory(free, decimals)
    return texts
