"""Made volumes that are cut into slices, as files and as a source of samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from fasttrain.data.preprocess import Preprocess
from fasttrain.recipe import Recipe
from fasttrain.samples import Case, Sample

SHAPE = (18, 20, 7)
"""R, A and S; odd in S, so that no axis is taken for another."""


def volume(number: int = 0, channels: int = 1, shape: tuple[int, ...] = SHAPE) -> tuple[np.ndarray, np.ndarray]:
    """Noise [*spatial, channel] and a label with class 1 in the axial slices 1, 2 and 4 alone, the larger the higher `number`."""
    rng = np.random.default_rng(number)
    label = np.zeros(shape, np.uint8)
    for slice_number, extent in ((1, 3), (2, 5), (4, 6)):
        label[4 : 4 + extent, 5 : 8 + number, slice_number] = 1
    return rng.normal(size=(*shape, channels)).astype(np.float32), label


def write_set(root: Path, count: int, channels: int = 1, codes: str = "RAS", shape: tuple[int, ...] = SHAPE) -> Path:
    """A Decathlon folder of such volumes, whose files have their axes in the order and direction of `codes`."""
    own = nib.orientations.axcodes2ornt(codes)
    affine = np.diag([1.0, 1.5, 3.0, 1.0])
    entries = []
    for number in range(count):
        image, label = volume(number, channels, shape)
        for folder, values in (("imagesTr", image if channels > 1 else image[..., 0]), ("labelsTr", label)):
            turns = nib.orientations.ornt_transform(nib.orientations.io_orientation(np.eye(4)), own)
            moved = nib.orientations.apply_orientation(values, turns)
            turned = affine @ nib.orientations.inv_ornt_aff(turns, shape)
            path = root / folder / f"case_{number}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(moved, turned), path)
        name = f"case_{number}.nii.gz"
        entries.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    document = {"labels": {"0": "background", "1": "tumor"}, "numTraining": count, "training": entries}
    (root / "dataset.json").write_text(json.dumps(document))
    return root


def sliced_recipe(**more: Any) -> Recipe:
    """A small recipe of slices; keywords replace values of `data`, `patch`, `augment` or `slices`."""
    data = {
        "source": {"kind": "decathlon"},
        "channels": more.pop("channels", ["MR"]),
        "classes": {1: "tumor"},
        "split": {"kind": "last", "validation": 1},
        "intensity": {"kind": "none"},
        "slices": {"axis": "axial", **more.pop("slices", {})},
    }
    return Recipe.model_validate(
        {
            "name": "sliced",
            "task": "segmentation",
            "data": {**data, **more.pop("data", {})},
            "patch": {"size": [16, 16], "foreground": 0.0, **more.pop("patch", {})},
            "augment": more.pop("augment", {}),
            "network": {"kind": "dynunet", "features": [4, 8, 8], "strides": [2, 2]},
            "loss": {"kind": "bce_dice"},
            "optimizer": {"kind": "adamw"},
            "schedule": {"kind": "constant"},
            "training": {"epochs": 1, "batch_size": more.pop("batch_size", 4)},
        }
    )


def case_of(root: Path, number: int) -> Case:
    name = f"case_{number}.nii.gz"
    return Case(f"case_{number}", (root / "imagesTr" / name,), root / "labelsTr" / name)


class Samples:
    """The training cases of a set, as a cache would give them."""

    def __init__(self, root: Path, recipe: Recipe, count: int) -> None:
        preprocess = Preprocess(recipe)
        self.samples = [preprocess.as_sample(preprocess(case_of(root, number))) for number in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def close(self) -> None:
        """Nothing is held."""
