"""Preprocessing keeps every voxel at its place in the world, whatever the file's axes, and its records are plain."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_builders import make_recipe, save
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.data.centres import CENTRES_PER_CLASS, class_centres, shifted
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError
from fasttrain.samples import Case, Sample


def sample_of(case: Case, training: bool = True, **data: Any) -> Sample:
    preprocess = Preprocess(make_recipe(**data), training=training)
    return preprocess.as_sample(preprocess(case))


def rotation(degrees: float) -> np.ndarray:
    a = np.deg2rad(degrees)
    return np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])


def world_of(shape: tuple[int, ...], affine: np.ndarray) -> np.ndarray:
    """World coordinates [3, *shape] of voxel centres."""
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"))
    return np.einsum("wi,i...->w...", affine[:3, :3], index) + affine[:3, 3].reshape(3, 1, 1, 1)


AFFINES = {
    "RAS": np.diag([1.5, 2.0, 3.0, 1.0]),
    "LPS": np.diag([-1.5, -2.0, 3.0, 1.0]),
    "SPL": np.array([[0, 0, -2.0, 30], [0, -1.2, 0, 5], [1.7, 0, 0, -9], [0, 0, 0, 1]]),
    "oblique": np.vstack([np.c_[rotation(20) @ np.diag([1.5, 2.0, 3.0]), [4, 5, 6]], [0, 0, 0, 1]]),
    "oblique, flipped": np.vstack([np.c_[rotation(-35) @ np.diag([-1.5, 2.0, -3.0]), [4, 5, 6]], [0, 0, 0, 1]]),
}


@pytest.mark.parametrize("name", AFFINES)
@pytest.mark.parametrize("spacing", [None, [2.0, 1.3, 2.2]])
def test_voxels_stay_where_they_are_in_the_world(tmp_path: Path, name: str, spacing: list[float] | None) -> None:
    """The channels hold their own world coordinates, so any slip between values and affine shows in mm."""
    shape, affine = (22, 19, 17), AFFINES[name]
    world = world_of(shape, affine)
    path = save(tmp_path / "ramp.nii", np.moveaxis(world, 0, -1).astype(np.float32), affine)
    sample = sample_of(Case("ramp", (path,), None), training=False, channels=["x", "y", "z"], spacing=spacing)
    error = np.abs(sample.image.numpy() - world_of(sample.grid.shape, sample.grid.affine)).max(axis=0)
    # Resampled edges are clamped to the outermost voxel, by up to half a voxel; inside it must be exact.
    inner = error[1:-1, 1:-1, 1:-1]
    if spacing is None:
        assert error.max() < 1e-4
    else:
        assert inner.max() < 1e-3
    directions = sample.grid.affine[:3, :3]
    assert (np.abs(directions).argmax(axis=0) == [0, 1, 2]).all()
    assert (np.diag(directions) > 0).all()
    if spacing is not None:
        assert np.allclose(np.linalg.norm(directions, axis=0), spacing)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(*(st.integers(3, 14),) * 3),
    axes=st.permutations([0, 1, 2]),
    signs=st.tuples(*(st.sampled_from([-1.0, 1.0]),) * 3),
    patch=st.tuples(*(st.sampled_from([2, 8, 16]),) * 3),
    above=st.floats(-20, 20),
)
def test_crop_and_pad_keep_the_world(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    axes: list[int],
    signs: tuple[float, ...],
    patch: tuple[int, ...],
    above: float,
) -> None:
    affine = np.eye(4)
    affine[:3, :3] = np.diag(np.array(signs) * [1.0, 1.5, 2.0])[:, axes]
    world = world_of(shape, affine)
    folder = tmp_path_factory.mktemp("case")
    image = save(folder / "i.nii", np.moveaxis(world, 0, -1).astype(np.float32), affine)
    label = save(folder / "l.nii", np.ones(shape, np.uint8), affine)
    sample = sample_of(
        Case("a", (image,), label),
        channels=["x", "y", "z"],
        patch={"size": list(patch)},
        crop_foreground={"above": above, "margin": 1},
    )
    assert sample.label is not None
    inside = sample.label[0].numpy() == 1
    places = world_of(sample.grid.shape, sample.grid.affine)
    assert np.abs((sample.image.numpy() - places)[:, inside]).max() < 1e-4
    assert (sample.image.numpy()[:, ~inside] == 0).all()
    assert all(length >= size for length, size in zip(sample.grid.shape, patch, strict=True))
    kept = world.max(axis=0) > above
    assert kept.sum() <= inside.sum()
    flat = sample.label.numpy().reshape(-1)
    assert (flat[sample.centres[0].numpy()] == 1).all()
    assert len(sample.centres[0]) == inside.sum()


@pytest.mark.parametrize(
    "plane", [np.eye(4), np.array([[0, 0, 1.0, 7], [1.2, 0, 0, 3], [0, -0.8, 0, 2], [0, 0, 0, 1]])]
)
@pytest.mark.parametrize("third", [(), (1,)])
def test_planes_keep_their_place(tmp_path: Path, plane: np.ndarray, third: tuple[int, ...]) -> None:
    shape = (20, 24)
    index = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij")).astype(np.float32)
    image = save(tmp_path / "i.nii", np.moveaxis(index, 0, -1).reshape(*shape, *third, 2), plane)
    label = save(tmp_path / "l.nii", np.ones((*shape, *third), np.uint8), plane)
    sample = sample_of(
        Case("a", (image,), label), training=False, channels=["i", "j"], patch={"size": [16, 16]}, spacing=[1.7, 1.1]
    )
    assert sample.label is not None
    assert sample.label.shape[1:] == sample.image.shape[1:] == sample.grid.shape
    assert np.allclose(np.linalg.norm(sample.grid.affine[:3, :2], axis=0), [1.7, 1.1])
    inner = (4, 5)
    value = sample.image[(slice(None), *inner)].numpy()
    there = sample.grid.affine @ [*inner, 0, 1]
    assert np.allclose(plane @ [*value, 0, 1], there, atol=1e-4)


def test_equal_spacing_is_not_resampled(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(16, 16, 16)).astype(np.float32)
    path = save(tmp_path / "i.nii", values, np.diag([1.0004, 1, 1, 1]))
    sample = sample_of(Case("a", (path,), None), spacing=[1.0, 1.0, 1.0])
    assert np.array_equal(sample.image[0].numpy(), values)
    resampled = sample_of(Case("a", (path,), None), spacing=[1.0, 1.0, 1.1], training=False)
    assert resampled.image.shape != sample.image.shape


@pytest.mark.parametrize(
    "intensity",
    [
        {"kind": "zscore"},
        {"kind": "zscore", "nonzero": True},
        {"kind": "percentile"},
        {"kind": "window", "low": -1000, "high": 1000},
        {"kind": "none"},
    ],
)
@pytest.mark.parametrize("value", [0.0, 0.1, 1234567.8])
def test_flat_volumes_give_finite_values(tmp_path: Path, intensity: dict[str, Any], value: float) -> None:
    path = save(tmp_path / "i.nii", np.full((16, 16, 16), value, np.float32))
    image = sample_of(Case("a", (path,), None), intensity=intensity).image
    assert torch.isfinite(image).all()
    if intensity["kind"] in ("zscore", "percentile"):
        assert (image == 0).all()


def test_intensity_steps_give_their_values(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(50, 20, (16, 16, 16, 2)).astype(np.float32)
    values[..., 1] *= 1000
    case = Case("a", (save(tmp_path / "i.nii", values),), None)
    expected = np.moveaxis(values.astype(np.float64), -1, 0)
    z = sample_of(case, channels=["a", "b"], intensity={"kind": "zscore"}).image.numpy()
    flat = expected.reshape(2, -1)
    wanted = (flat - flat.mean(1, keepdims=True)) / flat.std(1, keepdims=True)
    assert np.allclose(z.reshape(2, -1), wanted, atol=1e-4)
    low, high = np.percentile(flat, (0.5, 99.5), axis=1)
    p = sample_of(case, channels=["a", "b"], intensity={"kind": "percentile"}).image.numpy()
    assert np.allclose(p.reshape(2, -1), np.clip((flat.T - low) / (high - low), 0, 1).T, atol=1e-4)
    w = sample_of(case, channels=["a", "b"], intensity={"kind": "window", "low": 40, "high": 60}).image.numpy()
    assert np.allclose(w, np.clip((expected - 40) / 20, 0, 1), atol=1e-5)


def test_foreground_box_is_that_of_any_channel(tmp_path: Path) -> None:
    values = np.zeros((20, 20, 20, 2), np.float32)
    values[3, 4, 5, 0] = 1
    values[10, 12, 9, 1] = 1
    label = np.zeros((20, 20, 20), np.uint8)
    label[10, 12, 9] = 2
    case = Case("a", (save(tmp_path / "i.nii", values),), save(tmp_path / "l.nii", label))
    kwargs: dict[str, Any] = {"channels": ["a", "b"], "crop_foreground": {"above": 0.5, "margin": 2}}
    sample = sample_of(case, training=False, **kwargs)
    assert sample.grid.shape == (12, 13, 9)
    assert sample.grid.affine[:3, 3].tolist() == [1, 2, 3]
    assert sample.label is not None
    assert sample.label[0, 9, 10, 6] == 2
    empty = sample_of(Case("b", (save(tmp_path / "e.nii", values * 0),), None), training=False, **kwargs)
    assert empty.grid.shape == (20, 20, 20)


def test_centres_are_thinned_evenly() -> None:
    label = np.zeros((40, 40, 40), np.uint8)
    label[:, :, 10:30] = 1
    label[5, 5, 5] = 3
    one, two, three = class_centres(label, 3)
    assert len(one) == CENTRES_PER_CLASS
    assert len(two) == 0
    assert three.tolist() == [5 * 1600 + 5 * 40 + 5]
    assert one.dtype == torch.uint16
    assert (
        class_centres(np.ones((64, 32, 32), np.uint8), 1)[0].dtype == torch.uint16
    )  # 65 536 voxels: the last is 65 535
    large = class_centres(np.ones((64, 32, 33), np.uint8), 1)[0]
    assert large.dtype == torch.int32
    assert one.nbytes * 2 == large.nbytes
    assert len(set(one.tolist())) == CENTRES_PER_CLASS
    depths = np.unravel_index(one.numpy(), label.shape)[0]
    assert np.bincount(depths, minlength=40).min() >= 240


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    before=st.tuples(*[st.integers(0, 4)] * 3),
    behind=st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([0, 3, 600, 1400])),
)
def test_shifted_centres_are_the_same_voxels_in_the_smallest_type(
    shape: tuple[int, ...], before: tuple[int, ...], behind: tuple[int, ...]
) -> None:
    padded = tuple(map(sum, zip(before, shape, behind, strict=True)))
    volume = np.zeros(padded, np.uint8)
    volume[tuple(slice(first, first + length) for first, length in zip(before, shape, strict=True))] = 1
    (found,) = class_centres(np.ones(shape, np.uint8), 1)
    moved = shifted(found, shape, padded, before)
    assert moved.tolist() == np.flatnonzero(volume).tolist()
    assert moved.dtype == (torch.uint16 if np.prod(padded) <= 65_536 else torch.int32)


def test_background_centres_lie_in_bright_background_alone(tmp_path: Path) -> None:
    values = np.full((12, 16, 16), -5, np.float32)
    values[2:9] = 7
    label = np.zeros((12, 16, 16), np.uint8)
    label[2:4] = 1
    case = Case("a", (save(tmp_path / "i.nii", values),), save(tmp_path / "l.nii", label))
    patch = {"size": [16, 16, 20], "background_above": -1.0}
    sample = sample_of(case, patch=patch)
    assert sample.background_centres is not None
    assert sample.label is not None
    # Padding is 0, above the threshold, and must not count.
    wanted = ((sample.image[0] == 7) & (sample.label[0] == 0)).numpy().reshape(-1)
    assert sorted(sample.background_centres.tolist()) == np.flatnonzero(wanted).tolist()
    assert sample_of(case).background_centres is None


def test_records_are_plain_and_pickle(tmp_path: Path) -> None:
    label = np.random.default_rng(0).integers(0, 3, (12, 14, 20)).astype(np.uint8)
    image = save(tmp_path / "i.nii.gz", np.random.default_rng(1).normal(size=label.shape), np.diag([-1, 1, 1, 1.0]))
    case = Case("a", (image,), save(tmp_path / "l.nii.gz", label, np.diag([-1, 1, 1, 1.0])))
    preprocess = pickle.loads(pickle.dumps(Preprocess(make_recipe(storage_dtype="float16", crop_foreground={}))))
    record = preprocess(case)
    buffer = io.BytesIO()
    torch.save(record, buffer)
    buffer.seek(0)
    loaded = preprocess.as_sample(torch.load(buffer, weights_only=True))
    assert type(loaded.image) is torch.Tensor
    assert loaded.image.dtype == torch.float16
    assert torch.equal(loaded.image, record["image"])
    assert loaded.image.is_contiguous()
    assert loaded.image.untyped_storage().nbytes() == loaded.image.numel() * 2
    assert loaded.source_grid.affine.tolist() == np.diag([-1, 1, 1, 1.0]).tolist()


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    values = np.full((16, 16, 16), 70_000, np.float32)
    case = Case("a", (save(tmp_path / "i.nii", values),), None)
    with pytest.raises(DataError, match=r"i\.nii reaches 70000 .* data\.storage_dtype: float32"):
        sample_of(case, storage_dtype="float16")
    assert sample_of(case, storage_dtype="float16", intensity={"kind": "zscore"}).image.dtype == torch.float16


def test_image_and_label_faults_come_together(tmp_path: Path) -> None:
    (tmp_path / "i.nii").write_bytes(b"")
    label = save(tmp_path / "l.nii", np.full((4, 4, 4), 9, np.uint8))
    with pytest.raises(DataError) as caught:
        sample_of(Case("a", (tmp_path / "i.nii",), label))
    assert len(caught.value.faults) == 2
