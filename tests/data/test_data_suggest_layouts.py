"""Recognising a data set by its folder: each layout, the suffixes of file names, and what is said where nothing fits."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_builders import save, write_decathlon
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fasttrain.data.fingerprint import read_fingerprint
from fasttrain.data.layouts import recognise
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import FoldersSource

IMAGE = np.linspace(-90, 300, 8 * 6 * 4).reshape(8, 6, 4).astype(np.float32)
LABEL = np.zeros((8, 6, 4), np.uint8)
LABEL[2:4, 2:4, 1:3] = 1


def write(root: Path, images: list[str], labels: list[str]) -> Path:
    """Names below `root`, without their ending."""
    for name in images:
        save(root / f"{name}.nii.gz", IMAGE)
    for name in labels:
        save(root / f"{name}.nii.gz", LABEL)
    return root


def test_decathlon_with_names_of_channels_and_classes(tmp_path: Path):
    layout = recognise(write_decathlon(tmp_path, ["a", "b"], modality={"0": "MRI"}))
    assert layout.source.kind == "decathlon"
    assert layout.channels == ("MRI",)
    assert layout.names == {1: "liver", 2: "kidney"}
    assert [case.name for case in layout.cases] == ["a", "b"]
    assert layout.warnings == ()


def test_a_table_of_channels_that_the_files_contradict_is_said(tmp_path: Path):
    layout = recognise(write_decathlon(tmp_path, ["a"], modality={"0": "T1", "1": "T2"}))
    assert layout.channels == ("image",)
    assert "names 2 channels (T1, T2), but the images have 1" in layout.warnings[0]


def test_nnunet_with_and_without_its_json(tmp_path: Path):
    names = [f"imagesTr/c{case}_{channel:04d}" for case in "ab" for channel in range(2)]
    root = write(tmp_path, names, ["labelsTr/ca", "labelsTr/cb"])
    layout = recognise(root)
    assert layout.source.kind == "nnunet"
    assert layout.channels == ("channel_0", "channel_1")
    assert not layout.named_channels
    document = {"channel_names": {"0": "T2", "1": "ADC"}, "labels": {"background": 0, "whole": [1, 2], "zone": 1}}
    (root / "dataset.json").write_text(json.dumps(document))
    layout = recognise(root)
    assert layout.channels == ("T2", "ADC")
    assert layout.names == {1: "zone"}
    assert any("regions" in text for text in layout.warnings)


def test_nnunets_older_json_lists_images_without_the_number_of_their_channel(tmp_path: Path):
    root = write(tmp_path, ["imagesTr/a_0000"], ["labelsTr/a"])
    entries = [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}]
    (root / "dataset.json").write_text(json.dumps({"modality": {"0": "CT"}, "training": entries}))
    layout = recognise(root)
    assert layout.source.kind == "nnunet"
    assert layout.channels == ("CT",)


def test_numbers_of_cases_are_no_channels(tmp_path: Path):
    names = [f"imagesTr/img_{number:04d}" for number in (1, 2, 35)]
    root = write(tmp_path, names, [name.replace("images", "labels") for name in names])
    layout = recognise(root)
    assert layout.source.kind == "folders"
    assert len(layout.cases) == 3


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        (["images/a", "images/b"], ["labels/a", "labels/b"], ("images", "labels", ("",), "")),
        (["Images/a_ct", "Images/b_ct"], ["masks/a_seg", "masks/b_seg"], ("Images", "masks", ("_ct",), "_seg")),
        (["images/p1", "images/p10"], ["labels/p1_mask", "labels/p10_mask"], ("images", "labels", ("",), "_mask")),
        (
            ["train/images/a_t1", "train/images/a_t2"],
            ["train/labels/a"],
            ("train/images", "train/labels", ("_t1", "_t2"), ""),
        ),
        (["images/train/a"], ["labels/train/a"], ("images/train", "labels/train", ("",), "")),
        (["imagesTr/a", "imagesTr/b"], ["labelsTr/a", "labelsTr/b"], ("imagesTr", "labelsTr", ("",), "")),
        (["a", "b"], ["a_label", "b_label"], (".", ".", ("",), "_label")),
        (["a-flair", "a-t1", "b-flair", "b-t1"], ["a-seg", "b-seg"], (".", ".", ("-flair", "-t1"), "-seg")),
        # Nothing in the names says which is the label: the values do
        (["a_x", "b_x"], ["a_y", "b_y"], (".", ".", ("_x",), "_y")),
        (["scan.1_x"], ["scan.1_x_z"], (".", ".", ("",), "_z")),
    ],
)
def test_plain_folders(tmp_path: Path, images: list[str], labels: list[str], expected: tuple):
    layout = recognise(write(tmp_path, images, labels))
    source = layout.source
    assert isinstance(source, FoldersSource)
    assert (source.images, source.labels, source.image_suffixes, source.label_suffix) == expected
    assert len(layout.cases) == len(labels)
    assert all(case.label is not None and case.label.is_file() for case in layout.cases)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.sets(st.text("abc019", min_size=1, max_size=4), min_size=1, max_size=5),
    image_suffix=st.sampled_from(["", "_ct", "-t1", ".img", "_0000"]),
    label_suffix=st.sampled_from(["", "_seg", "-label", ".m", "_ct_seg"]),
    shared=st.booleans(),
)
def test_any_two_suffixes_after_the_case_pair_all_of_them(tmp_path_factory, ids, image_suffix, label_suffix, shared):
    assume(not shared or (label_suffix and label_suffix != image_suffix))
    folders = ("", "") if shared else ("images/", "labels/")
    root = tmp_path_factory.mktemp("pairs")
    layout = recognise(
        write(root, [f"{folders[0]}{i}{image_suffix}" for i in ids], [f"{folders[1]}{i}{label_suffix}" for i in ids])
    )
    assert len(layout.cases) == len(ids)
    for case in layout.cases:
        assert "seg" not in case.images[0].name
        assert case.images[0].name.split(".nii")[0].removesuffix(image_suffix) in ids
        assert case.label.name.split(".nii")[0].removesuffix(label_suffix) in ids


def test_a_table_of_labels_beside_the_images_names_the_classes(tmp_path: Path):
    root = write(tmp_path, ["a"], ["a_seg"])
    (root / "names.json").write_text(json.dumps({"background": 0, "spleen": 1, "spleen ": 2}))
    (root / "other.json").write_text(json.dumps({"made": "today", "spleen": 1}))
    assert recognise(root).names == {1: "spleen_1", 2: "spleen_2"}


def test_one_unlabelled_image_among_many_is_named(tmp_path: Path):
    names = [f"c{number}" for number in range(9)]
    root = write(tmp_path, [f"images/{name}" for name in [*names, "lone"]], [f"labels/{name}" for name in names])
    with pytest.raises(DataError, match="the image of case lone has no label"):
        recognise(root)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda root: None, "found an empty folder"),
        (lambda root: (root / "a.dcm").write_bytes(b"\0" * 200), "DICOM is not read"),
        (lambda root: write(root, ["images/a"], ["labels/b"]), "found images/, labels/"),
        (lambda root: write(root, ["a", "b"], []), "2 .nii.gz files"),
        # Labels alone: the number of a case is not what sets labels apart
        (lambda root: write(root, [], ["m_001", "m_002", "m_003"]), "3 .nii.gz files"),
    ],
)
def test_a_folder_that_fits_no_layout_is_told_what_was_looked_for(tmp_path: Path, build, words: str):
    build(tmp_path)
    with pytest.raises(DataError) as refused:
        recognise(tmp_path)
    (fault,) = refused.value.faults
    assert words in fault
    for layout in ("Decathlon", "nnU-Net", "images/ and labels/"):
        assert layout in fault


def test_a_missing_folder(tmp_path: Path):
    with pytest.raises(DataError, match="does not exist; name the folder of the data set with --data"):
        recognise(tmp_path / "nowhere")


def test_figures_are_those_of_the_files(tmp_path: Path):
    root = write_decathlon(tmp_path, ["a", "b", "c"], shape=(12, 10, 8))
    seen: list[tuple[int, int]] = []
    found = read_fingerprint(root, 2, lambda done, total: seen.append((done, total)))
    assert sorted(seen) == [(1, 3), (2, 3), (3, 3)]
    import nibabel as nib

    labels = [np.asarray(nib.load(root / f"labelsTr/{name}.nii.gz").dataobj) for name in "abc"]
    images = [nib.load(root / f"imagesTr/{name}.nii.gz").get_fdata() for name in "abc"]
    assert found.voxels_by_value == {value: sum(int((one == value).sum()) for one in labels) for value in (1, 2)}
    assert found.foreground_share == pytest.approx(np.mean([one > 0 for one in labels]))
    inside = np.concatenate([image[label > 0] for image, label in zip(images, labels, strict=True)])
    assert np.sort(found.foreground[0]) == pytest.approx(np.sort(inside), rel=1e-6)
    assert found.shapes.tolist() == [[12, 10, 8]] * 3


def test_hippocampus(real_data: Callable[[str], Path]):
    found = read_fingerprint(real_data("hippocampus"), 2)
    assert len(found.cases) == 260
    assert found.classes == {1: "Anterior", 2: "Posterior"}
    assert sorted(np.median(found.shapes, axis=0)) == [35, 36, 50]
    assert not found.is_ct
    assert found.orientations == {"RAS": 260}


def test_one_ct_beside_its_label(real_data: Callable[[str], Path]):
    found = read_fingerprint(real_data("ct_organs"), 2)
    assert found.is_ct
    assert found.layout.source.label_suffix == "_organs15"
    assert found.classes[1] == "spleen"
    assert len(found.classes) == 15
    assert found.mirror_axes == (1, 2)


def test_brats_files_one_a_channel(real_data: Callable[[str], Path]):
    layout = recognise(real_data("brats2013"))
    assert layout.source.kind == "nnunet"
    assert len(layout.channels) == 2
    assert len(layout.cases) == 4


def test_a_folder_of_several_sets_is_refused_with_their_names(tmp_path: Path):
    write(tmp_path / "one", ["a", "b"], ["a_seg", "b_seg"])
    write(tmp_path / "two", ["imagesTr/a_0000"], ["labelsTr/a"])
    write_decathlon(tmp_path / "three", ["a"])
    write(tmp_path / "four", ["images/a"], ["labels/a"])
    write(tmp_path / "pictures", ["a", "b"], [])
    with pytest.raises(DataError) as caught:
        recognise(tmp_path)
    (fault,) = caught.value.faults
    assert fault == (
        f"{tmp_path} holds several data sets: four, one, three, two; name one of them, such as --data {tmp_path / 'four'}"
    )
    for name in ("one", "two", "three", "four"):
        assert recognise(tmp_path / name).cases


def test_one_set_below_is_taken_and_a_set_with_folders_beside_it_is_one(tmp_path: Path):
    write(tmp_path / "parent/only", ["a", "b"], ["a_seg", "b_seg"])
    assert recognise(tmp_path / "parent").source.images == "only"
    whole = tmp_path / "whole"
    write(whole, ["images/a", "old/b", "older/c"], ["labels/a", "old/b_seg", "older/c_seg"])
    assert recognise(whole).source.images == "images"
    shared = write(tmp_path / "shared", ["a", "old/b", "older/c"], ["a_seg", "old/b_seg", "older/c_seg"])
    assert recognise(shared).source.images == "."


def test_a_folder_a_case_is_no_set_by_itself(tmp_path: Path):
    for number in range(20):
        write(tmp_path / f"case_{number:02d}", [f"c{number}"], [f"c{number}_seg"])
    with pytest.raises(DataError, match="case_11 and perhaps more; name one of them.*put all cases into one folder"):
        recognise(tmp_path)
