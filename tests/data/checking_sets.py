"""Builds data sets of real files for the tests of the check, and checks them as `train` would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from data_builders import make_recipe, save

from fasttrain.data.checking import CaseFindings, Checked, Terms, check_cases
from fasttrain.data.sources import find_cases
from fasttrain.data.splits import split_cases

SHAPE = (12, 10, 8)


def noise(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def classes(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """A label with a block of 1 beside a block of 2."""
    label = np.zeros(shape, np.uint8)
    label[:2], label[2:4] = 1, 2
    return label


def make_set(root: Path, count: int = 3) -> Path:
    """A sound Decathlon folder: c0, c1 …"""
    for number in range(count):
        put(root, f"c{number}", noise(number), classes())
    return root


def put(root: Path, name: str, image: np.ndarray, label: np.ndarray, **more: Any) -> None:
    """Adds or replaces a case; keywords `image_affine` and `label_affine`, others are fields of the image's header."""
    suffix = ".nii" if {"scl_slope", "scl_inter"} & more.keys() else ".nii.gz"
    affines = {key: more.pop(f"{key}_affine", None) for key in ("image", "label")}
    save(root / "imagesTr" / f"{name}{suffix}", image, affines["image"], **more)
    save(root / "labelsTr" / f"{name}.nii.gz", label, affines["label"])
    listed(root, name, f"imagesTr/{name}{suffix}")


def listed(root: Path, name: str, image: str, label: str | None = None) -> None:
    """Enters a case into dataset.json."""
    path = root / "dataset.json"
    document = json.loads(path.read_text()) if path.exists() else {"training": []}
    entries = {entry["label"]: entry for entry in document["training"]}
    label = label or f"labelsTr/{name}.nii.gz"
    entries[label] = {"image": image, "label": label}
    path.write_text(json.dumps({"training": list(entries.values())}))


def check(root: Path, cache: Path, full: bool = False, progress: Any = None, **data: Any) -> Checked:
    """The check of a recipe whose `data` section is replaced by keywords."""
    recipe = make_recipe(**data)
    cases = find_cases(recipe.data, root).cases
    split = split_cases(cases, recipe.data.split)
    return check_cases(cases, root, Terms.of_recipe(recipe), split, cache, 2, progress, full)


def found(checked: Checked) -> Mapping[str, CaseFindings]:
    return {case.case.name: case for case in checked.cases}
