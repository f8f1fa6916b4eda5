"""Phantoms are deterministic and whole, and no window of intensities finds their organs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from data_builders import make_recipe, write_decathlon

from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.data.sources.phantom import ensure_phantoms
from fasttrain.data.sources.phantom_volume import PhantomVolume, make_phantom
from fasttrain.errors import DataError, StorageError
from fasttrain.recipe.data_spec import PhantomSource


def source(cases: int, seed: int = 0) -> PhantomSource:
    return PhantomSource(kind="phantom", cases=cases, seed=seed)


def digest(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def window_scores(volume: PhantomVolume, value: int, edges: np.ndarray) -> np.ndarray:
    """Dice of every window [edges[i], edges[j]) at once, [edges, edges]."""
    inside = np.r_[0, np.histogram(volume.image[volume.label == value], edges)[0].cumsum()]
    every = np.r_[0, np.histogram(volume.image, edges)[0].cumsum()]
    hit, size = inside[None] - inside[:, None], every[None] - every[:, None]
    scores = 2 * hit / np.maximum(size + int((volume.label == value).sum()), 1)
    return np.where(np.arange(len(edges))[None] > np.arange(len(edges))[:, None], scores, 0.0)


@pytest.fixture(scope="module")
def volumes() -> list[PhantomVolume]:
    return [make_phantom(0, number) for number in range(12)]


@pytest.mark.parametrize("value", [1, 2])
def test_no_window_finds_an_organ(volumes: list[PhantomVolume], value: int) -> None:
    edges = np.arange(-1024, 1200, 3)
    scores = np.stack([window_scores(volume, value, edges) for volume in volumes])
    # Even a window chosen for each volume by itself fails, and so does every single threshold among the windows.
    assert scores.max(axis=(1, 2)).mean() < 0.4
    assert scores.mean(axis=0).max() < 0.4
    # Control: the same search finds the body, which a threshold does separate.
    bodies = [PhantomVolume(volume.image, (volume.image > -500).astype(np.uint8), volume.affine) for volume in volumes]
    assert all(window_scores(body, 1, edges).max() > 0.95 for body in bodies)


def test_organs_and_their_surroundings_have_equal_means(volumes: list[PhantomVolume]) -> None:
    for volume in volumes:
        soft = (volume.image > 0) & (volume.image < 130)
        for value in (1, 2):
            organ = volume.label == value
            assert organ.sum() < 0.2 * (soft & ~organ).sum()


def test_volumes_differ_in_size_spacing_and_axes(volumes: list[PhantomVolume]) -> None:
    shapes = {volume.image.shape for volume in volumes}
    assert len(shapes) > 8
    assert all(56 <= length <= 80 for shape in shapes for length in shape)
    assert {"".join(nib.aff2axcodes(volume.affine)) for volume in volumes} == {"RAS", "LPS", "LAS"}
    spacings = np.array([np.abs(np.diag(volume.affine)[:3]) for volume in volumes])
    assert ((spacings >= 1.2) & (spacings <= 2.5)).all()
    assert (np.abs(spacings[:, 0] - spacings[:, 2]) > 0.05).mean() > 0.5
    for volume in volumes:
        assert volume.image.dtype == np.int16
        assert (volume.label == 1).sum() > 3 * (volume.label == 2).sum() > 3000


def test_organs_lie_at_their_place_in_the_world(volumes: list[PhantomVolume]) -> None:
    for volume in volumes:
        middle = {}
        for value in (1, 2):
            index = np.argwhere(volume.label == value).mean(axis=0)
            middle[value] = volume.affine[:3, :3] @ index + volume.affine[:3, 3]
        assert middle[1][0] > 5
        assert middle[1][1] > 0
        assert abs(middle[2][0]) < 8
        assert middle[2][1] < -10


def test_made_sets_are_equal_byte_by_byte(tmp_path: Path) -> None:
    ensure_phantoms(source(3), tmp_path / "a")
    time.sleep(1.1)  # gzip would note another second
    ensure_phantoms(source(3), tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    ensure_phantoms(source(3, seed=1), tmp_path / "c")
    assert not set(digest(tmp_path / "a").values()) & set(digest(tmp_path / "c").values())


def test_whole_sets_are_reused_and_damaged_ones_mended(tmp_path: Path) -> None:
    ensure_phantoms(source(3), tmp_path)
    before = digest(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nii.gz")}
    ensure_phantoms(source(3), tmp_path)
    ensure_phantoms(source(2), tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nii.gz")} == times
    victim = tmp_path / "labelsTr" / "phantom_001.nii.gz"
    victim.write_bytes(victim.read_bytes()[:-9])
    (tmp_path / "imagesTr" / "phantom_002.nii.gz").unlink()
    ensure_phantoms(source(3), tmp_path)
    assert digest(tmp_path) == before
    (tmp_path / "dataset.json").unlink()
    ensure_phantoms(source(3), tmp_path)
    assert digest(tmp_path) == before


def test_a_set_grows_and_a_smaller_one_is_a_part_of_it(tmp_path: Path) -> None:
    spec = make_recipe(source={"kind": "phantom", "cases": 2}).data
    assert [case.name for case in find_cases(spec, tmp_path).cases] == ["phantom_000", "phantom_001"]
    larger = make_recipe(source={"kind": "phantom", "cases": 4}).data
    assert len(find_cases(larger, tmp_path).cases) == 4
    found = find_cases(spec, tmp_path)
    assert len(found.cases) == 2
    assert found.warnings == ()
    ensure_phantoms(source(4), tmp_path / "new")
    assert (
        digest(tmp_path / "new").items()
        <= {key.removeprefix("new/"): value for key, value in digest(tmp_path).items()}.items()
    )


def test_phantoms_pass_the_reader_and_preprocessing(tmp_path: Path) -> None:
    recipe = make_recipe(
        source={"kind": "phantom", "cases": 4},
        spacing=[2.0, 2.0, 2.0],
        intensity={"kind": "window", "low": -200, "high": 300},
        crop_foreground={},
    )
    preprocess = Preprocess(recipe)
    for case in find_cases(recipe.data, tmp_path).cases:
        sample = preprocess.as_sample(preprocess(case))
        assert sample.label is not None
        assert sample.label.unique().tolist() == [0, 1, 2]
        # In RAS the liver lies to the right, whatever the memory order of the file.
        liver = (sample.label[0] == 1).nonzero().float().mean(dim=0)
        assert liver[0] > sample.label.shape[1] / 2


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    write_decathlon(tmp_path / "real", ["a"])
    with pytest.raises(DataError, match="of another data set"):
        ensure_phantoms(source(2), tmp_path / "real")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match=r"holds other files \(thesis\.tex\)"):
        ensure_phantoms(source(2), tmp_path / "full")
    ensure_phantoms(source(2), tmp_path / "made")
    with pytest.raises(DataError, match="seed 0, but version 1 and seed 5"):
        ensure_phantoms(source(2, seed=5), tmp_path / "made")
    (tmp_path / "file").write_text("x")
    with pytest.raises((DataError, StorageError)):
        ensure_phantoms(source(2), tmp_path / "file")


def test_two_processes_may_make_the_set_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from fasttrain.data.sources.phantom import ensure_phantoms\n"
        "from fasttrain.recipe.data_spec import PhantomSource\n"
        "ensure_phantoms(PhantomSource(kind='phantom', cases=4), Path(sys.argv[1]))\n"
    )
    checkout = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", program, str(tmp_path / "shared")]
    running = [subprocess.Popen(command, cwd=checkout) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    ensure_phantoms(source(4), tmp_path / "alone")
    assert digest(tmp_path / "shared") == digest(tmp_path / "alone")


def test_making_is_quick(tmp_path: Path) -> None:
    start = time.perf_counter()
    ensure_phantoms(source(24), tmp_path)
    seconds = time.perf_counter() - start
    assert len(json.loads((tmp_path / "dataset.json").read_text())["training"]) == 24
    assert seconds < 20  # about 1 s; the bound only keeps a tenfold slip out on a busy machine
