"""Builders of real NIfTI files and recipes for the tests of `fasttrain.data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from fasttrain.recipe.recipe import Recipe


def make_recipe(**data: Any) -> Recipe:
    """A small valid recipe; keywords replace entries of `data`, `patch` replaces the patch section."""
    patch = data.pop("patch", {"size": [16, 16, 16]})
    dimensions = len(patch["size"])
    return Recipe.model_validate(
        {
            "name": data.pop("recipe_name", "made"),
            "task": "segmentation",
            "data": {
                "source": {"kind": "decathlon"},
                "channels": ["CT"],
                "classes": {1: "liver", 2: "kidney"},
                "split": {"kind": "last", "validation": 1},
                "intensity": {"kind": "none"},
                **data,
            },
            "patch": patch,
            "network": {"kind": "unet", "features": [4, 8], "strides": [[2] * dimensions]},
            "loss": {"kind": "dice"},
            "optimizer": {"kind": "adamw"},
            "schedule": {"kind": "constant"},
            "training": {"epochs": 1, "batch_size": 1},
        }
    )


def save(path: Path, values: np.ndarray, affine: np.ndarray | None = None, **header: Any) -> Path:
    """Writes a NIfTI-1 file; keywords set header fields (`scl_slope` and `scl_inter` without rescaling the values)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(values, np.eye(4) if affine is None else affine, dtype=values.dtype)
    scaling = {key: header.pop(key) for key in ("scl_slope", "scl_inter") if key in header}
    for key, value in header.items():
        image.header[key] = value
    if not scaling:
        nib.save(image, path)
        return path
    image.header.set_slope_inter(scaling.get("scl_slope", 1.0), scaling.get("scl_inter", 0.0))
    blob = bytearray(nib.Nifti1Image(values, image.affine, image.header).to_bytes())
    header_copy = nib.Nifti1Header(bytes(blob[:348]))
    header_copy.set_slope_inter(scaling.get("scl_slope", 1.0), scaling.get("scl_inter", 0.0))
    offset = int(header_copy.get_data_offset())
    blob[:348] = header_copy.binaryblock
    blob[offset : offset + values.nbytes] = np.asarray(values).tobytes(order="F")
    assert path.suffix == ".nii"
    path.write_bytes(bytes(blob))
    return path


def write_decathlon(root: Path, names: list[str], shape: tuple[int, ...] = (12, 10, 8), **document: Any) -> Path:
    """A Decathlon folder of `names` with noise images and labels 0 to 2; keywords replace entries of the JSON."""
    rng = np.random.default_rng(0)
    for name in names:
        save(root / "imagesTr" / f"{name}.nii.gz", rng.normal(size=shape).astype(np.float32))
        save(root / "labelsTr" / f"{name}.nii.gz", rng.integers(0, 3, shape).astype(np.uint8))
    entries = [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in names]
    full = {"labels": {"0": "background", "1": "liver", "2": "kidney"}, "numTraining": len(names), "training": entries}
    (root / "dataset.json").write_text(json.dumps({**full, **document}))
    return root
