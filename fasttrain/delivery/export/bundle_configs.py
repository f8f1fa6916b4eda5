"""Owns the two configurations of a MONAI bundle: what it is (`metadata.json`), and how it infers (`inference.json`)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import monai
import nibabel
import numpy as np
import torch

from fasttrain import __version__
from fasttrain.delivery.export.plain import PlainModel, describes_intensity
from fasttrain.recipe.data_spec import (
    FoldersSource,
    NnunetSource,
    PercentileIntensity,
    WindowIntensity,
    ZScoreIntensity,
)

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
_FINISH = {
    "softmax": "torch.softmax(logits, 1)",
    "sigmoid": "torch.sigmoid(logits)",
    "regions": "torch.sigmoid(logits)",
}


def metadata(model: PlainModel) -> dict[str, Any]:
    """`configs/metadata.json`, by MONAI's schema."""
    recipe, described = model.recipe, model.described()
    size = list(model.patch)
    outputs = described["outputs"]
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported from a run of {recipe.name}, epoch {model.epoch}"},
        "monai_version": _release(monai.__version__),
        "pytorch_version": _release(torch.__version__),
        "numpy_version": _release(np.__version__),
        "required_packages_version": {"nibabel": nibabel.__version__, "pytorch-ignite": "0.5.0"},
        "optional_packages_version": {},
        "supported_apps": {},
        "name": recipe.name,
        "task": f"{recipe.name} segmentation",
        "description": f"{recipe.network.kind} that segments {', '.join(recipe.data.scored_names)}",
        "authors": f"trained with fasttrain {__version__}",
        "copyright": "",
        "data_source": recipe.data.source.kind,
        "data_type": "nibabel",
        "image_classes": describes_intensity(recipe),
        "label_classes": ", ".join(
            f"{value} is {name}"
            for value, name in zip(recipe.data.class_values[1:], recipe.data.class_names, strict=True)
        ),
        "pred_classes": described["answer"],
        "intended_use": "research",
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "magnitude",
                    "modality": ", ".join(recipe.data.channels),
                    "num_channels": recipe.input_channels,
                    "spatial_shape": size,
                    "dtype": "float32",
                    "value_range": [],
                    "is_patch_data": True,
                    "channel_def": {str(number): name for number, name in enumerate(recipe.data.channels)},
                }
            },
            "outputs": {
                "pred": {
                    "type": "image",
                    "format": "segmentation",
                    "num_channels": len(outputs),
                    "spatial_shape": size,
                    "dtype": "float32",
                    "value_range": [],
                    "is_patch_data": True,
                    "channel_def": {str(number): name for number, name in enumerate(outputs)},
                }
            },
        },
    }


def inference(model: PlainModel, network: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """`configs/inference.json`: `python -m monai.bundle run --config_file configs/inference.json --dataset_dir …`."""
    recipe = model.recipe
    window, axes = recipe.validation.window, sorted(recipe.validation.mirror)
    flips = [[axis + 2 for axis in some] for count in range(len(axes) + 1) for some in combinations(axes, count)]
    name, arguments = network
    return {
        "imports": ["$import functools", "$import glob", "$import os"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "datalist": _datalist(model),
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": {"_target_": f"monai.networks.nets.{name}", **arguments},
        "network": "$@network_def.to(@device)",
        "flips": flips,
        "label_values": list(recipe.data.class_values),
        "preprocessing": {"_target_": "Compose", "transforms": _preprocessing(model)},
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': one} for one in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "batch_size": 1,
            "shuffle": False,
            "num_workers": 0,
        },
        "windows": {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(model.patch),
            "sw_batch_size": window.batch_size,
            "overlap": window.overlap,
            "mode": window.blend,
        },
        # Windows are blended as probabilities, the mean of those of all flips
        "inferer": "$lambda inputs, network, *more, windows=@windows, flips=@flips, **named: windows(inputs, lambda patch: "
        "sum(torch.flip((lambda logits: " + _FINISH[model.answer] + ")(network(torch.flip(patch, axes))), axes) "
        "for axes in flips) / len(flips))",
        "postprocessing": {"_target_": "Compose", "transforms": _postprocessing(model)},
        "handlers": [
            {
                "_target_": "CheckpointLoader",
                "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network"},
                "map_location": "@device",
            }
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
            "amp": False,
        },
        "initialize": [],
        "run": ["$@evaluator.run()"],
        "finalize": [],
    }


def _datalist(model: PlainModel) -> str:
    """Every file of `dataset_dir`, or every case's list of channels."""
    first, *others = _suffixes(model)
    if not others:
        return f"$sorted(glob.glob(@dataset_dir + '/*{first}.nii*'))"
    return (
        f"$[[one[:-{len(first + '.nii.gz')}] + channel + '.nii.gz' for channel in {[first, *others]!r}] "
        f"for one in sorted(glob.glob(@dataset_dir + '/*{first}.nii.gz'))]"
    )


def _suffixes(model: PlainModel) -> tuple[str, ...]:
    source = model.recipe.data.source
    if isinstance(source, FoldersSource):
        return source.image_suffixes
    if isinstance(source, NnunetSource):
        return model.channel_suffixes or tuple(f"_{number:04d}" for number in range(len(model.recipe.data.channels)))
    return ("",)


def _preprocessing(model: PlainModel) -> list[dict[str, Any]]:
    data = model.recipe.data
    steps: list[dict[str, Any]] = [
        {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "EnsureTyped", "keys": "image", "dtype": "$torch.float32"},
    ]
    if data.orientation is not None:
        steps.append({"_target_": "Orientationd", "keys": "image", "axcodes": data.orientation, "labels": None})
    if data.spacing is not None:
        steps.append(
            {
                "_target_": "Spacingd",
                "keys": "image",
                "pixdim": list(data.spacing),
                "mode": "bilinear",
                "padding_mode": "border",
            }
        )
    intensity = data.intensity
    if isinstance(intensity, WindowIntensity):
        steps.append(
            {
                "_target_": "ScaleIntensityRanged",
                "keys": "image",
                "a_min": intensity.low,
                "a_max": intensity.high,
                "b_min": 0.0,
                "b_max": 1.0,
                "clip": True,
            }
        )
    elif isinstance(intensity, PercentileIntensity):
        steps.append(
            {
                "_target_": "ScaleIntensityRangePercentilesd",
                "keys": "image",
                "lower": intensity.low,
                "upper": intensity.high,
                "b_min": 0.0,
                "b_max": 1.0,
                "clip": True,
                "channel_wise": True,
            }
        )
    elif isinstance(intensity, ZScoreIntensity):
        if intensity.nonzero and intensity.background == "lowest":
            lowest = "$lambda image: image - image.amin(tuple(range(1, image.ndim)), keepdim=True)"
            steps.append({"_target_": "Lambdad", "keys": "image", "func": lowest, "track_meta": False})
        steps.append(
            {"_target_": "NormalizeIntensityd", "keys": "image", "nonzero": intensity.nonzero, "channel_wise": True}
        )
    if data.crop_foreground is not None:
        steps.append(
            {
                "_target_": "CropForegroundd",
                "keys": "image",
                "source_key": "image",
                "select_fn": f"$lambda image: image > {data.crop_foreground.above}",
                "margin": data.crop_foreground.margin,
                "allow_smaller": True,
            }
        )
    return steps


def _postprocessing(model: PlainModel) -> list[dict[str, Any]]:
    recipe = model.recipe
    steps: list[dict[str, Any]] = [
        {
            "_target_": "Invertd",
            "keys": "pred",
            "transform": "@preprocessing",
            "orig_keys": "image",
            "nearest_interp": False,
            "to_tensor": True,
        }
    ]
    if model.answer == "softmax":
        steps.append({"_target_": "AsDiscreted", "keys": "pred", "argmax": True})
    else:
        written = recipe.regions.written if recipe.regions is not None else (1,)
        drawn = (
            f"$lambda pred: functools.reduce(lambda classes, one: torch.where(pred[one[0]][None] > 0.5, one[1], classes), "
            f"{list(enumerate(written))!r}, torch.zeros_like(pred[:1]))"
        )
        if recipe.regions is not None and recipe.regions.exact:
            weights = [1 << number for number in range(len(written))]
            bits = f"sum((pred[n] > 0.5).int() * w for n, w in enumerate({weights!r}))[None]"
            drawn = (
                f"$lambda pred: functools.reduce(lambda classes, one: torch.where({bits} == one[0], one[1], classes), "
                f"{list(recipe.regions.exact)!r}, ({drawn.removeprefix('$')})(pred))"
            )
        steps.append({"_target_": "Lambdad", "keys": "pred", "func": drawn, "track_meta": False})
    values = list(recipe.data.class_values)
    if values != list(range(len(values))):
        steps.append(
            {
                "_target_": "MapLabelValued",
                "keys": "pred",
                "orig_labels": list(range(len(values))),
                "target_labels": "@label_values",
            }
        )
    steps.append(
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_postfix": "",
            "output_dtype": "$np.uint8",
            "resample": False,
            "separate_folder": False,
            "print_log": False,
        }
    )
    return steps


def _release(version: str) -> str:
    """The version without what names a build."""
    return version.partition("+")[0]
