"""Predictions come back to the file's own grid: exactly where only moves are needed, faithfully where resampling is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from data_builders import make_recipe, save
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.data.nifti import read_file
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.restore import GrowingClassMap, class_map_in_source_grid, to_source_grid
from fasttrain.data.writing import write_label
from fasttrain.errors import DataError, StorageError
from fasttrain.samples import Case, Grid

ALL_SIGNS = list(itertools.product((-1.0, 1.0), repeat=3))


def dice(a: np.ndarray, b: np.ndarray) -> float:
    return float(2 * (a & b).sum() / (a.sum() + b.sum()))


def one_hot(label: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.stack([(label == index).float() for index in range(classes)])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, 9),) * 3),
    source_shape=st.tuples(*(st.integers(1, 9),) * 3),
    axes=st.permutations([0, 1, 2]),
    signs=st.sampled_from(ALL_SIGNS),
    offset=st.tuples(*(st.integers(-5, 12),) * 3),
    spacing=st.tuples(*(st.floats(0.3, 5),) * 3),
    angle=st.floats(0, 3),
)
def test_moves_are_exact(
    shape: tuple[int, ...],
    source_shape: tuple[int, ...],
    axes: list[int],
    signs: tuple[float, ...],
    offset: tuple[int, ...],
    spacing: tuple[float, ...],
    angle: float,
) -> None:
    """Any flips, permutation and whole offset, on an oblique grid: every source voxel gets the very voxel at its place."""
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag(spacing)
    affine[:3, 3] = [-31.5, 7.25, 3.1]
    step = np.eye(4)
    step[:3, :3] = np.diag(signs)[:, axes]
    step[:3, 3] = offset
    grid, source = Grid(shape, affine), Grid(source_shape, affine @ step)
    values = np.arange(1, 2 * int(np.prod(shape)) + 1).reshape(2, *shape)
    wanted = np.full((2, *source_shape), -7)
    for place in np.ndindex(*source_shape):
        there = np.rint(step @ [*place, 1])[:3].astype(int)
        if ((there >= 0) & (there < shape)).all():
            wanted[(slice(None), *place)] = values[(slice(None), *there)]
    for dtype in (torch.float32, torch.int64):
        for mode in ("linear", "nearest"):
            moved = to_source_grid(torch.from_numpy(values).to(dtype), grid, source, mode, -7)  # type: ignore[arg-type]
            assert moved.dtype == dtype
            assert moved.is_contiguous()
            assert np.array_equal(moved.numpy(), wanted)
    scores = torch.from_numpy(np.random.default_rng(0).random((3, *shape)))
    labels = class_map_in_source_grid(scores, grid, source)
    assert np.array_equal(labels.numpy(), np.where(wanted[0] > 0, _at(scores.argmax(0).numpy(), step, source_shape), 0))


def _at(values: np.ndarray, step: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(shape, int)
    for place in np.ndindex(*shape):
        there = np.rint(step @ [*place, 1])[:3].astype(int)
        if ((there >= 0) & (there < values.shape)).all():
            out[place] = values[tuple(there)]
    return out


@settings(max_examples=20, deadline=None)
@given(
    axes=st.permutations([0, 1, 2]),
    signs=st.sampled_from(ALL_SIGNS),
    zooms=st.tuples(*(st.floats(0.6, 1.7),) * 3),
    shift=st.tuples(*(st.floats(-4, 4),) * 3),
    angle=st.floats(-0.6, 0.6),
)
def test_linear_fields_survive_resampling(
    axes: list[int], signs: tuple[float, ...], zooms: tuple[float, ...], shift: tuple[float, ...], angle: float
) -> None:
    """A field linear in the world is interpolated without error, so this checks places and nothing else."""
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    grid = Grid((14, 12, 13), np.diag([1.3, 1.1, 0.9, 1.0]))
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag(np.array(zooms) * signs)[:, axes]
    affine[:3, 3] = np.array([8.0, 6.0, 5.0]) + shift
    source = Grid((11, 10, 12), affine)
    field = torch.from_numpy(_world(grid)).float()
    out = to_source_grid(field, grid, source, "linear", float("nan")).numpy()
    places = _world(source)
    index = np.einsum("iw,w...->i...", np.linalg.inv(grid.affine[:3, :3]), places)
    ends = np.array(grid.shape).reshape(3, 1, 1, 1) - 1
    inside = ((index >= 0) & (index <= ends)).all(axis=0)
    assert np.abs(out - places)[:, inside].max(initial=0) < 1e-3
    outside = ((index < -0.51) | (index > ends + 0.51)).any(axis=0)
    assert np.isnan(out[:, outside]).all()
    edge = ((index >= -0.49) & (index <= ends + 0.49)).all(axis=0)
    assert not np.isnan(out[:, edge]).any()


def _world(grid: Grid) -> np.ndarray:
    index = np.stack(np.meshgrid(*(np.arange(n) for n in grid.shape), indexing="ij"))
    return np.einsum("wi,i...->w...", grid.affine[:3, :3], index) + grid.affine[:3, 3].reshape(3, 1, 1, 1)


def _blobs(shape: tuple[int, ...], spacing: np.ndarray) -> np.ndarray:
    x, y, z = np.meshgrid(*(np.arange(n) * s for n, s in zip(shape, spacing, strict=True)), indexing="ij")
    middle = np.array(shape) * spacing / 2
    label = np.zeros(shape, np.uint8)
    label[((x - middle[0]) / 14) ** 2 + ((y - middle[1]) / 11) ** 2 + ((z - middle[2]) / 16) ** 2 < 1] = 1
    label[(x - middle[0] - 4) ** 2 + (y - middle[1]) ** 2 + (z - middle[2] - 3) ** 2 < 81] = 2
    return label


@pytest.mark.parametrize(
    "affine", [np.diag([1.2, 1.0, 1.4, 1]), np.array([[0, -1.0, 0, 9], [0, 0, -1.4, 3], [1.2, 0, 0, 1], [0, 0, 0, 1]])]
)
@pytest.mark.parametrize("spacing", [None, [1.5, 1.3, 1.1]])
def test_labels_survive_the_way_there_and_back(tmp_path: Path, affine: np.ndarray, spacing: list[float] | None) -> None:
    shape = (40, 42, 38)
    label = _blobs(shape, np.linalg.norm(affine[:3, :3], axis=0))
    image = np.where(label > 0, 100, -100).astype(np.int16)
    image[label.nonzero()[0].min() - 2] = 50
    case = Case("a", (save(tmp_path / "i.nii.gz", image, affine),), save(tmp_path / "l.nii.gz", label, affine))
    recipe = make_recipe(spacing=spacing, crop_foreground={"above": 0.0, "margin": 2}, patch={"size": [32, 48, 32]})
    preprocess = Preprocess(recipe)
    sample = preprocess.as_sample(preprocess(case))
    assert sample.label is not None
    back = class_map_in_source_grid(one_hot(sample.label[0], 3), sample.grid, sample.source_grid).numpy()
    nearest = to_source_grid(sample.label.float(), sample.grid, sample.source_grid, "nearest", 0)[0].numpy()
    assert back.shape == shape
    if spacing is None:
        assert np.array_equal(back, label)
        assert np.array_equal(nearest, label)
    for value in (1, 2):
        assert dice(back == value, label == value) > 0.95
        assert dice(nearest == value, label == value) > 0.95


def test_slabs_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid((9, 8, 7), np.diag([1.3, 1.1, 0.9, 1.0]))
    source = Grid((12, 11, 10), np.diag([1.0, 0.9, 0.8, 1.0]))
    scores = torch.rand(3, 9, 8, 7)
    whole = class_map_in_source_grid(scores, grid, source)
    linear = to_source_grid(scores, grid, source, "linear", 0.0)
    assert torch.equal(whole, linear.argmax(dim=0).to(torch.uint8))
    monkeypatch.setattr("fasttrain.data.restore._SLAB_VOXELS", 250)
    assert torch.equal(class_map_in_source_grid(scores, grid, source), whole)
    assert torch.equal(to_source_grid(scores, grid, source, "linear", 0.0), linear)


@settings(max_examples=60, deadline=None)
@given(
    axes=st.permutations([0, 1, 2]),
    signs=st.sampled_from(ALL_SIGNS),
    zooms=st.tuples(*(st.sampled_from([0.3, 0.7, 1.0, 1.9]),) * 3),
    shift=st.tuples(*(st.floats(-4, 4),) * 3),
    angle=st.sampled_from([0.0, 0.0, 0.4]),
    axis=st.integers(0, 2),
    cuts=st.sets(st.integers(1, 12), max_size=5),
)
def test_a_class_map_made_slab_by_slab_is_that_of_the_whole(
    axes: list[int],
    signs: tuple[float, ...],
    zooms: tuple[float, ...],
    shift: tuple[float, ...],
    angle: float,
    axis: int,
    cuts: set[int],
) -> None:
    """Along any axis, in any steps, under flips, permutations, resampling both ways and a turn that links several axes."""
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    grid = Grid((14, 13, 15), np.diag([1.3, 1.1, 0.9, 1.0]))
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag(np.array(zooms) * signs)[:, axes]
    affine[:3, 3] = np.array([8.0, 6.0, 5.0]) + shift
    source = Grid((11, 10, 12), affine)
    scores = torch.rand(3, *grid.shape, generator=torch.Generator().manual_seed(0))
    growing = GrowingClassMap(grid.shape, scores.device, grid, source)
    ends = [*sorted(cuts), grid.shape[axis]]
    held = 0
    for begin, end in itertools.pairwise([0, *ends]):
        part = scores.narrow(axis + 1, begin, end - begin).clone()
        growing.add(axis, begin, part)
        part.fill_(float("nan"))  # it may be overwritten
        held = max(held, 0 if growing._held is None else growing._held.shape[axis + 1])
    # Places that are counted from another plane differ in the last digit, which may turn a tie
    assert (growing.finished() != class_map_in_source_grid(scores, grid, source)).sum() <= 2
    if angle == 0.0:
        assert held <= max(np.diff([0, *ends])) + 2


def test_a_class_map_on_the_grid_of_the_scores_is_their_likeliest_class() -> None:
    scores = torch.rand(3, 9, 8, 7)
    growing = GrowingClassMap((9, 8, 7), scores.device)
    for begin in (0, 4):
        growing.add(1, begin, scores[:, :, begin : begin + 4])
    assert torch.equal(growing.finished(), scores.argmax(0).to(torch.uint8))


def test_cropped_away_voxels_are_background() -> None:
    grid = Grid((4, 4, 4), np.diag([1.5, 1.5, 1.5, 1.0]))
    shifted = np.eye(4)
    shifted[:3, 3] = -6
    labels = class_map_in_source_grid(one_hot(torch.ones(4, 4, 4), 2), grid, Grid((20, 20, 20), shifted))
    assert labels[0, 0, 0] == 0
    assert labels[8, 8, 8] == 1
    assert int(labels.sum()) == 6**3


@pytest.mark.parametrize("third", [(), (1,)])
def test_planes_come_back(tmp_path: Path, third: tuple[int, ...]) -> None:
    label = _blobs((44, 40, 36), np.ones(3))[:, :, 18]
    stored = label.reshape(*label.shape, *third)
    case = Case("a", (save(tmp_path / "i.nii", stored.astype(np.float32)),), save(tmp_path / "l.nii", stored))
    for spacing in (None, [1.4, 0.8]):
        preprocess = Preprocess(make_recipe(spacing=spacing, patch={"size": [64, 16]}))
        sample = preprocess.as_sample(preprocess(case))
        assert sample.label is not None
        back = class_map_in_source_grid(one_hot(sample.label[0], 3), sample.grid, sample.source_grid).numpy()
        assert dice(back == 1, label == 1) > 0.95
        assert spacing or np.array_equal(back, label)
    write_label(tmp_path / "p.nii.gz", back, case.images[0], (0, 1, 2))
    assert nib.load(tmp_path / "p.nii.gz").shape == stored.shape


@pytest.mark.parametrize("codes", [(1, 0), (0, 2), (2, 1), (0, 0)])
@pytest.mark.parametrize("extra", [(), (1,), (3,), (1, 3)])
def test_written_labels_lie_on_the_input(tmp_path: Path, codes: tuple[int, int], extra: tuple[int, ...]) -> None:
    affine = np.array([[-1.5, 0, 0, 3], [0, -2.0, 0, 4], [0, 0, 3.0, 5], [0, 0, 0, 1]])
    image = nib.Nifti1Image(np.zeros((5, 6, 7, *extra), np.float32), affine)
    image.set_sform(affine, codes[0])
    image.set_qform(affine, codes[1])
    image.header["descrip"] = b"somebody's name"
    image.header.set_slope_inter(2.0, 7.0)
    nib.save(image, tmp_path / "i.nii.gz")
    label = np.random.default_rng(0).integers(0, 4, (5, 6, 7)).astype(np.uint8)
    write_label(tmp_path / "p.nii.gz", torch.from_numpy(label), tmp_path / "i.nii.gz", (0, 1, 2, 4))
    back, source = nib.load(tmp_path / "p.nii.gz"), nib.load(tmp_path / "i.nii.gz")
    assert back.shape == ((5, 6, 7, 1) if extra == (1,) else (5, 6, 7))
    assert back.get_data_dtype() == np.uint8
    assert np.array_equal(np.asarray(back.dataobj).reshape(5, 6, 7), np.array([0, 1, 2, 4])[label])
    assert np.array_equal(back.affine, source.affine)
    assert (back.header["sform_code"], back.header["qform_code"]) == codes
    assert b"somebody" not in back.header["descrip"].tobytes()
    assert read_file(tmp_path / "p.nii.gz").values().max() == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i.nii.gz", "p.nii.gz"]


def test_writing_keeps_nifti2_and_big_endian(tmp_path: Path) -> None:
    values = np.zeros((3, 4, 5), np.int16)
    nib.save(nib.Nifti2Image(values, np.eye(4)), tmp_path / "two.nii")
    big = nib.Nifti1Header(endianness=">")
    nib.save(nib.Nifti1Image(values, np.eye(4), big), tmp_path / "big.nii")
    label = np.arange(60).reshape(3, 4, 5) % 3
    for name, kind in (("two", nib.Nifti2Image), ("big", nib.Nifti1Image)):
        write_label(tmp_path / f"{name}_p.nii.gz", label, tmp_path / f"{name}.nii", (0, 7, 255))
        back: Any = nib.load(tmp_path / f"{name}_p.nii.gz")
        assert type(back) is kind
        assert np.array_equal(np.asarray(back.dataobj), np.array([0, 7, 255])[label])


def test_writing_faults_are_one_sentence(tmp_path: Path) -> None:
    source = save(tmp_path / "i.nii", np.zeros((2, 2, 2), np.uint8))
    with pytest.raises(StorageError, match="cannot be written"):
        write_label(tmp_path / "absent" / "p.nii.gz", np.zeros((2, 2, 2), np.uint8), source, (0, 1))
    with pytest.raises(DataError, match="does not exist"):
        write_label(tmp_path / "p.nii.gz", np.zeros((2, 2, 2), np.uint8), tmp_path / "no.nii", (0, 1))
    assert not (tmp_path / "p.nii.gz").exists()
