"""Owns how CUDA reads CUDA_VISIBLE_DEVICES: indices, UUIDs in full or short, MIG instances, and what hides every GPU.

CUDA reads entries from the left and stops at the first that names no card; what came before counts. A card named twice leaves
none at all. The same rules stand in torch/cuda/__init__.py (`_parse_visible_devices`); its authors compared them with the driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"
_NUMBER = re.compile(r"[+-]?\d+")
_UUIDS = ("GPU-", "MIG-")


@dataclass(frozen=True)
class Chosen:
    """`cards`: the driver's numbers of the cards, in the order in which CUDA counts them; `instance`: the UUID of the one MIG
    instance that was asked for; `refused`: the entry at which CUDA stopped reading, None where it read all.
    """

    cards: tuple[int, ...]
    instance: str | None = None
    refused: str | None = None


def hides_all(text: str | None) -> bool:
    """Whether no entry can name a card, whatever the machine has: an empty text, -1, a word. None: the variable is not set."""
    return text is not None and not _entries(text)[0]


def chosen(text: str | None, uuids: Sequence[str], instances: Mapping[int, Sequence[str]] | None = None) -> Chosen:
    """The cards that CUDA takes. uuids: those of all cards, in the driver's order; instances: the UUIDs of each card's MIG
    instances, by the card's number.
    """
    if text is None:
        return Chosen(tuple(range(len(uuids))))
    entries, refused = _entries(text)
    cards: list[int] = []
    for entry in entries:
        if isinstance(entry, str) and entry.startswith("MIG-"):
            # CUDA takes one instance and no more
            return _instance(entry, uuids, instances or {})
        card = _card(entry, uuids)
        if card is None:
            refused = str(entry)
            break
        if card in cards:
            return Chosen((), refused=str(entry))
        cards.append(card)
    return Chosen(tuple(cards), refused=refused)


def _entries(text: str) -> tuple[list[int | str], str | None]:
    """The entries in the form in which CUDA takes them, and the one at which it stops."""
    prefix = next((one for one in _UUIDS if text.startswith(one)), None)
    found: list[int | str] = []
    for entry in text.split(","):
        if prefix is not None:
            value: int | str | None = entry if entry.startswith(prefix) else None
        else:
            # As strtoul reads it: `1gpu` is 1
            number = _NUMBER.match(entry.strip())
            value = int(number[0]) if number and int(number[0]) >= 0 else None
        if value is None:
            return found, entry
        if value in found:
            return [], entry
        found.append(value)
    return found, None


def _card(entry: int | str, uuids: Sequence[str]) -> int | None:
    if isinstance(entry, int):
        return entry if entry < len(uuids) else None
    fitting = [number for number, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def _instance(entry: str, uuids: Sequence[str], instances: Mapping[int, Sequence[str]]) -> Chosen:
    # Before driver 470 an instance was called MIG-GPU-<uuid of its card>/<GPU instance>/<compute instance>
    parent = entry.removeprefix("MIG-").partition("/")[0]
    for number, uuid in enumerate(uuids):
        if uuid == parent and "/" in entry:
            return Chosen((number,), entry)
    fitting = [(number, uuid) for number, those in instances.items() for uuid in those if uuid.startswith(entry)]
    if len(fitting) == 1:
        return Chosen((fitting[0][0],), fitting[0][1])
    return Chosen((), refused=entry)
