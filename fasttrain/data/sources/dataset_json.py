"""Owns reading `dataset.json`: its syntax by line and column, and the label tables of both of its dialects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec


def read_dataset_json(path: Path) -> dict[str, Any]:
    """The document as a dict; a UTF-8 byte order mark is accepted.

    Raises DataError for a missing file, bytes that are no UTF-8, a syntax error (with line and column), another type.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} does not exist; a Decathlon folder has it at its top") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}; mend the JSON") from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply to be a dataset.json") from error
    if not isinstance(document, dict):
        raise DataError(f"{path} holds a {type(document).__name__}; an object with the key 'training' is expected")
    return document


def label_values(document: dict[str, Any]) -> dict[int, str]:
    """{value: name} from `labels`, written name → value (nnU-Net v2) or value → name (Decathlon); {} where it is neither."""
    labels = document.get("labels")
    if not isinstance(labels, dict):
        return {}
    values: dict[int, str] = {}
    for key, entry in labels.items():
        if isinstance(entry, str) and _is_whole(key):
            values[int(key)] = entry
        elif isinstance(entry, int) and not isinstance(entry, bool):
            values[entry] = key
        elif isinstance(entry, str) and _is_whole(entry):
            values[int(entry)] = key
    return values


def warn_of_labels(path: Path, document: dict[str, Any], spec: DataSpec) -> list[str]:
    """One sentence where the file's table has values that the recipe does not declare, or lacks declared ones."""
    table = label_values(document)
    if not table or not any(table):
        return []
    theirs, ours = {value for value in table if value != 0}, set(spec.classes)
    if theirs == ours:
        return []
    written = ", ".join(f"{value} {table[value]}" for value in sorted(theirs))
    declared = ", ".join(f"{value} {spec.classes[value]}" for value in sorted(ours))
    return [f"{path} names the labels {written}, but data.classes declares {declared}"]


def _is_whole(text: str) -> bool:
    return text.strip().lstrip("-").isdecimal()
