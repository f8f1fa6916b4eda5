"""The kinds that store volumes never lie: whatever happened to the files, the recipe, the entries, the disk or the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_checks import RECIPE, assert_same, assert_true, opened_with_lines, write_cases
from data_builders import make_recipe, save

import fasttrain.data.caches.keys as keys
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError, MachineError, StorageError
from fasttrain.samples import Case

STORED = ["disk", "lmdb"]
ALL_THERE = "4 of 4 cases were there"


@pytest.fixture
def cases(tmp_path: Path) -> tuple[Case, ...]:
    return write_cases(tmp_path / "set", 4)


def with_data(**changed: Any) -> Preprocess:
    patch = changed.pop("patch", RECIPE.patch.model_dump())
    return Preprocess(make_recipe(**{**RECIPE.data.model_dump(), **changed}, patch=patch))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", STORED)
def test_an_unchanged_rerun_finds_all_and_says_so(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    _, cold, _ = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
    source, warm, warnings = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "0 of 4 cases were there" in cold[0]
    assert f"{ALL_THERE} (100%), " in warm[0]
    assert str(tmp_path / "cache") in warm[0]
    assert warnings == []
    assert_true(source, cases, Preprocess(RECIPE))


def _longer(path: Path) -> None:
    save(path, np.ones((18, 17, 22), np.float32), np.diag([1, 1, 1.3, 1.0]))


def _other_values(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[-400:] = np.linspace(-1, 1, 100, dtype=np.float32).tobytes()
    path.write_bytes(bytes(blob))


def _restored_with_other_values(path: Path) -> None:
    former = os.stat(path)
    _other_values(path)
    os.utime(path, ns=(former.st_atime_ns, former.st_mtime_ns + 1))


def _longer_at_the_former_time(path: Path) -> None:
    former = os.stat(path)
    _longer(path)
    os.utime(path, ns=(former.st_atime_ns, former.st_mtime_ns))


@pytest.mark.parametrize("change", [_longer, _longer_at_the_former_time, _other_values, _restored_with_other_values])
@pytest.mark.parametrize("kind", STORED)
def test_a_changed_file_is_read_again(kind: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    cases = tuple(Case(case.name, case.images, None) for case in write_cases(tmp_path / "set", 4))
    first, _, _ = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
    former = first[3]
    held = files_of(tmp_path / "cache")
    change(cases[3].images[0])
    source, lines, warnings = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "3 of 4" in lines[0]
    assert warnings == []  # to be out of date is no fault
    assert_true(source, cases, Preprocess(RECIPE))
    assert former.image.shape != source[3].image.shape or not torch.equal(former.image, source[3].image)
    assert files_of(tmp_path / "cache") == held  # what is superseded does not pile up
    if kind == "disk":
        assert_same(first[3], former)  # a source that is open stays as it was


@pytest.mark.parametrize("kind", STORED)
def test_a_changed_label_is_read_again(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    assert cases[0].label is not None
    blob = bytearray(cases[0].label.read_bytes())
    blob[-100:] = b"\1" * 100
    cases[0].label.write_bytes(bytes(blob))
    source, lines, _ = opened_with_lines(kind, cases, Preprocess(RECIPE), tmp_path / "cache")
    assert "3 of 4" in lines[0]
    assert_true(source, cases, Preprocess(RECIPE))


@pytest.mark.parametrize(
    "changed",
    [
        {"storage_dtype": "float32"},
        {"spacing": [1.0, 1.0, 1.25]},
        {"intensity": {"kind": "zscore"}},
        {"intensity": {"kind": "window", "low": -2.0, "high": 1.5}},
        {"orientation": "LPS"},
        {"orientation": None},
        {"crop_foreground": {"above": 0.99}},
        {"crop_foreground": None},
        {"nan_policy": "replace"},
        {"classes": {2: "kidney", 1: "spleen"}},
        {"patch": {"size": [16, 16, 24], "background_above": 0.4}},
        {"patch": {"size": [16, 16, 16], "background_above": 0.5}},
        {"patch": {"size": [16, 16, 16], "background_above": None}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", STORED)
def test_a_changed_setting_builds_anew_and_the_former_entries_stay(
    cases: tuple[Case, ...], kind: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    open_case_source(kind, cases, with_data(), 2, folder=tmp_path / "cache")
    source, lines, _ = opened_with_lines(kind, cases, with_data(**changed), tmp_path / "cache")
    assert "0 of 4" in lines[0]
    assert_true(source, cases, with_data(**changed))
    assert ALL_THERE in opened_with_lines(kind, cases, with_data(), tmp_path / "cache")[1][0]


@pytest.mark.parametrize(
    "changed",
    [
        {"samples_per_case": 4},
        {"workers": 3},
        {"prefetch_factor": 5},
        {"split": {"kind": "ratio"}},
        {"cache": {"kind": "disk"}},
        {"name": "other"},
        {"patch": {"size": [16, 16, 16], "background_above": 0.4, "foreground": 0.9, "foreground_by": "class"}},
    ],
    ids=str,
)
def test_what_does_not_change_a_volume_is_not_in_the_key(changed: dict[str, Any]) -> None:
    assert keys.settings_digest(with_data(**changed)) == keys.settings_digest(with_data())


def test_training_and_validation_have_their_own_keys_and_the_patch_counts_in_training_alone() -> None:
    wide = RECIPE.model_copy(update={"patch": RECIPE.patch.model_copy(update={"size": (24, 24, 24)})})
    digests = [
        keys.settings_digest(Preprocess(recipe, training=part)) for recipe in (RECIPE, wide) for part in (True, False)
    ]
    assert digests[1] == digests[3]
    assert len({digests[0], digests[1], digests[2]}) == 3


@pytest.mark.parametrize("package", ["fasttrain", "monai", "torch", "nibabel"])
def test_other_versions_have_other_keys(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    former, version = keys.settings_digest(Preprocess(RECIPE)), keys.importlib.metadata.version
    monkeypatch.setattr(keys.importlib.metadata, "version", lambda name: "99.0" if name == package else version(name))
    assert keys.settings_digest(Preprocess(RECIPE)) != former
    monkeypatch.undo()
    monkeypatch.setattr(keys, "_code_digest", lambda: "edited")
    assert keys.settings_digest(Preprocess(RECIPE)) != former


@pytest.mark.parametrize("kind", STORED)
def test_a_case_that_changes_while_it_is_read_is_not_kept(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    class Late(Preprocess):
        def __call__(self, case: Case) -> dict[str, Any]:
            record = super().__call__(case)
            if case is cases[1]:
                os.utime(case.images[0])
            return record

    with pytest.raises(DataError, match="changed while it was read"):
        open_case_source(kind, cases, Late(RECIPE), 2, folder=tmp_path / "cache")


@pytest.mark.parametrize("kind", STORED)
def test_a_folder_that_cannot_be_made_is_said(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written: Not a directory.*data\.cache\.folder") as caught:
        open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in str(caught.value)


def test_lmdb_that_is_not_installed_is_said(
    cases: tuple[Case, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(MachineError, match=r"pip install 'fasttrain\[lmdb\]'"):
        open_case_source("lmdb", cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
