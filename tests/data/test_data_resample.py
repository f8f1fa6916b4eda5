"""Resampling along the axes: against SciPy's in float64, against MONAI's, and at the edges of what a grid can be."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from fasttrain.data.grids import spacing_of
from fasttrain.data.resample import linear_at, nearest_at, resample
from fasttrain.data.volumes import preprocessed_shape


def volume(shape: tuple[int, ...], channels: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 500, (channels, *shape)).astype(np.float32))


def by_monai(step: torch.Tensor, affine: np.ndarray, spacing: list[float], mode: str) -> tuple[np.ndarray, np.ndarray]:
    from monai.data import MetaTensor
    from monai.transforms import Spacing

    done = Spacing(pixdim=spacing, mode=mode, padding_mode="border", dtype=np.float64)(MetaTensor(step, affine=affine))
    return done.numpy(), np.asarray(done.affine)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_places_are_scipys(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple))
    places = []
    for length in shape:
        spots = st.floats(0, length - 1, allow_nan=False) | st.integers(0, length - 1).map(float)
        places.append(np.array(data.draw(st.lists(spots, min_size=1, max_size=9))))
    values = volume(shape, channels=2).numpy()
    mesh = np.stack(np.meshgrid(*places, indexing="ij"))
    found = linear_at(values, places)
    for channel, result in zip(values, found, strict=True):
        assert np.abs(result - map_coordinates(channel.astype(np.float64), mesh, order=1, mode="nearest")).max() < 1e-3
    labels = (values > 0).astype(np.uint8)
    near = labels[(slice(None), *np.ix_(*(np.rint(along).astype(int) for along in places)))]
    assert np.array_equal(nearest_at(labels, places), near)


@pytest.mark.parametrize("spacing", [[1.5, 1.5, 2.0], [0.4, 2.0, 0.9], [1.0, 1.3, 5.0]])
def test_a_volume_is_monais(spacing: list[float]) -> None:
    shape = (41, 38, 27)
    affine = np.diag([-0.8, 1.3, 2.5, 1.0])
    affine[:3, 3] = [7, -3, 11]
    image, label = volume(shape), (volume(shape, seed=1) > 300).to(torch.uint8)
    (ours, labels), moved = resample([image, label], affine, spacing_of(affine, 3), spacing)
    theirs, their_affine = by_monai(image, affine, spacing, "bilinear")
    assert ours.shape == theirs.shape
    assert tuple(ours.shape[1:]) == preprocessed_shape(shape, affine, spacing, None)
    assert np.allclose(moved, their_affine)
    assert np.abs(ours.numpy() - theirs).max() < 0.05
    assert labels.dtype == torch.uint8
    nearest, _ = by_monai(label, affine, spacing, "nearest")
    # Where two voxels are as near, MONAI's rounding of its sampling places decides
    clear = []
    for own, new, count in zip(spacing_of(affine, 3), spacing, labels.shape[1:], strict=True):
        places = np.arange(count) * new / own
        clear.append(np.flatnonzero(np.abs(places - np.floor(places) - 0.5) > 1e-3))
    kept = (0, *np.ix_(*clear))
    assert np.array_equal(labels.numpy()[kept], nearest[kept])
    assert labels.numpy()[kept].any()


def test_a_tie_in_the_number_of_voxels_is_settled_as_monai_does() -> None:
    affine = np.diag([1.0, 1.0, 3.0, 1.0])
    image = volume((8, 8, 124))
    (ours,), _ = resample([image], affine, spacing_of(affine, 3), [1.0, 1.0, 2.0])
    theirs, _ = by_monai(image, affine, [1.0, 1.0, 2.0], "bilinear")
    assert ours.shape == theirs.shape
    assert tuple(ours.shape[1:]) == preprocessed_shape((8, 8, 124), affine, [1.0, 1.0, 2.0], None)


def test_what_is_flat_stays_flat() -> None:
    """A background of one value must not get rounding noise, by which it would count as foreground."""
    image = torch.full((1, 30, 30, 30), -1023.7)
    (ours,), _ = resample([image], np.eye(4), np.ones(3), [1.37, 0.61, 2.9])
    assert (ours == image.flatten()[0]).all()


def test_an_axis_of_one_voxel_and_one_that_stays() -> None:
    image = volume((12, 1, 20))
    (ours,), moved = resample([image], np.eye(4), np.ones(3), [1.0, 2.0, 0.5])
    assert ours.shape == (1, 12, 1, 39)
    assert np.array_equal(ours[..., ::2].numpy(), image.numpy())
    assert np.allclose(np.diag(moved), [1, 2, 0.5, 1])


def test_a_sheared_grid_is_monais() -> None:
    affine = np.eye(4)
    affine[0, 1] = 0.4
    image = volume((20, 20, 20))
    spacing = [1.2, 1.2, 1.2]
    (ours,), moved = resample([image], affine, spacing_of(affine, 3), spacing)
    theirs, their_affine = by_monai(image, affine, spacing, "bilinear")
    assert ours.shape == theirs.shape
    assert np.allclose(moved, their_affine)
    assert np.abs(ours.numpy() - theirs).max() < 0.5


def test_the_same_bits_for_any_number_of_threads() -> None:
    image, affine = volume((60, 50, 40)), np.diag([0.7, 0.7, 3.0, 1.0])
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(resample([image], affine, spacing_of(affine, 3), [1.5, 1.5, 2.0])[0][0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
