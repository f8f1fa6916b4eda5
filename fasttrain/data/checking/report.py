"""Owns what a check tells a person: the figures to choose settings by, and the whole of it as one document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from fasttrain.data.checking.alike import shared_faults
from fasttrain.data.checking.checking import Checked
from fasttrain.data.checking.judging import CaseFindings
from fasttrain.data.splits import Split
from fasttrain.data.volumes import ITEM_BYTES, axes_along, preprocessed_shape, sample_bytes
from fasttrain.errors import EXIT_DATA, EXIT_DONE


@dataclass(frozen=True)
class Figures:
    """Of the cases without faults, or of all that could be read where none is.

    Shapes and spacings run along the recipe's orientation (RAS without one). smallest: (case, shape) of the volume with the
    fewest voxels after resampling; below_patch: cases with an axis shorter than the patch. Bytes are those of all volumes kept
    for training: gpu_bytes with images in 16 bits.
    """

    cases: int
    median_shape: tuple[float, ...]
    median_spacing: tuple[float, ...]
    resampled_median_shape: tuple[float, ...]
    foreground_share: float | None
    voxels_by_value: dict[int, int]
    cases_by_value: dict[int, int]
    smallest: tuple[str, tuple[int, ...]]
    below_patch: int
    memory_bytes: int
    gpu_bytes: int


def figures_of(checked: Checked) -> Figures | None:
    """None where no case could be read."""
    readable = [case for case in checked.cases if case.grid is not None]
    cases = [case for case in readable if not case.faults] or readable
    if not cases:
        return None
    terms = checked.terms
    data, recipe = terms.data, terms.recipe
    patch = recipe.box if recipe is not None else None
    volumes = [_preprocessed(case, checked) for case in cases]
    item_bytes = ITEM_BYTES[data.storage_dtype]
    grids = [_along(case, data.orientation or "RAS") for case in cases]
    by_value: Counter[int] = Counter()
    in_cases: Counter[int] = Counter()
    for case in cases:
        by_value.update(case.voxels or {})
        in_cases.update(value for value, count in (case.voxels or {}).items() if count)
    total = sum(by_value.values())
    lists = (
        recipe.centre_lists + (recipe.patch.background_above is not None)
        if recipe is not None
        else max(len(by_value) - 1, 0)
    )
    channels = len(data.channels) if recipe is None else recipe.stored_channels
    label_bytes = 1 if recipe is None else recipe.task_facts.label_bytes
    sizes = (channels, lists, patch)
    smallest = min(range(len(cases)), key=lambda index: (np.prod(volumes[index], dtype=float), cases[index].case.name))
    return Figures(
        cases=len(cases),
        median_shape=_median([shape for shape, _ in grids]),
        median_spacing=_median([spacing for _, spacing in grids]),
        resampled_median_shape=_median(volumes),
        foreground_share=(total - by_value[0]) / total if total else None,
        voxels_by_value={
            value: by_value[value] for value in data.class_values if recipe is not None or by_value[value]
        },
        cases_by_value={value: in_cases[value] for value in data.class_values if recipe is not None or in_cases[value]},
        smallest=(cases[smallest].case.name, volumes[smallest]),
        below_patch=sum(any(a < b for a, b in zip(shape, patch, strict=True)) for shape in volumes) if patch else 0,
        memory_bytes=sum(sample_bytes(shape, *sizes, item_bytes, label_bytes) for shape in volumes),
        gpu_bytes=sum(sample_bytes(shape, *sizes, 2, label_bytes) for shape in volumes),
    )


def document_of(checked: Checked, split: Split | None) -> dict[str, Any]:
    """Everything that was found, as plain values."""
    figures = figures_of(checked)
    parts = _part_by_case(split)
    patch = checked.terms.recipe.patch.size if checked.terms.recipe is not None else None
    return {
        "status": "faulty" if checked.faults else "sound",
        "exit_code": EXIT_DATA if checked.faults else EXIT_DONE,
        "data": str(checked.root),
        "cases": [_case_record(case, parts.get(case.case.name)) for case in checked.cases],
        "layout": {
            **checked.terms.data.source.model_dump(mode="json"),
            "channels": list(checked.terms.data.channels),
        },
        "faults": list(checked.faults),
        "faults_alike": shared_faults(checked.cases),
        "skipping": _skipping_record(checked, split),
        "warnings": list(checked.warnings),
        "figures": None if figures is None else _figures_record(figures, checked, patch),
        "files": checked.files,
        "files_read": checked.files_read,
        "seconds": round(checked.seconds, 3),
    }


def _skipping_record(checked: Checked, split: Split | None) -> dict[str, Any] | None:
    """What `train` would leave out and how many cases then remain; None where nothing is left out."""
    bad = checked.bad
    if split is None or not bad or checked.terms.data.bad_cases != "skip":
        return None
    remain = {part: len(cases) for part, cases in split.without(bad).parts.items()}
    return {"left_out": list(bad), "remain": remain}


def _figures_record(figures: Figures, checked: Checked, patch: tuple[int, ...] | None) -> dict[str, Any]:
    names = {0: "background", **checked.terms.data.classes}
    return {
        "cases": figures.cases,
        "median_shape": list(figures.median_shape),
        "median_spacing_mm": list(figures.median_spacing),
        "median_shape_after_resampling": list(figures.resampled_median_shape),
        "foreground_share": figures.foreground_share,
        "classes": [
            {
                "value": value,
                "name": names[value],
                "voxels": count,
                "cases": figures.cases_by_value.get(value, 0),
            }
            for value, count in figures.voxels_by_value.items()
        ],
        "smallest": {"case": figures.smallest[0], "shape": list(figures.smallest[1])},
        "patch": None if patch is None else list(patch),
        "cases_below_patch": figures.below_patch,
        "cache_bytes": {
            "memory": figures.memory_bytes,
            "gpu": figures.gpu_bytes,
            "disk": figures.memory_bytes,
        },
    }


def _case_record(case: CaseFindings, part: str | None) -> dict[str, Any]:
    return {
        "case": case.case.name,
        "part": part,
        "images": [str(path) for path in case.case.images],
        "label": None if case.case.label is None else str(case.case.label),
        "shape": None if case.grid is None else list(case.grid.shape),
        "label_shape": None if case.label_shape is None else list(case.label_shape),
        "spacing_mm": None if case.spacing is None else list(case.spacing),
        "orientation": case.orientation,
        "dtypes": list(case.dtypes),
        "label_dtype": case.label_dtype,
        "minimum": case.minimum,
        "maximum": case.maximum,
        "ranges": [None if one is None else list(one) for one in case.ranges],
        "voxels": _by_text(case.voxels),
        "ignored_voxels": case.ignored,
        "undeclared_voxels": _by_text(case.undeclared),
        "faults": list(case.faults),
        "warnings": list(case.warnings),
    }


def _by_text(voxels: dict[int, int] | None) -> dict[str, int] | None:
    return None if voxels is None else {str(value): count for value, count in voxels.items()}


def _part_by_case(split: Split | None) -> dict[str, str]:
    if split is None:
        return {}
    # The last one counts: where the same cases train and validate they are told as training
    return {case.name: part for part, cases in reversed(split.parts.items()) for case in cases}


def _preprocessed(case: CaseFindings, checked: Checked) -> tuple[int, ...]:
    assert case.grid is not None
    data = checked.terms.data
    return preprocessed_shape(case.grid.shape, case.grid.affine, data.spacing, data.orientation, data.sliced_across)


def _along(case: CaseFindings, orientation: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    assert case.grid is not None
    assert case.spacing is not None
    order, _ = axes_along(case.grid.affine, len(case.grid.shape), orientation)
    return tuple(case.grid.shape[axis] for axis in order), tuple(case.spacing[axis] for axis in order)


def _median(rows: list[tuple[int, ...]] | list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(float(one) for one in np.median(np.array(rows, dtype=float), axis=0))
