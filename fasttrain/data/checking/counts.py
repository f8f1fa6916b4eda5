"""Owns what a label's table of values means under a recipe: voxels of classes, voxels to be ignored, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from fasttrain.recipe.data_spec import DataSpec


def class_voxels(values: Sequence[tuple[int, int]], data: DataSpec) -> dict[int, int]:
    """Voxels by class value and 0, in the order of the values; what is declared as nothing is left out."""
    voxels = dict.fromkeys(data.class_values, 0)
    for value, count in values:
        value = data.label_map.get(value, value)
        if value in voxels:
            voxels[value] += count
    return voxels


def beside_classes(values: Sequence[tuple[int, int]], data: DataSpec) -> tuple[int | None, dict[int, int]]:
    """Voxels to be ignored (None where nothing is), and those of values that are no classes either, by value of the file."""
    targets = {value: data.label_map.get(value, value) for value, _ in values}
    ignored = sum(count for value, count in values if targets[value] == data.ignore_label)
    known = {*data.class_values, data.ignore_label}
    undeclared = {value: count for value, count in values if targets[value] not in known}
    return (None if data.ignore_label is None else ignored), undeclared
