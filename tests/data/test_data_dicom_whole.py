"""DICOM through the whole of fasttrain: every cache, the check, a run, predictions, and a machine without the extra."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from cache_checks import assert_same
from data_builders import make_recipe, save

pytest.importorskip("highdicom", reason="the extra dicom is not installed")
from dicom_builders import change_file, in_patient, write_segmentation, write_series, write_structures

from fasttrain.cli import main
from fasttrain.data.caches import CACHES, open_case_source
from fasttrain.data.caches.keys import key_of, place_of, settings_digest
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.data.volume_files import read_file, read_header
from fasttrain.recipe import resolve

SHAPE = (10, 24, 20)
RECIPE = make_recipe(
    source={"kind": "dicom"},
    intensity={"kind": "window", "low": -1024, "high": 2000},
    spacing=[1.0, 1.0, 3.0],
    patch={"size": [16, 16, 8]},
)


def write_set(root: Path) -> Path:
    """Three cases: one with a SEG, one with an RTSTRUCT, one with a NIfTI mask beside it."""
    rng = np.random.default_rng(0)
    bright = np.zeros(SHAPE, dtype=bool)
    bright[3:7, 6:16, 5:14] = True
    for name in ("p1", "p2", "p3"):
        stored = (rng.integers(0, 400, SHAPE) + 900 * bright).astype(np.uint16)
        paths = write_series(root / name, stored, name, patient=name)
        if name == "p1":
            write_segmentation(
                root / name / "seg.dcm", paths, {"liver": bright, "kidney": np.roll(bright, 9, axis=2) & ~bright}
            )
        elif name == "p2":
            corners = np.array([(4.5, 5.5), (13.5, 5.5), (13.5, 15.5), (4.5, 15.5)])
            contours = [in_patient(corners, place) for place in range(3, 7)]
            write_structures(root / name / "rs.dcm", paths, {"Liver": contours})
        else:
            save(root / f"{name}.nii.gz", bright.transpose(2, 1, 0).astype(np.uint8), read_header(paths[0]).affine)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set"))


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Runs the command line in this process, in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    environ = dict(os.environ)

    def called(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return ended.value.code or 0, out, err

    yield called
    for name in set(os.environ) - set(environ):
        del os.environ[name]


@pytest.mark.parametrize("kind", sorted(CACHES))
def test_every_cache_gives_the_bits_of_none(root: Path, kind: str, tmp_path: Path) -> None:
    preprocess, cases = Preprocess(RECIPE), find_cases(RECIPE.data, root).cases
    wanted = [preprocess.as_sample(preprocess(case)) for case in cases]
    assert [tuple(np.unique(one.label)) for one in wanted] == [(0, 1, 2), (0, 1), (0, 1)]
    for _ in ("cold", "warm"):
        source = open_case_source(kind, cases, preprocess, 2, folder=tmp_path)
        for index, one in enumerate(wanted):
            assert_same(source[index], one)
        source.close()


def test_a_key_changes_with_any_file_of_the_series_its_mask_and_how_it_is_drawn(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    settings = settings_digest(Preprocess(RECIPE))
    case = find_cases(RECIPE.data, root).cases[0]
    keys = [key_of(settings, case)]
    assert key_of(settings, case) == keys[0]
    for path in sorted((root / "p1").glob("*.dcm")):
        os.utime(path, ns=(0, time.time_ns()))
        keys.append(key_of(settings, case))
    removed = sorted((root / "p1").glob("IM*.dcm"))[-1]
    removed.rename(tmp_path / "away.dcm")
    keys.append(key_of(settings, case))
    (tmp_path / "away.dcm").rename(root / "p1" / "IM9999.dcm")
    keys.append(key_of(settings, case))
    mapped = make_recipe(source={"kind": "dicom", "structures": {"liver": 2, "kidney": 1}})
    keys.append(key_of(settings, find_cases(mapped.data, root).cases[0]))
    assert len(set(keys)) == len(keys) == 15
    # What is built anew takes the place of what it supersedes
    assert place_of(case) == place_of(find_cases(RECIPE.data, root).cases[0])


def test_a_slice_that_changed_is_read_anew_in_the_same_process(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", np.zeros(SHAPE, dtype=np.uint16))
    settled = time.time_ns() - 5_000_000_000
    for path in paths:
        os.utime(path, ns=(settled, settled))
    time.sleep(1.1)  # a file changed within a second is never remembered
    assert read_file(paths[0]).raw.max() == 0
    assert read_header(paths[0]) is read_header(paths[0])
    change_file(paths[4], PixelData=np.full(SHAPE[1:], 9, dtype=np.uint16).tobytes(), RescaleIntercept=-5)
    assert read_file(paths[0]).raw[:, :, 4].min() == 4  # 9 − 5: intercepts differ now, so that values are scaled
    paths[9].unlink()
    assert read_header(paths[0]).shape == (20, 24, 9)


def test_check_train_and_predict(root: Path, call: Callable, tmp_path: Path) -> None:
    code, out, err = call("recipes", "suggest", "--data", root)
    assert code == 0, err
    (suggested,) = tmp_path.glob("*.yaml")
    recipe = resolve(suggested).recipe
    assert (recipe.data.source.kind, recipe.data.channels, recipe.data.classes) == (
        "dicom",
        ("CT",),
        {1: "liver", 2: "kidney"},
    )
    suggested.unlink()
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ntask: segmentation\n"
        "data: {source: {kind: dicom}, channels: [CT], classes: {1: liver, 2: kidney}, split: {kind: last, validation: 1},\n"
        "  intensity: {kind: window, low: -1024, high: 2000}, workers: 0, cache: {kind: disk}}\n"
        "patch: {size: [16, 16, 8]}\n"
        "network: {kind: unet, features: [4, 8], strides: [2]}\nloss: {kind: dice_ce}\noptimizer: {kind: adamw}\n"
        "schedule: {kind: constant}\ntraining: {epochs: 1, iterations_per_epoch: 2, batch_size: 2}\n"
        "acceleration: {amp: off, channels_last: off, threads: 1}\noutput: {plots: false, pictures: off}\n"
    )
    code, out, err = call("check", "--recipe", "mine.yaml", "--data", root, "--json")
    assert code == 0, err
    assert [case["shape"] for case in json.loads(out)["cases"]] == [[20, 24, 10]] * 3
    code, out, err = call("check", "--recipe", "mine.yaml", "--data", root)
    assert "0 read" in out
    code, out, err = call("train", "--recipe", "mine.yaml", "--data", root, "--run", "run", "--device", "cpu")
    assert code == 0, err
    code, out, err = call("predict", "run", root, "out", "--device", "cpu")
    assert code == 0, err
    names = sorted(path.name for path in (tmp_path / "out").glob("[!.]*"))
    assert names == ["p1.nii.gz", "p2.nii.gz", "p3.nii.gz"]
    predicted, mask = nib.load(tmp_path / "out" / "p3.nii.gz"), nib.load(root / "p3.nii.gz")
    assert predicted.shape == mask.shape == (20, 24, 10)
    np.testing.assert_allclose(predicted.affine, mask.affine, atol=1e-5)
    # The mask beside the folder of the third case is none of the predictions that may be written anew
    before = (root / "p3.nii.gz").read_bytes()
    code, out, err = call("predict", "run", root / "p3", root, "--device", "cpu", "--overwrite")
    assert code == 3
    assert "the prediction would overwrite a file beside its input" in err
    assert (root / "p3.nii.gz").read_bytes() == before
    code, out, err = call("evaluate", "run", "--device", "cpu", "--json")
    assert code == 0, err
    assert list(json.loads(out)["cases"]) == ["p3"]


def test_a_faulty_series_is_exit_3_and_a_missing_extra_exit_4(
    call: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_set(tmp_path / "set")
    sorted((root / "p2").glob("IM*.dcm"))[4].unlink()
    code, out, _ = call("check", "--data", root)
    assert code == 3
    assert "1 slice missing" in out
    monkeypatch.setitem(sys.modules, "pydicom", None)
    (root / "p2" / "IM0000.dcm").touch()
    code, _, err = call("check", "--recipe", "spleen", "--data", root, "--set", "data.source={kind: dicom}")
    assert code == 4
    assert (
        "needs the package pydicom, which is not installed; install what is missing by `pip install 'fasttrain[dicom]'`"
        in err
    )


def test_slices_of_a_series_are_its_images_with_known_values(tmp_path: Path) -> None:
    stored = np.random.default_rng(1).integers(0, 400, SHAPE).astype(np.uint16)
    bright = np.zeros(SHAPE, dtype=bool)
    bright[3:7, 6:16, 5:14] = True
    paths = write_series(tmp_path / "p1", stored, "p1", patient="p1")
    write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"liver": bright})
    recipe = make_recipe(
        source={"kind": "dicom"},
        classes={1: "liver"},
        slices={"axis": "axial"},
        patch={"size": [20, 16], "foreground": 0},
    )
    (case,) = find_cases(recipe.data, tmp_path).cases
    sample = Preprocess(recipe).as_sample(Preprocess(recipe)(case))
    intercept = -1024.0
    # Rows of DICOM run to the back and columns to the left; a slice has R and A as its axes
    expected = np.flip(stored.astype(np.float32) + intercept, (1, 2)).transpose(0, 2, 1)
    assert np.array_equal(sample.image[0].numpy(), expected)
    assert np.array_equal(sample.label[0].numpy(), np.flip(bright, (1, 2)).transpose(0, 2, 1))
    assert sample.filled.tolist() == bright.any((1, 2)).tolist()
