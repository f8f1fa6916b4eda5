"""Owns what is known of the folders in which fasttrain stores things: where they lie, whose they are, how they are cleared.

Needs no torch, so that `fasttrain data cache` answers at once.
"""

from fasttrain.data.inventory.clearing import Cleared, clear
from fasttrain.data.inventory.note import Note, note_use, read_note
from fasttrain.data.inventory.places import volumes_folder
from fasttrain.data.inventory.sets import StoredSet, find_sets

__all__ = [
    "Cleared",
    "Note",
    "StoredSet",
    "clear",
    "find_sets",
    "note_use",
    "read_note",
    "volumes_folder",
]
