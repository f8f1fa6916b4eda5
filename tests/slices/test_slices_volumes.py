"""A volume that is cut into slices has them first, whatever the order of its file, and finds its way back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sliced_cases import SHAPE, case_of, sliced_recipe, volume, write_set

from fasttrain.data.caches import estimate_bytes, estimate_shapes
from fasttrain.data.caches.keys import settings_digest
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.restore import to_source_grid


@pytest.mark.parametrize("codes", ["RAS", "LPS", "SAR", "PIR"])
@pytest.mark.parametrize(("axis", "number"), [("axial", 2), ("coronal", 1), ("sagittal", 0), (1, 1)])
def test_slices_lie_first_whatever_the_order_of_the_file(tmp_path: Path, codes: str, axis: str, number: int) -> None:
    recipe = sliced_recipe(slices={"axis": axis}, patch={"size": [4, 4]})
    root = write_set(tmp_path, 1, codes=codes)
    sample = Preprocess(recipe).as_sample(Preprocess(recipe)(case_of(root, 0)))
    image, label = volume()
    assert torch.equal(sample.image[0], torch.from_numpy(np.moveaxis(image[..., 0], number, 0).copy()))
    assert torch.equal(sample.label[0], torch.from_numpy(np.moveaxis(label, number, 0).copy()))
    assert sample.image.is_contiguous()
    assert estimate_shapes([case_of(root, 0)], recipe) == [tuple(sample.image.shape[1:])]
    assert sample.filled.tolist() == sample.label[0].flatten(1).amax(1).tolist()
    # Back in the file's own order
    stored = np.asanyarray(__import__("nibabel").load(root / "labelsTr" / "case_0.nii.gz").dataobj)
    assert np.array_equal(
        to_source_grid(sample.label, sample.grid, sample.source_grid, "nearest", 0)[0].numpy(), stored
    )


def test_without_an_orientation_axial_is_the_files_nearest_axis_and_a_number_its_own(tmp_path: Path) -> None:
    root = write_set(tmp_path, 1, codes="SAR")
    shapes = {
        axis: estimate_shapes([case_of(root, 0)], sliced_recipe(slices={"axis": axis}, data={"orientation": None}))[0]
        for axis in ("axial", "sagittal", 2)
    }
    assert shapes == {"axial": (7, 20, 18), "sagittal": (18, 7, 20), 2: (18, 7, 20)}


def test_a_slice_smaller_than_the_patch_is_padded_and_no_slice_is_added(tmp_path: Path) -> None:
    recipe = sliced_recipe(patch={"size": [24, 16]})
    root = write_set(tmp_path, 1)
    sample = Preprocess(recipe).as_sample(Preprocess(recipe)(case_of(root, 0)))
    assert sample.image.shape == (1, 7, 24, 20)
    assert sample.filled.tolist() == [0, 1, 1, 0, 1, 0, 0]
    assert torch.equal(sample.image[0, :, 3:21], torch.from_numpy(np.moveaxis(volume()[0][..., 0], 2, 0).copy()))
    held = sum(one.nbytes for one in (sample.image, sample.label))
    assert held <= estimate_bytes([case_of(root, 0)], recipe) <= 3 * held
    whole = Preprocess(recipe, training=False)(case_of(root, 0))
    assert tuple(whole["image"].shape) == (1, 7, *SHAPE[:2])


def test_spacing_is_that_of_the_oriented_volume(tmp_path: Path) -> None:
    recipe = sliced_recipe(data={"spacing": [1.0, 1.0, 6.0]}, patch={"size": [4, 4]})
    sample = Preprocess(recipe).as_sample(Preprocess(recipe)(case_of(write_set(tmp_path, 1), 0)))
    assert sample.image.shape[1:] == (4, 18, 30)
    assert np.allclose(np.linalg.norm(sample.grid.affine[:3, :3], axis=0), [6.0, 1.0, 1.0])


def test_ignored_voxels_fill_no_slice(tmp_path: Path) -> None:
    root = write_set(tmp_path, 1)
    recipe = sliced_recipe(data={"classes": {2: "other"}, "ignore_label": 1}, patch={"size": [4, 4]})
    assert Preprocess(recipe)(case_of(root, 0))["filled"].tolist() == [0] * 7


def test_a_kept_volume_hangs_on_the_axis_alone() -> None:
    digests = {
        name: settings_digest(Preprocess(sliced_recipe(slices=values)))
        for name, values in {
            "plain": {},
            "neighbours": {"neighbours": 2, "keep_empty": 0.1},
            "coronal": {"axis": "coronal"},
        }.items()
    }
    assert digests["plain"] == digests["neighbours"] != digests["coronal"]
