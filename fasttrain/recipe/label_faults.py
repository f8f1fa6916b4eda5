"""Owns what can be wrong with the label values that `data` declares, maps, ignores and joins to regions."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.recipe.data_spec import DataSpec
from fasttrain.recipe.network_spec import Fault
from fasttrain.recipe.regions import faults_of_regions
from fasttrain.recipe.spec import MOST

_LARGEST_CLASSES = 254
"""With an ignore label, whose voxels are the index 255."""


def faults_of_labels(data: DataSpec) -> Iterator[Fault]:
    """What `data.label_map`, `data.ignore_label` and `data.regions` make of the declared values."""
    yield from faults_of_regions(data)
    values, ignored = data.class_values, data.ignore_label
    for source, target in data.label_map.items():
        place = ("data", "label_map", source)
        if abs(source) > MOST:
            yield place, f"label values lie between -{MOST:,} and {MOST:,}"
        if target not in values and target != ignored:
            yield (
                place,
                f"maps to {target}, which is neither 0, nor one of data.classes, nor data.ignore_label; map to one of these, or "
                "declare it",
            )
    if ignored is not None:
        yield from _faults_of_ignored(data, ignored)
    # Only then would a class of the recipe be in no label: each value is replaced once, so 1: 2 and 2: 1 swap two classes
    reached = set(data.label_map.values()) | (set(values) - set(data.label_map))
    for value in values:
        if value not in reached:
            name = f"class {value} ({data.classes[value]})" if value else "the background, 0,"
            yield (
                ("data", "label_map", value),
                f"makes {data.label_map[value]} of every {value} and nothing becomes {value}, so {name} could never occur; take "
                f"{'it out of data.classes, or map another value to it' if value else 'this out, or map another value to 0'}",
            )


def _faults_of_ignored(data: DataSpec, ignored: int) -> Iterator[Fault]:
    place = ("data", "ignore_label")
    if ignored == 0:
        yield place, "0 is the background, which is trained and scored; name another value, or null"
    elif ignored in data.classes:
        yield (
            place,
            f"{ignored} is the class {data.classes[ignored]}; take it out of data.classes, or name another value",
        )
    if ignored in data.label_map:
        yield (
            place,
            f"data.label_map replaces {ignored} by {data.label_map[ignored]} before it is looked at; take one of the two out",
        )
    if abs(ignored) > MOST:
        yield place, f"label values lie between -{MOST:,} and {MOST:,}, found {ignored}"
    if len(data.classes) > _LARGEST_CLASSES:
        yield place, f"leaves room for {_LARGEST_CLASSES} classes, but data.classes has {len(data.classes)}"
