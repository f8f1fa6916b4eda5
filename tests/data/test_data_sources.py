"""Cases are paired by id in every layout, and every fault of a folder is told in one pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_builders import make_recipe, save, write_decathlon

from fasttrain.data.finding import cases_for
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import SOURCES, find_cases, look_for_cases
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec

DECATHLON = make_recipe().data
NNUNET = make_recipe(source={"kind": "nnunet"}, channels=["FLAIR", "T1"]).data


def folders(channels: tuple[str, ...] = ("CT",), **source: object) -> DataSpec:
    return make_recipe(source={"kind": "folders", **source}, channels=list(channels)).data


def touch(root: Path, *names: str) -> Path:
    """Sources look at names alone; the bytes are the reader's business."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def faults_of(spec: DataSpec, root: Path) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        find_cases(spec, root)
    assert all("\n" not in fault for fault in caught.value.faults)
    return caught.value.faults


def test_every_kind_has_a_source() -> None:
    assert set(SOURCES) == {"decathlon", "nnunet", "folders", "dicom", "phantom", "openkbp"}


def test_missing_root(tmp_path: Path) -> None:
    for spec in (DECATHLON, NNUNET, folders()):
        (fault,) = faults_of(spec, tmp_path / "absent")
        assert "absent does not exist" in fault
        assert "--data" in fault


# --- decathlon -------------------------------------------------------------------------------------------------------


def rewrite(root: Path, **changes: object) -> None:
    path = root / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_decathlon_reads_what_the_json_lists(tmp_path: Path) -> None:
    root = write_decathlon(tmp_path, ["b_2", "a_10", "a_9"], test=["./imagesTs/t.nii.gz"])
    found = find_cases(DECATHLON, root)
    assert [case.name for case in found.cases] == ["a_10", "a_9", "b_2"]
    assert found.warnings == ()
    for case in found.cases:
        assert case.images == (root / "imagesTr" / f"{case.name}.nii.gz",)
        assert case.label == root / "labelsTr" / f"{case.name}.nii.gz"


def test_decathlon_pairs_by_entry_not_by_order(tmp_path: Path) -> None:
    names = [{"image": "i/z.nii.gz", "label": "l/1.nii.gz"}, {"image": "i/a.nii.gz", "label": "l/2.nii.gz"}]
    touch(tmp_path, "i/z.nii.gz", "i/a.nii.gz", "l/1.nii.gz", "l/2.nii.gz")
    (tmp_path / "dataset.json").write_text(json.dumps({"training": names}))
    pairs = {case.name: case.label.name for case in find_cases(DECATHLON, tmp_path).cases if case.label}
    assert pairs == {"z": "1.nii.gz", "a": "2.nii.gz"}


def test_decathlon_dialects_are_read_alike(tmp_path: Path) -> None:
    root = write_decathlon(tmp_path, ["a", "b"])
    for labels in (
        {"background": 0, "liver": 1, "kidney": 2},
        {"0": "background", "1": "liver", "2": "kidney"},
        {},
        None,
    ):
        rewrite(root, labels=labels)
        assert find_cases(DECATHLON, root).warnings == ()
    rewrite(root, labels={"0": "background", "1": "liver", "2": "kidney", "3": "spleen"})
    (warning,) = find_cases(DECATHLON, root).warnings
    assert "3 spleen" in warning
    path = root / "dataset.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(find_cases(DECATHLON, root).cases) == 2


def test_decathlon_json_faults_name_the_place(tmp_path: Path) -> None:
    path = tmp_path / "dataset.json"
    (fault,) = faults_of(DECATHLON, tmp_path)
    assert "dataset.json does not exist" in fault
    for text, expected in (
        ('{"training": [\n  {"image": "a",}\n]}', "dataset.json, line 2, column "),
        ("[]", "holds a list"),
        ('{"train": []}', "found train"),
        ('{"training": {}}', "'training' should be a list"),
        ('{"training": []}', "fits no case"),
        ("[" * 100_000, "nested too deeply"),
    ):
        path.write_text(text)
        (fault,) = faults_of(DECATHLON, tmp_path)
        assert expected in fault
    path.write_bytes(b'{"name": "\xff"}')
    assert "not UTF-8" in faults_of(DECATHLON, tmp_path)[0]


def test_decathlon_tells_every_fault_at_once(tmp_path: Path) -> None:
    root = write_decathlon(tmp_path, ["a", "b", "c", "d"])
    entry = {name: {"image": f"imagesTr/{name}.nii.gz", "label": f"labelsTr/{name}.nii.gz"} for name in "abcd"}
    training = [
        entry["a"],
        {"image": "imagesTr/b.nii.gz"},
        {"label": "labelsTr/c.nii.gz"},
        "imagesTr/d.nii.gz",
        {"image": "imagesTr/no.nii.gz", "label": "labelsTr/no.nii.gz"},
        entry["a"],
        {"image": "imagesTr/d.nii.gz", "label": "labelsTr/a.nii.gz"},
    ]
    rewrite(root, training=training)
    text = "\n".join(faults_of(DECATHLON, root))
    for expected in (
        "training[1]: the image imagesTr/b.nii.gz has no label",
        "training[2]: the label labelsTr/c.nii.gz has no image",
        "training[3] is 'imagesTr/d.nii.gz'",
        f"training[4]: the image {root}/imagesTr/no.nii.gz does not exist",
        f"training[4]: the label {root}/labelsTr/no.nii.gz does not exist",
        "lists case a 2 times",
        "image of case d with the label of case a",
    ):
        assert expected in text


def test_decathlon_oddities_are_warnings(tmp_path: Path) -> None:
    root = write_decathlon(tmp_path, ["a", "b"], numTraining=7)
    touch(root, "imagesTr/c.nii.gz", "imagesTr/._a.nii.gz", "imagesTr/.DS_Store")
    count, unlisted, left_behind = find_cases(DECATHLON, root).warnings
    assert "numTraining is 7, but there are 2 cases" in count
    assert "holds 1 file that dataset.json does not list (c.nii.gz)" in unlisted
    assert "2 files that macOS or Windows left behind" in left_behind


# --- nnunet ----------------------------------------------------------------------------------------------------------


def nnunet(root: Path, *names: str) -> Path:
    for name in names:
        touch(root, f"imagesTr/{name}_0000.nii.gz", f"imagesTr/{name}_0001.nii.gz", f"labelsTr/{name}.nii.gz")
    return root


def test_nnunet_pairs_by_id(tmp_path: Path) -> None:
    root = nnunet(tmp_path, "c_2", "c_10")
    touch(root, "imagesTr/._c_2_0000.nii.gz", "labelsTr/.DS_Store", "imagesTr/notes.txt")
    found = find_cases(NNUNET, root)
    assert [case.name for case in found.cases] == ["c_10", "c_2"]
    assert [path.name for path in found.cases[0].images] == ["c_10_0000.nii.gz", "c_10_0001.nii.gz"]
    (warning,) = found.warnings
    assert "ignored (._c_2_0000.nii.gz, .DS_Store)" in warning


def test_nnunet_takes_channels_by_name_where_it_can(tmp_path: Path) -> None:
    root = nnunet(tmp_path, "a")
    (root / "dataset.json").write_text(json.dumps({"channel_names": {"0": "t1", "1": "Flair"}, "numTraining": 1}))
    found = find_cases(NNUNET, root)
    assert [path.name for path in found.cases[0].images] == ["a_0001.nii.gz", "a_0000.nii.gz"]
    assert found.warnings == ()
    (root / "dataset.json").write_text(json.dumps({"channel_names": {"0": "x", "1": "y"}, "numTraining": 3}))
    found = find_cases(NNUNET, root)
    assert [path.name for path in found.cases[0].images] == ["a_0000.nii.gz", "a_0001.nii.gz"]
    assert len(found.warnings) == 2
    one = make_recipe(source={"kind": "nnunet"}).data
    assert any("_0001" in warning for warning in find_cases(one, root).warnings)


def test_nnunet_tells_every_fault_at_once(tmp_path: Path) -> None:
    root = nnunet(tmp_path, "good")
    touch(root, "imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz", "labelsTr/b.nii.gz")
    touch(root, "imagesTr/c_0000.nii.gz", "imagesTr/c_0001.nii.gz", "imagesTr/good_0001.nii")
    text = "\n".join(faults_of(NNUNET, root))
    assert "case a lacks the image file of channel T1" in text
    assert "the label of case b has no image" in text
    assert "the image of case c has no label" in text
    assert "case good has two files" in text
    assert len(text.splitlines()) == 4


def test_nnunet_that_fits_nothing_says_what_is_there(tmp_path: Path) -> None:
    touch(tmp_path, "imagesTr/1.dcm", "imagesTr/2.dcm")
    (fault,) = faults_of(NNUNET, tmp_path)
    assert "labelsTr does not exist" in fault
    assert "imagesTr/" in fault
    (tmp_path / "labelsTr").mkdir()
    (fault,) = faults_of(NNUNET, tmp_path)
    assert "fits no case: looked for imagesTr/CASE_0000.nii.gz" in fault
    assert "2 .dcm files" in fault
    assert "DICOM is not read" in fault


# --- folders ---------------------------------------------------------------------------------------------------------


def test_folders_pair_by_id_with_suffixes(tmp_path: Path) -> None:
    touch(tmp_path, "scans/p2_ct.nii.gz", "scans/p10_ct.nii", "masks/p10-seg.nii.gz", "masks/p2-seg.nii.gz")
    spec = folders(images="scans", labels="masks", image_suffixes=["_ct"], label_suffix="-seg")
    found = find_cases(spec, tmp_path)
    assert [(case.name, case.images[0].name, case.label and case.label.name) for case in found.cases] == [
        ("p10", "p10_ct.nii", "p10-seg.nii.gz"),
        ("p2", "p2_ct.nii.gz", "p2-seg.nii.gz"),
    ]
    touch(tmp_path, "scans/readme_scan.nii.gz")
    assert "1 file does not fit" in find_cases(spec, tmp_path).warnings[0]


@pytest.mark.parametrize(
    ("image", "label"), [("", "_seg"), ("_img", ""), ("_img", "_seg"), ("_a", "_a_seg"), ("_seg_a", "_a")]
)
def test_images_and_labels_may_share_a_folder(tmp_path: Path, image: str, label: str) -> None:
    for name in ("p1", "p2"):
        touch(tmp_path, f"{name}{image}.nii.gz", f"{name}{label}.nii.gz")
    spec = folders(images=".", labels=".", image_suffixes=[image], label_suffix=label)
    found = find_cases(spec, tmp_path)
    assert [case.name for case in found.cases] == ["p1", "p2"]
    assert {case.images[0].name for case in found.cases} == {f"p1{image}.nii.gz", f"p2{image}.nii.gz"}


def test_folders_take_one_file_a_channel(tmp_path: Path) -> None:
    spec = folders(("T1", "T2"), image_suffixes=["_t1", "_t2"])
    touch(
        tmp_path, "images/a_t1.nii.gz", "images/a_t2.nii.gz", "labels/a.nii.gz", "images/b_t1.nii.gz", "labels/b.nii.gz"
    )
    (fault,) = faults_of(spec, tmp_path)
    assert fault == "case b lacks the image file of channel T2"
    touch(tmp_path, "images/b_t2.nii.gz")
    assert [path.name for path in find_cases(spec, tmp_path).cases[1].images] == ["b_t1.nii.gz", "b_t2.nii.gz"]


def test_folders_faults(tmp_path: Path) -> None:
    faults = faults_of(folders(), tmp_path)
    assert len(faults) == 2
    touch(tmp_path, "images/a.mha", "labels/a.mha")
    assert "found 1 .mha file in images" in faults_of(folders(), tmp_path)[0]
    touch(tmp_path, "images/a.nii.gz", "labels/b.nii.gz")
    faults = faults_of(folders(), tmp_path)
    assert len(faults) == 3
    assert "looked for images/CASE.nii.gz with labels/CASE.nii.gz; is that how the files are named?" in faults[0]
    touch(tmp_path, "labels/a.nii.gz")
    assert len(faults_of(folders(), tmp_path)) == 1
    assert "share" in faults_of(folders(images=".", labels="."), touch(tmp_path, "x.nii"))[0]
    assert (
        "image_suffixes has 2 entries for 3"
        in faults_of(folders(("a", "b", "c"), image_suffixes=["x", "y"]), tmp_path)[0]
    )
    assert "twice" in faults_of(folders(("a", "b"), image_suffixes=["x", "x"]), tmp_path)[0]


# --- real data -------------------------------------------------------------------------------------------------------


def test_real_hippocampus(real_data: Callable[[str], Path]) -> None:
    recipe = make_recipe(classes={1: "Anterior", 2: "Posterior"}, channels=["MRI"], intensity={"kind": "zscore"})
    found = find_cases(recipe.data, real_data("hippocampus"))
    assert len(found.cases) == 260
    assert found.warnings == ()
    preprocess = Preprocess(recipe)
    for case in found.cases[::40]:
        sample = preprocess.as_sample(preprocess(case))
        assert abs(float(sample.image.mean())) < 1e-3
        assert all(len(centres) > 100 for centres in sample.centres)


def test_real_brats_labels_are_float(real_data: Callable[[str], Path]) -> None:
    classes = {1: "necrosis", 2: "oedema", 3: "non-enhancing", 4: "enhancing"}
    recipe = make_recipe(source={"kind": "nnunet"}, channels=["FLAIR", "T1c"], classes=classes)
    found = find_cases(recipe.data, real_data("brats2013"))
    assert len(found.cases) == 4
    preprocess = Preprocess(recipe, training=False)
    sample = preprocess.as_sample(preprocess(found.cases[0]))
    assert sample.image.shape == (2, 240, 240, 155)
    assert sample.label is not None
    assert sample.label.unique().tolist() == [0, 1, 2, 3, 4]


def test_real_ct_organs_in_folders(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    origin = real_data("ct_organs")
    for folder, name in (("images", "example_ct"), ("labels", "example_ct_organs15")):
        (tmp_path / folder).mkdir()
        shutil.copy(origin / f"{name}.nii.gz", tmp_path / folder)
    organs = json.loads((origin / "example_ct_organs15_labels.json").read_text())
    recipe = make_recipe(
        source={"kind": "folders", "image_suffixes": ["_ct"], "label_suffix": "_ct_organs15"},
        classes={value: name for name, value in organs.items() if value},
        spacing=[4.0, 4.0, 4.0],
        intensity={"kind": "window", "low": -160, "high": 240},
    )
    (case,) = find_cases(recipe.data, tmp_path).cases
    assert case.name == "example"
    preprocess = Preprocess(recipe)
    sample = preprocess.as_sample(preprocess(case))
    assert sample.grid.shape == (92, 76, 84)
    assert len(sample.centres) == 15
    assert 0 <= float(sample.image.min()) < float(sample.image.max()) <= 1


def test_cases_that_lack_a_file_are_incomplete_and_the_rest_is_found(tmp_path: Path) -> None:
    root = nnunet(tmp_path, "good", "sound")
    touch(root, "imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz", "labelsTr/b.nii.gz", "imagesTr/sound_0001.nii")
    found = look_for_cases(NNUNET, root)
    assert [case.name for case in found.cases] == ["good"]
    assert [case.name for case in found.incomplete] == ["a", "b", "sound"] == list(found.faults)
    assert [case.name for case in found.every] == ["a", "b", "good", "sound"]
    lone = found.incomplete[1]
    assert (lone.images, lone.label) == ((), root / "labelsTr/b.nii.gz")
    assert "lacks the image file of channel" in found.faults["a"][0]


def test_another_layout_than_the_recipe_s_is_hinted_at(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / "nn" / f"imagesTr/{name}_0000.nii.gz", np.zeros((4, 4, 4), np.float32))
        save(tmp_path / "nn" / f"labelsTr/{name}.nii.gz", np.zeros((4, 4, 4), np.uint8))
        save(tmp_path / "flat" / f"{name}.nii.gz", np.zeros((4, 4, 4), np.float32))
        save(tmp_path / "flat" / f"{name}_seg.nii.gz", np.zeros((4, 4, 4), np.uint8))
    with pytest.raises(DataError) as refused:
        cases_for(DECATHLON, tmp_path / "nn")
    (fault,) = refused.value.faults
    assert "dataset.json does not exist; a Decathlon folder has it at its top; " in fault
    assert fault.endswith("looks like nnU-Net's layout (imagesTr/CASE_0000.nii.gz): --set data.source.kind=nnunet")
    plain = make_recipe(source={"kind": "folders"}).data
    with pytest.raises(DataError) as refused:
        cases_for(plain, tmp_path / "flat")
    assert "flat holds 4 .nii.gz files" in refused.value.faults[0]
    assert refused.value.faults[-1].endswith(
        "--set data.source.kind=folders --set data.source.images=. --set data.source.labels=. "
        "--set data.source.label_suffix=_seg"
    )
    # Negative control: what is wrong with a folder of the recipe's own layout is not its layout
    (tmp_path / "nn/imagesTr/a_0000.nii.gz").unlink()
    (tmp_path / "nn/imagesTr/b_0000.nii.gz").unlink()
    with pytest.raises(DataError) as refused:
        cases_for(NNUNET, tmp_path / "nn")
    assert "looks like" not in str(refused.value)
