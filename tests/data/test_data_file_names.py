"""Names of files: one Unicode form whatever the file system and the locale; what systems leave behind is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from data_builders import make_recipe, save, write_decathlon
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.data.file_names import FileFinder, as_file_name, as_text, is_left_behind
from fasttrain.data.layouts import recognise
from fasttrain.data.sources import find_cases
from fasttrain.data.sources.unlabelled import channel_suffixes, find_unlabelled
from fasttrain.data.splits import split_cases
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, ListsSplit

NAMES = ("Müller 1", "患者 二", "Ångström é", "plain")
SOURCES: dict[str, dict[str, Any]] = {
    "decathlon": {"kind": "decathlon"},
    "nnunet": {"kind": "nnunet"},
    "folders": {"kind": "folders", "images": "Bilder ä", "labels": "Masken ä", "image_suffixes": ["_größe"]},
}


def spec_of(kind: str) -> DataSpec:
    return make_recipe(source=SOURCES[kind]).data


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def write(root: Path, kind: str, images: str = "NFC", labels: str = "NFC", listed: str = "NFC") -> None:
    """A set of NAMES with image files, label files and the JSON in a Unicode form each."""
    form = unicodedata.normalize
    entries = []
    for name in NAMES:
        if kind == "folders":
            image, label = f"Bilder ä/{name}_größe.nii.gz", f"Masken ä/{name}.nii.gz"
        else:
            image, label = f"imagesTr/{name}{'_0000' if kind == 'nnunet' else ''}.nii.gz", f"labelsTr/{name}.nii.gz"
        touch(root, form(images, image), form(labels, label))
        entries.append({"image": form(listed, "./" + image), "label": form(listed, label)})
    if kind == "decathlon":
        (root / "dataset.json").write_text(json.dumps({"training": entries}, ensure_ascii=False), encoding="utf-8")


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("images", "labels", "listed"), [
    ("NFC", "NFC", "NFC"), ("NFD", "NFD", "NFC"), ("NFC", "NFC", "NFD"), ("NFD", "NFC", "NFC"), ("NFC", "NFD", "NFD"),
])  # fmt: skip
def test_names_pair_in_every_unicode_form(tmp_path: Path, kind: str, images: str, labels: str, listed: str) -> None:
    write(tmp_path, kind, images, labels, listed)
    found = find_cases(spec_of(kind), tmp_path)
    assert [case.name for case in found.cases] == sorted(NAMES)
    assert found.warnings == ()
    for case in found.cases:
        assert case.label is not None
        assert all(path.read_bytes() == b"x" for path in (*case.images, case.label))
        if kind == "nnunet":
            assert channel_suffixes(spec_of(kind), case) == ["_0000"]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_splits_and_predict_know_a_case_by_the_same_name(tmp_path: Path, form: str) -> None:
    write(tmp_path, "folders", "NFD", "NFD")
    cases = find_cases(spec_of("folders"), tmp_path).cases
    written = [unicodedata.normalize(form, name) for name in NAMES]
    split = split_cases(cases, ListsSplit(kind="lists", train=tuple(written[1:]), validation=(written[0],)))
    assert [case.name for case in split.validation] == ["Müller 1"]
    assert len(split.train) == 3
    folder = tmp_path / unicodedata.normalize("NFD", "Bilder ä")
    assert [case.name for case in find_unlabelled(spec_of("folders"), folder)] == sorted(NAMES)
    one = find_unlabelled(spec_of("folders"), folder / unicodedata.normalize("NFD", "Müller 1_größe.nii.gz"))
    assert [case.name for case in one] == ["Müller 1"]


def test_one_name_in_both_forms_is_one_case_twice(tmp_path: Path) -> None:
    write(tmp_path, "nnunet", "NFC", "NFC")
    touch(tmp_path, unicodedata.normalize("NFD", "imagesTr/Müller 1_0000.nii.gz"))
    with pytest.raises(DataError, match="case Müller 1 has two files where one is expected") as caught:
        find_cases(spec_of("nnunet"), tmp_path)
    assert len(caught.value.faults) == 1


def test_a_layout_is_recognised_in_mixed_forms(tmp_path: Path) -> None:
    import numpy as np

    for name in NAMES:
        image = unicodedata.normalize("NFD", f"images/{name}_größe.nii.gz")
        save(tmp_path / image, np.arange(24, dtype=np.float32).reshape(2, 3, 4))
        save(tmp_path / f"labels/{name}_segé.nii.gz", np.ones((2, 3, 4), np.uint8))
    layout = recognise(tmp_path)
    assert [case.name for case in layout.cases] == sorted(NAMES)
    assert (layout.source.image_suffixes, layout.source.label_suffix) == (("_größe",), "_segé")  # type: ignore[union-attr]


@given(st.text(min_size=1, max_size=12))
def test_text_and_file_name_are_each_others_way_back(text: str) -> None:
    try:
        name = as_file_name(text)
    except UnicodeEncodeError:
        return
    assert as_text(name) == unicodedata.normalize("NFC", text)
    assert as_text(as_text(name)) == as_text(name)


def test_bytes_that_are_no_utf8_stay_apart_and_pair(tmp_path: Path) -> None:
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
        for name in (b"M\xfcller", b"M\xe4ller"):
            with open(os.path.join(os.fsencode(tmp_path / folder), name + b".nii.gz"), "wb") as stream:
                stream.write(b"x")
    cases = find_cases(make_recipe(source={"kind": "folders"}).data, tmp_path).cases
    assert [os.fsencode(case.name) for case in cases] == [b"M\xe4ller", b"M\xfcller"]


def test_the_finder_answers_every_text(tmp_path: Path) -> None:
    touch(tmp_path, "sub dir/ä.nii", "a\\b.nii")
    finder = FileFinder(tmp_path)
    assert finder.find("./sub dir/ä.nii").is_file()
    assert finder.find("sub dir\\a\u0308.nii") == tmp_path / "sub dir" / "ä.nii"
    # A backslash that is part of the name goes first
    assert finder.find("a\\b.nii").name == "a\\b.nii"
    assert finder.find(str(tmp_path / "sub dir" / "a\u0308.nii")).is_file()
    for strange in ("", "\0", "x" * 5000, "\ud800", "../" * 40 + "ü", "~", "C:\\data\\ü.nii"):
        assert isinstance(finder.find(strange), Path)


_UNDER_C = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from data_builders import make_recipe
from fasttrain.data.file_names import as_file_name
from fasttrain.data.sources import find_cases
from fasttrain.errors import DataError
found = find_cases(make_recipe(source=json.loads(sys.argv[2])).data, Path(sys.argv[1]))
for case in found.cases:
    assert all(path.read_bytes() == b"x" for path in (*case.images, case.label))
    assert Path(sys.argv[1], as_file_name(case.name)).name
print(json.dumps([case.name for case in found.cases]), json.dumps(found.warnings), sys.getfilesystemencoding())
(found.cases[0].label).unlink()
try:
    find_cases(make_recipe(source=json.loads(sys.argv[2])).data, Path(sys.argv[1]))
except DataError as error:
    sys.stderr.write(error.faults[0])
"""


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("utf8", ["0", None])
def test_names_are_the_same_under_the_c_locale(tmp_path: Path, kind: str, utf8: str | None) -> None:
    root = tmp_path / "Daten für 患者"
    write(root, kind, "NFD", "NFC")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    environment |= {"LC_ALL": "C"} | ({"PYTHONUTF8": utf8} if utf8 else {})
    done = subprocess.run(
        [sys.executable, "-c", _UNDER_C, root, json.dumps(SOURCES[kind]), Path(__file__).parent],
        env=environment,
        capture_output=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    names, warnings, encoding = done.stdout.decode().rsplit(maxsplit=2)
    assert json.loads(names) == sorted(NAMES)
    assert warnings == "[]"
    assert encoding == ("ascii" if utf8 == "0" else "utf-8")
    assert b"Traceback" not in done.stderr
    assert b"label" in done.stderr


# --- what systems leave behind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
def test_what_macos_and_windows_left_behind_is_ignored_with_its_count(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    folder = "Bilder ä" if kind == "folders" else "imagesTr"
    labels = "Masken ä" if kind == "folders" else "labelsTr"
    touch(tmp_path, ".DS_Store", "__MACOSX/imagesTr/._plain.nii.gz", "Thumbs.db", f"{labels}/desktop.ini")
    touch(tmp_path, f"{folder}/._plain_größe.nii.gz", f"{folder}/._plain_0000.nii.gz", f"{folder}/.hidden.nii.gz")
    found = find_cases(spec_of(kind), tmp_path)
    assert [case.name for case in found.cases] == sorted(NAMES)
    (warning,) = found.warnings
    assert f"{tmp_path}: 7 files that macOS or Windows left behind" in warning
    assert "and 2 more" in warning
    assert "\n" not in warning
    if kind != "decathlon":
        assert [case.name for case in find_unlabelled(spec_of(kind), tmp_path / folder)] == sorted(NAMES)


def test_a_list_that_a_glob_made_may_name_them(tmp_path: Path) -> None:
    root = write_decathlon(tmp_path, ["a", "b"])
    document = json.loads((root / "dataset.json").read_text())
    touch(root, "imagesTr/._a.nii.gz", "labelsTr/._a.nii.gz")
    entry = {"image": "./imagesTr/._a.nii.gz", "label": "./labelsTr/._a.nii.gz"}
    gone = {"image": "imagesTr\\._b.nii.gz", "label": "labelsTr/._b.nii.gz"}
    document |= {"training": [entry, gone, *document["training"]], "numTraining": 4}
    (root / "dataset.json").write_text(json.dumps(document))
    found = find_cases(spec_of("decathlon"), root)
    assert [case.name for case in found.cases] == ["a", "b"]
    (warning,) = found.warnings
    assert "3 files that macOS" in warning
    # A label alone that is none would drop the image in silence
    document["training"] = [{"image": "imagesTr/a.nii.gz", "label": "labelsTr/._a.nii.gz"}]
    (root / "dataset.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"training\[0\]: the label .* is what macOS left beside a file"):
        find_cases(spec_of("decathlon"), root)
    document["training"] = [entry]
    (root / "dataset.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="fits no case: all it lists"):
        find_cases(spec_of("decathlon"), root)


def test_they_are_told_from_files_of_people() -> None:
    for name in ("._a.nii.gz", ".DS_Store", "__MACOSX", "THUMBS.DB", "desktop.ini", "@eaDir", "Icon\r"):
        assert is_left_behind(name)
    for name in ("a._b.nii.gz", "_a.nii.gz", "DS_Store.nii", "thumbs.nii.gz", "icon"):
        assert not is_left_behind(name)


def test_a_layout_beside_a_macos_folder(tmp_path: Path) -> None:
    root = write_decathlon(tmp_path / "set", ["a", "b"])
    (root / "dataset.json").unlink()
    touch(root, "__MACOSX/imagesTr/._a.nii.gz", "imagesTr/._a.nii.gz", "imagesTr/._a_0000.nii.gz", ".DS_Store")
    layout = recognise(root)
    assert [case.name for case in layout.cases] == ["a", "b"]
    assert sum("left behind" in text for text in layout.warnings) == 1


def test_predict_is_told_of_one(tmp_path: Path) -> None:
    touch(tmp_path, "._a.nii.gz")
    with pytest.raises(DataError, match="is what macOS left beside a file"):
        find_unlabelled(spec_of("decathlon"), tmp_path / "._a.nii.gz")
