"""Both layouts of brain tumours: BraTS's folder a case with a file a channel, and the Decathlon's file of four axes."""

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from fasttrain.data.finding import cases_for
from fasttrain.data.layouts import recognise
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.reading import read_image
from fasttrain.data.sources import find_cases
from fasttrain.data.sources.unlabelled import find_unlabelled, label_files
from fasttrain.errors import DataError
from fasttrain.recipe import resolve

SUFFIXES = ("_flair", "_t1", "_t1ce", "_t2")
BRATS = {
    "kind": "folders",
    "images": ".",
    "labels": ".",
    "image_suffixes": list(SUFFIXES),
    "label_suffix": "_seg",
    "case_folders": True,
}
NAMES = ("BraTS_001", "BraTS_002", "BraTS_003")


def volumes(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Four channels with a background of 0 around a "brain", and a label of values 0 to 3."""
    generator = np.random.default_rng(seed)
    image = np.zeros((4, 12, 10, 8), np.float32)
    image[:, 2:10, 2:8, 1:7] = generator.uniform(50, 900, (4, 8, 6, 6)) * [[[[1]]], [[[2]]], [[[3]]], [[[4]]]]
    label = np.zeros((12, 10, 8), np.uint8)
    label[3:8, 3:7, 2:6], label[4:7, 4:6, 3:5], label[5, 5, 4] = 1, 2, 3
    return image, label


def save(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, np.eye(4)), path)


@pytest.fixture
def brats(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        image, label = volumes(number)
        for suffix, channel in zip(SUFFIXES, image, strict=True):
            save(tmp_path / f"set/{name}/{name}{suffix}.nii.gz", channel)
        save(tmp_path / f"set/{name}/{name}_seg.nii.gz", label)
    (tmp_path / "set/name_mapping.csv").write_text("a,b\n")
    return tmp_path / "set"


@pytest.fixture
def decathlon(tmp_path: Path) -> Path:
    root = tmp_path / "Task01_BrainTumour"
    for number, name in enumerate(NAMES):
        image, label = volumes(number)
        save(root / f"imagesTr/{name}.nii.gz", np.moveaxis(image, 0, -1))
        save(root / f"labelsTr/{name}.nii.gz", label)
    entries = [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in NAMES]
    labels = {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}
    document = {"modality": dict(enumerate(["FLAIR", "T1w", "t1gd", "T2w"])), "labels": labels, "training": entries}
    (root / "dataset.json").write_text(json.dumps(document))
    return root


def recipe_of(source: dict, **more: object):
    small = {"patch.size": [8, 8, 8], "data.spacing": None, "data.storage_dtype": "float32", "data.source": source}
    return resolve("brain-tumor", {**small, **more}).recipe


@pytest.mark.parametrize("layout", ["brats", "decathlon"])
def test_both_layouts_give_the_same_volumes(layout: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(layout)
    recipe = recipe_of(BRATS if layout == "brats" else {"kind": "decathlon"}, **{"data.intensity": {"kind": "none"}})
    found = find_cases(recipe.data, root)
    assert [case.name for case in found.cases] == list(NAMES)
    for number, case in enumerate(found.cases):
        assert len(case.images) == (4 if layout == "brats" else 1)
        image, label = volumes(number)
        array, _ = read_image(case, recipe.data, 3)
        assert np.array_equal(array, image)
        sample = Preprocess(recipe).as_sample(Preprocess(recipe)(case))
        assert np.array_equal(sample.label[0], label)
        assert len(sample.centres) == 3


def test_the_brain_alone_is_scaled_channel_by_channel(decathlon: Path) -> None:
    recipe = recipe_of({"kind": "decathlon"})
    case = find_cases(recipe.data, decathlon).cases[0]
    image = Preprocess(recipe).as_sample(Preprocess(recipe)(case)).image
    brain = torch.from_numpy(volumes(0)[0] != 0)
    assert (image[~brain] == 0).all()
    for channel, inside in zip(image, brain, strict=True):
        assert float(channel[inside].mean()) == pytest.approx(0, abs=1e-5)
        assert float(channel[inside].std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_a_background_below_0_is_background_where_the_recipe_says_so(decathlon: Path) -> None:
    """Of volumes that were scaled before (as BraTS 2013 is handed on), a case's own constant."""
    recipe = recipe_of({"kind": "decathlon"})
    lowest = recipe_of(
        {"kind": "decathlon"}, **{"data.intensity": {"kind": "zscore", "nonzero": True, "background": "lowest"}}
    )
    case = find_cases(recipe.data, decathlon).cases[1]
    before = Preprocess(recipe).as_sample(Preprocess(recipe)(case)).image
    image = np.moveaxis(volumes(1)[0], 0, -1)
    save(case.images[0], image / 300 - 3.5)
    after = Preprocess(lowest).as_sample(Preprocess(lowest)(case)).image
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
    # A negative control: the same volumes with the background counted are others
    assert not torch.allclose(Preprocess(recipe).as_sample(Preprocess(recipe)(case)).image, before, atol=0.1)


def test_predict_takes_a_folder_of_cases_one_case_or_one_file(brats: Path) -> None:
    data = recipe_of(BRATS).data
    assert [case.name for case in find_unlabelled(data, brats)] == list(NAMES)
    assert len(label_files(data, brats)) == 3
    (case,) = find_unlabelled(data, brats / NAMES[1])
    assert (case.name, len(case.images)) == (NAMES[1], 4)
    (case,) = find_unlabelled(data, brats / NAMES[2] / f"{NAMES[2]}_t1.nii.gz")
    assert [path.name for path in case.images] == [f"{NAMES[2]}{suffix}.nii.gz" for suffix in SUFFIXES]


def test_a_missing_channel_and_a_case_that_is_there_twice_are_told(brats: Path) -> None:
    (brats / NAMES[0] / f"{NAMES[0]}_t1ce.nii.gz").unlink()
    save(brats / "copy" / f"{NAMES[1]}_t2.nii.gz", volumes(1)[0][0])
    data = recipe_of(BRATS).data
    with pytest.raises(DataError) as caught:
        find_cases(data, brats)
    told = "\n".join(caught.value.faults)
    assert f"case {NAMES[0]} lacks the image file of channel T1gd" in told
    assert f"case {NAMES[1]} has two files where one is expected" in told


def test_a_recipe_for_another_layout_is_told_the_settings(brats: Path) -> None:
    with pytest.raises(DataError, match="--set data.source.case_folders=true"):
        cases_for(recipe_of({"kind": "decathlon"}).data, brats)


def test_a_folder_a_case_is_recognised(brats: Path) -> None:
    layout = recognise(brats)
    assert layout.source.model_dump(mode="json") == {**BRATS, "image_suffixes": sorted(SUFFIXES)}
    assert layout.channels == ("flair", "t1", "t1ce", "t2")
    assert [case.name for case in layout.cases] == list(NAMES)
    # A negative control: folders whose files are not called after them are sets of their own
    for name in NAMES:
        (brats / name).rename(brats / f"set_{name}")
    with pytest.raises(DataError, match="holds several data sets"):
        recognise(brats)


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "set/A_flair.nii.gz", volumes(0)[0][0])
    with pytest.raises(DataError, match=r"looked for \./CASE/CASE_flair.nii.gz with \./CASE/CASE_seg.nii.gz, found"):
        find_cases(recipe_of(BRATS).data, tmp_path / "set")


def test_regions_of_a_dataset_json_are_named_as_the_recipe_takes_them(decathlon: Path) -> None:
    path = decathlon / "dataset.json"
    document = json.loads(path.read_text())
    document["labels"] = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3}
    path.write_text(json.dumps(document))
    without = recipe_of({"kind": "decathlon"}, **{"data.regions": {}, "loss": {"kind": "dice"}})
    told = "\n".join(find_cases(without.data, decathlon).warnings)
    assert "unless data.regions says so: {whole: [1, 2, 3], core: [2, 3], enhancing: [3]}" in told
    assert "data.regions" not in "\n".join(find_cases(recipe_of({"kind": "decathlon"}).data, decathlon).warnings)
