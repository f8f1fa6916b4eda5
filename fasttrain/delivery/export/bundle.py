"""Owns the export as a MONAI bundle, and its proof: the bundle is verified and run on a real case."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch

from fasttrain.data.restore import to_source_grid
from fasttrain.delivery.export.agreement import TOLERANCE, largest_difference
from fasttrain.delivery.export.bundle_configs import inference, metadata
from fasttrain.delivery.export.plain import PlainModel, sample_of
from fasttrain.errors import RecipeError, StorageError
from fasttrain.networks import monai_definition
from fasttrain.samples import Sample
from fasttrain.whole_files import told_free

MOST_DIFFERING = 1e-3
"""Of the voxels that hold a class in one label map or the other: MONAI resamples at places that are rounded otherwise, so that
voxels at which two classes are as likely may change. Where the recipe crops, the crop's border is left out (`_border`).
"""


def refusal(model: PlainModel) -> str | None:
    """Why no bundle can be made of the run; None where one can."""
    recipe = model.recipe
    if recipe.task == "dose":
        return "a MONAI bundle reads images, and OpenKBP's patients are none"
    if recipe.dimensions != 3 or recipe.data.slices is not None:
        return "a MONAI bundle is written for volumes and patches of three axes"
    if recipe.data.source.kind == "dicom":
        return "a MONAI bundle reads NIfTI, and the run's images are DICOM series"
    if _definition(model) is None:
        return f"no class of monai.networks.nets answers as network {recipe.network.kind} does"
    return None


def write(model: PlainModel, path: Path) -> None:
    """Writes the folder `path`: configs/metadata.json, configs/inference.json, models/model.pt, docs/README.md."""
    definition = _definition(model)
    assert definition is not None
    for name in ("configs", "models", "docs"):
        (path / name).mkdir(parents=True)
    _write_json(path / "configs/metadata.json", metadata(model))
    _write_json(path / "configs/inference.json", inference(model, definition))
    whole = io.BytesIO()
    torch.save({key: value.contiguous() for key, value in model.network.state_dict().items()}, whole)
    # torch's own writing of files ends the process where the disk is full
    (path / "models/model.pt").write_bytes(whole.getbuffer())
    (path / "docs/README.md").write_text(_readme(model), encoding="utf-8")


def difference(model: PlainModel, path: Path) -> float:
    """How far the answers of the bundle's network lie from the run's.

    Raises RecipeError where `monai.bundle` cannot verify or run it, or its label map of the case is another than `predict`'s.
    """
    from monai.bundle import ConfigParser, verify_net_in_out

    configs = {"meta_file": str(path / "configs/metadata.json"), "config_file": str(path / "configs/inference.json")}
    with _silently():
        verify_net_in_out("network_def", device="cpu", **configs)
        parser = ConfigParser()
        parser.read_config(configs["config_file"])
        network: Any = parser.get_parsed_content("network_def")
        network.load_state_dict(torch.load(path / "models/model.pt", weights_only=True))
        differing = _differing(model, path)
    if differing > MOST_DIFFERING:
        raise RecipeError(
            f"{differing:.2%} of the foreground that monai.bundle predicts for {model.case.name} is not what `predict` does"
        )
    return largest_difference(model, network.eval())


def _differing(model: PlainModel, path: Path) -> float:
    """The share of the foreground of the case in which the bundle's label map is another than `predict`'s."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as asked:
        images = [str(image.absolute()) for image in model.case.images]
        # It runs in another working folder
        root = path.absolute()
        arguments = {
            "config_file": str(root / "configs/inference.json"),
            "meta_file": str(root / "configs/metadata.json"),
            "bundle_root": str(root),
            "datalist": [images[0] if len(images) == 1 else images],
            "output_dir": folder,
            "device": "$torch.device('cpu')",
        }
        _write_json(Path(asked) / "arguments.json", arguments)
        # As a user does, and with a MONAI that was loaded with all of pytorch-ignite
        command = [sys.executable, "-m", "monai.bundle", "run", "--args_file", f"{asked}/arguments.json"]
        done = subprocess.run(command, cwd=asked, capture_output=True, text=True, errors="replace")
        if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
            raise StorageError(
                f"{Path(folder).parent} has too little room for the check of the bundle on {model.case.name}"
                f"{told_free(Path(folder))}; free space there, or set TMPDIR"
            )
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise RecipeError(f"monai.bundle cannot run what was made of {model.case.name}: {last}")
        (written,) = Path(folder).iterdir()
        found = np.asarray(nib.load(written).dataobj)
    sample = sample_of(model)
    index = model.predictor().class_map(sample, True).numpy()
    expected = np.asarray(model.recipe.data.class_values, dtype=np.uint8)[index]
    if found.shape != expected.shape:
        return 1.0
    judged = np.ones(expected.shape, dtype=bool) if model.recipe.data.crop_foreground is None else ~_border(sample)
    foreground = max(int(((found > 0) | (expected > 0)).sum()), 1)
    return float(((found != expected) & judged).sum()) / foreground


def _border(sample: Sample) -> np.ndarray:
    """Voxels of the file within one of the outermost voxels of what was cropped: there MONAI blends with the zeros around it, and
    `predict` holds the last value, so that what reaches the border of the crop ends up to a voxel sooner.
    """
    within = torch.zeros((1, *sample.grid.shape))
    within[:, 1:-1, 1:-1, 1:-1] = 1.0
    return (to_source_grid(within, sample.grid, sample.source_grid, "linear", 1.0)[0] < 1.0).numpy()


def _definition(model: PlainModel) -> tuple[str, dict[str, Any]] | None:
    recipe = model.recipe
    return monai_definition(recipe.network, model.patch, recipe.input_channels, recipe.output_channels)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _silently():  # type: ignore[no-untyped-def]
    """MONAI logs and prints on the way."""
    former = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(former)


def _readme(model: PlainModel) -> str:
    described = model.described()
    return f"""# {model.recipe.name}

Segments {", ".join(model.recipe.data.scored_names)}. The network answers {described["answer"]}.
On the case {model.case.name} the network agrees with the one it was exported from to {TOLERANCE:g} of its logits, and the label
maps to {MOST_DIFFERING:.1%} of the foreground.

    pip install monai nibabel pytorch-ignite fire
    python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json \\
      --dataset_dir IMAGES --output_dir OUT

`pip install jsonschema`, then check the description against MONAI's schema, which is fetched to the file named
by --filepath; one that lies there already is used as it is, without a network:

    python -m monai.bundle verify_metadata --meta_file configs/metadata.json --filepath schema.json
"""
