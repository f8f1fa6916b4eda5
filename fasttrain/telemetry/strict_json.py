"""Owns how a run's values become JSON that every parser accepts: null where a float is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from fasttrain.whole_files import without_half_pairs


def plain(value: object) -> object:
    """The value with non-finite floats as None, paths as text, tuples and sets as lists; TypeError for other types."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    raise TypeError(f"{type(value).__name__} {value!r} has no JSON form; pass a number, text, list or mapping")


def dumps(value: object, indent: int | None = None) -> str:
    """JSON text of `value` after `plain`; one line unless `indent` is given."""
    return without_half_pairs(json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent))
