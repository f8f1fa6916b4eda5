"""`dataset.json` in the variants that people and tools write: read alike, or one sentence that names the place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from data_builders import make_recipe, write_decathlon
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.data.sources import find_cases
from fasttrain.data.sources.dataset_json import channel_table, label_values, read_dataset_json
from fasttrain.errors import DataError

DECATHLON = make_recipe().data


def rewrite(root: Path, **changes: Any) -> Path:
    path = root / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def fault_of(root: Path, source: dict[str, Any] | None = None, channels: tuple[str, ...] = ("CT",)) -> str:
    with pytest.raises(DataError) as caught:
        find_cases(make_recipe(source=source or {"kind": "decathlon"}, channels=list(channels)).data, root)
    (fault,) = caught.value.faults
    assert "\n" not in fault
    assert "dataset.json" in fault
    return fault


@pytest.mark.parametrize("test", [["./imagesTs/t.nii.gz"], [{"image": "./imagesTs/t.nii.gz"}], [], None, "imagesTs"])
def test_cases_to_predict_are_left_out_however_they_are_listed(tmp_path: Path, test: Any) -> None:
    found = find_cases(DECATHLON, write_decathlon(tmp_path, ["a", "b"], test=test))
    assert [case.name for case in found.cases] == ["a", "b"]
    assert found.warnings == ()


@pytest.mark.parametrize("labels", [
    {"background": 0, "liver": 1, "kidney": 2}, {"0": "background", "1": "liver", "2": "kidney"},
    {"background": "0", "liver": "1", "kidney": "2"}, {"background": 0, "liver": 1.0, "kidney": 2.0},
    ["background", "liver", "kidney"],
])  # fmt: skip
def test_labels_in_every_dialect(tmp_path: Path, labels: Any) -> None:
    root = write_decathlon(tmp_path, ["a"], labels=labels)
    assert label_values({"labels": labels}) == {0: "background", 1: "liver", 2: "kidney"}
    assert find_cases(DECATHLON, root).warnings == ()


def test_regions_and_doubled_values_are_warnings(tmp_path: Path) -> None:
    root = write_decathlon(tmp_path, ["a"], labels={"background": 0, "whole": [1, 2], "core": [2]})
    (warning,) = find_cases(DECATHLON, root).warnings
    assert "declares regions of several label values (whole, core)" in warning
    rewrite(root, labels={"background": 0, "liver": 1, "organ": 1, "kidney": 2})
    (warning,) = find_cases(DECATHLON, root).warnings
    assert "gives the label 1 several names (liver, organ)" in warning
    rewrite(root, labels={"background": 0, "liver": 1, "kidney": 3})
    (warning,) = find_cases(DECATHLON, root).warnings
    assert "names the labels 1 liver, 3 kidney, but data.classes declares 1 liver, 2 kidney" in warning


def test_the_ignore_label_and_the_label_map_are_known(tmp_path: Path) -> None:
    labels = {"background": 0, "liver": 1, "kidney": 2, "ignore": 3}
    root = write_decathlon(tmp_path, ["a"], labels=labels)
    (warning,) = find_cases(DECATHLON, root).warnings
    assert "has the label 3 ignore; set data.ignore_label: 3" in warning
    assert find_cases(make_recipe(ignore_label=3).data, root).warnings == ()
    rewrite(root, labels={"background": 0, "liver": 1, "kidney": 255})
    assert "1 liver, 255 kidney" in find_cases(DECATHLON, root).warnings[0]
    assert find_cases(make_recipe(label_map={255: 2}).data, root).warnings == ()


@pytest.mark.parametrize(
    ("announced", "warned"), [(2, False), ("2", False), (2.0, False), (None, False), (7, True), ("x", True)]
)
def test_a_wrong_number_of_cases_is_a_warning(tmp_path: Path, announced: Any, warned: bool) -> None:
    warnings = find_cases(DECATHLON, write_decathlon(tmp_path, ["a", "b"], numTraining=announced)).warnings
    assert len(warnings) == warned
    assert all(f"numTraining is {announced}, but there are 2 cases" in text for text in warnings)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks(tmp_path: Path, encoding: str) -> None:
    path = write_decathlon(tmp_path, ["a"]) / "dataset.json"
    path.write_bytes(json.dumps(json.loads(path.read_text())).encode(encoding))
    assert len(find_cases(DECATHLON, tmp_path).cases) == 1


@pytest.mark.parametrize(("text", "place"), [
    ('{"training": [\n  {"image": "a",}\n]}', "line 2, column 16: a comma too many"),
    ('{"training": [\n  {"image": "ä", "label": "b"},\n\n\n]}', "line 2, column 31: a comma too many"),
    ('{"training": [,\n]}', "line 1, column 15: a comma too many"),
    ('{"training": [],\n,"b": 1}', "line 1, column 16: a comma too many"),
    ('{"training": []\n "b": 1}', "line 2, column 2: Expecting ',' delimiter"),
    ('{"training" []}', "line 1, column 13: Expecting ':' delimiter"),
    ("{'training': []}", "line 1, column 2: Expecting property name"),
    ("", "line 1, column 1: Expecting value"),
    ('{"training": []}}', "line 1, column 17: Extra data"),
])  # fmt: skip
def test_a_misplaced_comma_is_told_by_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "dataset.json").write_text(text, encoding="utf-8")
    fault = fault_of(tmp_path)
    assert place in fault
    assert fault.endswith("mend the JSON")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_a_document_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    document = {"labels": {"1": "ä"}, "numTraining": 1, "training": [{"image": "a.nii", "label": "b.nii"}]}
    blob = bytearray(json.dumps(document, ensure_ascii=False, indent=1).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    (folder / "dataset.json").write_bytes(bytes(blob[: data.draw(st.integers(0, len(blob)))]))
    with pytest.raises(DataError) as caught:  # at the least the files are missing
        find_cases(DECATHLON, folder)
    assert all(str(folder) in fault and "\n" not in fault for fault in caught.value.faults)


def test_paths_are_relative_to_the_json(tmp_path: Path) -> None:
    write_decathlon(tmp_path / "sub folder", ["a"])
    source = {"kind": "decathlon", "file": "sub folder/dataset.json"}
    (case,) = find_cases(make_recipe(source=source).data, tmp_path).cases
    assert case.images == (tmp_path / "sub folder/imagesTr/a.nii.gz",)
    root = tmp_path / "sub folder"
    absolute = {"image": str(root / "imagesTr/a.nii.gz"), "label": str(root / "labelsTr/a.nii.gz")}
    for entry in (
        {"image": "imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"},
        {"image": ".\\imagesTr\\a.nii.gz", "label": "labelsTr\\a.nii.gz"},
        {"image": "../sub folder/imagesTr/a.nii.gz", "label": "./././labelsTr/a.nii.gz"},
        {"image": ["imagesTr/a.nii.gz"], "label": "labelsTr/a.nii.gz"},
        absolute,
    ):
        rewrite(root, training=[entry])
        (case,) = find_cases(make_recipe(source=source).data, tmp_path).cases
        assert case.name == "a"
        assert case.label is not None
        assert os.path.samefile(case.label, root / "labelsTr/a.nii.gz")
        assert os.path.samefile(case.images[0], root / "imagesTr/a.nii.gz")
    rewrite(root, training=[{**absolute, "label": "C:\\data\\labelsTr\\a.nii.gz"}])
    assert "C:\\data\\labelsTr\\a.nii.gz does not exist" in fault_of(tmp_path, source)
    for strange in ("x" * 5000, "a\0b", "\ud800"):
        rewrite(root, training=[{**absolute, "label": strange}])
        assert "does not exist" in fault_of(tmp_path, source)


@pytest.mark.parametrize(("training", "expected"), [
    ({"image": "imagesTr/a.nii.gz", "label": "labelsTr/a.nii.gz"}, "found one entry that is in no list"),
    ({"a": {"image": "x", "label": "y"}}, "found an object"),
    ("imagesTr", "found 'imagesTr'"),
    (None, "found None"),
    (["imagesTr/a.nii.gz"], "training[0] is 'imagesTr/a.nii.gz'; an object with 'image' and 'label' is expected"),
    ([["imagesTr/a.nii.gz", "labelsTr/a.nii.gz"]], "an object with 'image' and 'label' is expected"),
    ([{"image": "imagesTr/a.nii.gz", "label": ["labelsTr/a.nii.gz"]}], "has no label; give 'label' a path"),
    ([{"image": {"0": "x"}, "label": "labelsTr/a.nii.gz"}], "has no image; give 'image' a path"),
    ([{"image": "imagesTr", "label": "labelsTr/a.nii.gz"}], "imagesTr is a folder"),
])  # fmt: skip
def test_a_list_of_another_form_is_one_sentence(tmp_path: Path, training: Any, expected: str) -> None:
    rewrite(write_decathlon(tmp_path, ["a"]), training=training)
    assert expected in fault_of(tmp_path)


def test_an_nnunet_json_names_the_source_for_it(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({"channel_names": {"0": "CT"}, "file_ending": ".nii.gz"}))
    assert "data.source.kind: nnunet" in fault_of(tmp_path)


def test_a_key_that_stands_twice_is_refused_where_the_values_differ(tmp_path: Path) -> None:
    path = write_decathlon(tmp_path, ["a"]) / "dataset.json"
    text = path.read_text()
    path.write_text('{"training": [], ' + text.lstrip("{"))
    assert "has the key 'training' twice in one object, with different values" in fault_of(tmp_path)
    path.write_text(text.replace('"1": "liver"', '"1": "liver", "1": "spleen"'))
    assert "has the key '1' twice" in fault_of(tmp_path)
    path.write_text(text.replace('"1": "liver"', '"1": "liver", "1": "liver"'))
    assert len(find_cases(DECATHLON, tmp_path).cases) == 1


# --- nnU-Net's -----------------------------------------------------------------------------------------------------------


def nnunet(root: Path, ending: str = ".nii.gz", **document: Any) -> Path:
    for name in ("a_0000", "a_0001"):
        (root / "imagesTr").mkdir(exist_ok=True)
        (root / "imagesTr" / f"{name}{ending}").write_bytes(b"x")
    (root / "labelsTr").mkdir(exist_ok=True)
    (root / "labelsTr" / f"a{ending}").write_bytes(b"x")
    (root / "dataset.json").write_text(json.dumps(document))
    return root


@pytest.mark.parametrize(("key", "table"), [
    ("channel_names", {"0": "T2", "1": "ADC"}), ("modality", {"0": "t2", "1": "adc"}), ("channel_names", ["T2", "ADC"]),
    ("modality", {"T2": 0, "ADC": 1}), ("channel_names", {"T2": "0", "ADC": "1"}),
])  # fmt: skip
def test_channels_in_every_dialect(tmp_path: Path, key: str, table: Any) -> None:
    data = make_recipe(source={"kind": "nnunet"}, channels=["ADC", "T2"]).data
    found = find_cases(data, nnunet(tmp_path, **{key: table}))
    assert found.warnings == ()
    assert [path.name for path in found.cases[0].images] == ["a_0001.nii.gz", "a_0000.nii.gz"]


@pytest.mark.parametrize("table", ["T2", None, 3, {"x": "T2"}, {}, []])
def test_a_table_that_names_other_channels_leaves_their_order(tmp_path: Path, table: Any) -> None:
    data = make_recipe(source={"kind": "nnunet"}, channels=["ADC", "T2"]).data
    found = find_cases(data, nnunet(tmp_path, channel_names=table))
    assert [path.name for path in found.cases[0].images] == ["a_0000.nii.gz", "a_0001.nii.gz"]
    assert len(found.warnings) == (table == "T2")
    assert all(isinstance(name, str) for name in channel_table({"channel_names": table}).values())


def test_the_ending_that_the_json_names(tmp_path: Path) -> None:
    source = {"kind": "nnunet"}
    data = make_recipe(source=source, channels=["ADC", "T2"]).data
    for ending in (".png", ".mha", 3, ""):
        fault = fault_of(nnunet(tmp_path, file_ending=ending), source, ("ADC", "T2"))
        assert f"file_ending is {ending!r}, but .nii.gz and .nii are read" in fault
    root = nnunet(tmp_path, ".nii", file_ending=".nii.gz")
    found = find_cases(data, root)
    assert [path.name for path in found.cases[0].images] == ["a_0000.nii.gz", "a_0001.nii.gz"]
    assert "3 files that end otherwise are not used (a_0000.nii, a_0001.nii, a.nii)" in found.warnings[0]
    assert find_cases(data, nnunet(tmp_path, file_ending=".nii")).cases[0].images[0].name == "a_0000.nii"


def test_a_list_of_files_in_nnunets_json_is_said_to_be_unread(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({"dataset": {"a": {"images": ["x"], "label": "y"}}}))
    with pytest.raises(DataError, match="the list 'dataset' in dataset.json is not read"):
        find_cases(make_recipe(source={"kind": "nnunet"}).data, tmp_path)


def test_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text('{"numTraining": ' + "1" * 9000 + "}")
    with pytest.raises(DataError, match="is no dataset.json"):
        read_dataset_json(tmp_path / "dataset.json")
