"""Owns reading `dataset.json`: its syntax by line and column, and the tables of labels and channels in all of their dialects."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from pathlib import Path
from typing import Any

from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec


def read_dataset_json(path: Path) -> dict[str, Any]:
    """The document as a dict; a byte order mark is accepted, and UTF-16 where there is one (PowerShell writes it).

    Raises DataError for a missing file, bytes that are no UTF-8, a syntax error (with line and column), another type, and a key
    that stands twice in one object with different values, of which any reader would silently drop one.
    """
    text = _text_of(path)
    twice: list[str] = []

    def collected(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found and found[key] != value:
                twice.append(key)
            found[key] = value
        return found

    try:
        document = json.loads(text, object_pairs_hook=collected)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, {_place_and_fault(text, error)}; mend the JSON") from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply to be a dataset.json") from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{path} is no dataset.json: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{path} holds a {type(document).__name__}; an object with the key 'training' is expected")
    if twice:
        raise DataError(
            f"{path} has the key {key!r} twice in one object, with different values; keep one of them"
            for key in dict.fromkeys(twice)
        )
    return document


def label_values(document: dict[str, Any]) -> dict[int, str]:
    """{value: name} from `labels`, written name → value (nnU-Net v2), value → name (Decathlon) or as a list of names by value.

    {} where it is none of these. Regions (lists of several values) are left out.
    """
    values: dict[int, str] = {}
    for value, name in _label_pairs(document):
        values[value] = name
    return values


def warn_of_labels(path: Path, document: dict[str, Any], spec: DataSpec) -> list[str]:
    """A sentence each: values that the recipe does not declare or lacks, regions, values with two names, the ignore label."""
    pairs = _label_pairs(document)
    table = dict(pairs)
    warnings = []
    labels = document.get("labels")
    labels = labels if isinstance(labels, dict) else {}
    regions = [key for key, value in labels.items() if isinstance(value, list)]
    if regions and not spec.regions:
        # Where there are regions, nnU-Net takes single values for regions, too
        every = {
            key: value if isinstance(value, list) else [value] for key, value in labels.items() if value not in (0, "0")
        }
        written = ", ".join(f"{key}: {value}" for key, value in every.items())
        warnings.append(
            f"{path} declares regions of several label values ({', '.join(regions)}); each value is a class of its own here "
            f"unless data.regions says so: {{{written}}}"
        )
    doubled = [value for value, count in Counter(value for value, _ in pairs).items() if count > 1]
    warnings += [
        f"{path} gives the label {value} several names ({', '.join(name for one, name in pairs if one == value)})"
        for value in doubled
    ]
    ignored = next((value for value, name in pairs if name.casefold() == "ignore"), None)
    if ignored is not None and ignored != spec.ignore_label:
        warnings.append(
            f"{path} has the label {ignored} ignore; set data.ignore_label: {ignored} to leave its voxels out, or they are "
            "refused or trained as a class"
        )
    # As the recipe sees them
    theirs = {spec.label_map.get(value, value) for value in table if value != ignored} - {0, spec.ignore_label}
    ours = set(spec.classes) - {ignored}
    if theirs and theirs != ours and not (regions and theirs < ours):
        written = ", ".join(f"{value} {table[value]}" for value in sorted(table) if value not in (0, ignored))
        declared = ", ".join(f"{value} {spec.classes[value]}" for value in sorted(spec.classes))
        warnings.append(f"{path} names the labels {written}, but data.classes declares {declared}")
    return warnings


def channel_table(document: dict[str, Any]) -> dict[int, str]:
    """{number: name} from `channel_names` (nnU-Net v2) or `modality` (Decathlon): a table, a list, or one name; else {}."""
    table = document.get("channel_names", document.get("modality"))
    if isinstance(table, str):
        return {0: table}
    if isinstance(table, list):
        return {number: str(name) for number, name in enumerate(table)}
    if not isinstance(table, dict):
        return {}
    if all(_is_whole(str(number)) for number in table):
        return {int(number): str(name) for number, name in table.items()}
    # Written name → number
    numbers = {_whole(number): str(name) for name, number in table.items()}
    return {} if None in numbers else {number: name for number, name in numbers.items() if number is not None}


def warn_of_count(path: Path, document: dict[str, Any], counts: int, *also: int) -> list[str]:
    """One sentence where `numTraining` is neither the number of cases nor one of `also`."""
    announced = document.get("numTraining")
    if announced is None or _whole(announced) in (counts, *also):
        return []
    return [f"{path} says numTraining is {announced}, but there are {counts} cases; all {counts} are used"]


def _text_of(path: Path) -> str:
    try:
        blob = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} does not exist; a Decathlon folder has it at its top") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    wide = blob.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return blob.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _place_and_fault(text: str, error: json.JSONDecodeError) -> str:
    """Python before 3.13 puts a comma too many where the next token stands, perhaps lines below."""
    before, here = text[: error.pos].rstrip(), text[error.pos : error.pos + 1]
    position, fault = error.pos, error.msg
    if before.endswith(",") and here in ("}", "]", ","):
        position, fault = len(before) - 1, "a comma too many"
    elif (before.endswith(("[", "{")) and here == ",") or error.msg.startswith("Illegal trailing comma"):
        fault = "a comma too many"
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    return f"line {line}, column {column}: {fault}"


def _label_pairs(document: dict[str, Any]) -> list[tuple[int, str]]:
    labels = document.get("labels")
    if isinstance(labels, list):
        return list(enumerate(labels)) if all(isinstance(name, str) for name in labels) else []
    if not isinstance(labels, dict):
        return []
    pairs: list[tuple[int, str]] = []
    for key, entry in labels.items():
        value = _whole(entry)
        if isinstance(entry, str) and _is_whole(key):
            pairs.append((int(key), entry))
        elif value is not None:
            pairs.append((value, key))
    return pairs


def _whole(entry: Any) -> int | None:
    """A whole number, also one written as text or as 1.0."""
    if isinstance(entry, str) and _is_whole(entry):
        return int(entry)
    if isinstance(entry, bool) or not isinstance(entry, (int, float)) or entry != entry // 1:
        return None
    return int(entry)


def _is_whole(text: str) -> bool:
    digits = text.strip().removeprefix("-")
    return digits.isdecimal() and len(digits) < 20
