"""What the tests of the caches share: sets of cases, and equality of samples to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from data_builders import make_recipe, save

from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case, CaseSource, Sample

RECIPE = make_recipe(
    storage_dtype="float16",
    intensity={"kind": "percentile"},
    spacing=[1.0, 1.0, 1.2],
    crop_foreground={"above": 0.97},
    patch={"size": [16, 16, 16], "background_above": 0.4},
)


def write_cases(root: Path, count: int, shape: tuple[int, ...] = (18, 17, 20)) -> tuple[Case, ...]:
    """Cases with oblique affines, odd sizes, one of them without the second class and one smaller than the patch."""
    rng = np.random.default_rng(0)
    cases = []
    for index in range(count):
        affine = np.array([[-1.1, 0.1, 0, 5], [0.1, 1.0, 0, -7.25], [0, 0, 1.3, index], [0, 0, 0, 1]])
        extent = shape if index != 1 else (9, 11, 8)
        label = rng.integers(0, 2 if index == 2 else 3, extent).astype(np.uint8)
        name = f"case ü{index}"
        cases.append(
            Case(
                name,
                (save(root / "images" / f"{name}.nii", rng.normal(size=extent).astype(np.float32), affine),),
                save(root / "labels" / f"{name}.nii", label, affine),
            )
        )
    return tuple(cases)


def assert_same(sample: Sample, wanted: Sample) -> None:
    """Bits, types, shapes and memory layout."""
    assert sample.name == wanted.name
    for grid, other in ((sample.grid, wanted.grid), (sample.source_grid, wanted.source_grid)):
        assert grid.shape == other.shape
        assert type(grid.shape) is tuple
        assert grid.affine.dtype == other.affine.dtype == np.float64
        assert grid.affine.tobytes() == other.affine.tobytes()
    assert len(sample.centres) == len(wanted.centres)
    pairs = [
        (sample.image, wanted.image),
        (sample.label, wanted.label),
        (sample.background_centres, wanted.background_centres),
        *zip(sample.centres, wanted.centres, strict=True),
    ]
    for tensor, other in pairs:
        assert (tensor is None) == (other is None)
        if tensor is not None and other is not None:
            assert type(tensor) is torch.Tensor
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            assert tensor.numel() == 0 or tensor.stride() == other.stride()
            assert tensor.numpy().tobytes() == other.numpy().tobytes()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def assert_true(source: CaseSource, cases: tuple[Case, ...], preprocess: Preprocess) -> None:
    """What the source gives is what the files and the recipe say now."""
    assert len(source) == len(cases)
    for index, case in enumerate(cases):
        assert_same(source[index], preprocess.as_sample(preprocess(case)))


def opened_with_lines(
    kind: str, cases: tuple[Case, ...], preprocess: Preprocess, folder: Path
) -> tuple[CaseSource, list[str], list[str]]:
    """The source, and the lines it told: those of level info, and the warnings."""
    lines: list[tuple[str, str]] = []
    source = open_case_source(
        kind, cases, preprocess, 2, folder=folder, told=lambda text, level: lines.append((text, level))
    )
    return (
        source,
        [text for text, level in lines if level == "info"],
        [text for text, level in lines if level == "warning"],
    )
