"""Elastic deformation: a cubic B-spline without folds, in voxels, fused with rotation and zoom."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.interpolate import BSpline
from scipy.ndimage import map_coordinates

from fasttrain.augment import Augmenter, Chances
from fasttrain.augment.elastic import Elastic
from fasttrain.augment.resample import Displacement, resample
from fasttrain.recipe.augment_spec import FOLD_FREE_SHARE, AugmentSpec, ElasticSpec

CPU = torch.device("cpu")


def patch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(3, 2, *shape, generator=generator)
    return image, torch.randint(0, 4, (3, 1, *shape), generator=generator, dtype=torch.uint8)


def drawn(spec: ElasticSpec, dimensions: int, seeds: range) -> dict:
    elastic = Elastic(spec)
    return elastic.draw(dimensions, Chances(0, torch.tensor(seeds)))


def augmented(section: dict, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    augmenter = Augmenter(AugmentSpec.model_validate(section))
    draws = augmenter.draw(image.dim() - 2, image.shape[1], Chances(0, torch.arange(len(image))))
    return *augmenter.apply(image.clone(), label.clone(), draws), draws


@pytest.mark.parametrize("shape", [(11, 14, 9), (10, 13)])
def test_no_magnitude_is_the_identity_and_no_probability_touches_nothing(shape: tuple[int, ...]) -> None:
    image, label = patch(*shape)
    same, same_label, draws = augmented({"elastic": {"probability": 1.0, "magnitude": 0.0}}, image, label)
    assert draws["elastic"]["active"].all()
    assert torch.allclose(same, image, atol=1e-4)
    assert torch.equal(same_label, label)
    never, never_label, _ = augmented({"elastic": {"probability": 0.0, "magnitude": 0.1}}, image, label)
    assert torch.equal(never, image)
    assert torch.equal(never_label, label)
    moved, moved_label, _ = augmented({"elastic": {"probability": 1.0, "magnitude": 0.1}}, image, label)
    assert (moved != image).flatten(1).any(1).all()
    assert (moved_label != label).any()


@pytest.mark.parametrize("cells", [1, 3, 6])
def test_the_field_is_scipys_b_spline(cells: int) -> None:
    size = torch.Size((10, 17, 5))
    draw = drawn(ElasticSpec(probability=1.0, magnitude=0.05, cells=cells), 3, range(2))
    field = Elastic(ElasticSpec(probability=1.0, magnitude=0.05, cells=cells)).displacement(draw, size, CPU)
    knots = np.arange(-3, cells + 4)
    bases = [BSpline(knots, np.eye(cells + 3), 3)((np.arange(n) + 0.5) * cells / n) for n in size]
    expected = np.einsum("sdabc,xa,yb,zc->sdxyz", draw["points"].double().numpy(), *bases)
    expected *= np.array(size).reshape(1, 3, 1, 1, 1)
    assert field.shape == (2, 3, *size)
    assert np.abs(field.numpy() - expected).max() < 1e-5


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(2, 16), min_size=2, max_size=3).map(tuple),
    cells=st.integers(1, 8),
    seed=st.integers(0, 999),
)
def test_at_the_largest_magnitude_nothing_folds(shape: tuple[int, ...], cells: int, seed: int) -> None:
    """Neighbouring voxels keep their order along every axis, even where all points are at their limit."""
    spec = ElasticSpec(probability=1.0, magnitude=FOLD_FREE_SHARE / cells, cells=cells)
    elastic = Elastic(spec)
    draw = drawn(spec, len(shape), range(seed, seed + 1))
    draw["points"] = draw["points"].sign() * spec.magnitude
    field = elastic.displacement(draw, torch.Size(shape), CPU)
    lengths = torch.tensor(shape).reshape(1, -1, *(1,) * len(shape))
    assert (field.abs() <= spec.magnitude * lengths + 1e-5).all()
    places = torch.stack(torch.meshgrid(*(torch.arange(float(n)) for n in shape), indexing="ij"))[None] + field
    for axis in range(len(shape)):
        assert (places[:, axis].diff(dim=axis + 1) > 0).all()


def test_the_determinant_is_positive_in_the_worst_of_many_fields() -> None:
    for dimensions, size in ((2, (40, 40)), (3, (20, 20, 20))):
        spec = ElasticSpec(probability=1.0, magnitude=0.1, cells=4)
        draw = drawn(spec, dimensions, range(60))
        draw["points"] = draw["points"].sign() * spec.magnitude
        field = Elastic(spec).displacement(draw, torch.Size(size), CPU).double()
        rows = []
        for component in range(dimensions):
            slopes = torch.gradient(field[:, component], dim=tuple(range(1, dimensions + 1)))
            rows.append(torch.stack(slopes, -1))
        jacobian = torch.stack(rows, -2) + torch.eye(dimensions, dtype=torch.float64)
        determinants = torch.linalg.det(jacobian)
        assert determinants.min() > 0
        assert determinants.min() < 0.6  # the fields do bend


@pytest.mark.parametrize(("dimensions", "rms"), [(3, 0.19), (2, 0.28)])
def test_points_are_spread_evenly_and_voxels_move_as_the_recipe_says(dimensions: int, rms: float) -> None:
    spec = ElasticSpec(probability=0.3, magnitude=0.08)
    draw = drawn(spec, dimensions, range(400))
    assert draw["active"].float().mean() == pytest.approx(0.3, abs=0.07)
    assert not draw["points"][~draw["active"]].any()
    draw = {name: value[draw["active"]] for name, value in draw.items()}
    points = draw["points"].flatten().double().numpy()[:4000]
    assert stats.kstest(points, stats.uniform(-0.08, 0.16).cdf).pvalue > 1e-3
    field = Elastic(spec).displacement(draw, torch.Size((20,) * dimensions), CPU) / 20
    assert field.square().mean().sqrt() == pytest.approx(rms * 0.08, rel=0.05)
    assert (field.abs() > 0.04).float().mean() < 0.1
    assert field.mean().abs() < 2e-3


@pytest.mark.parametrize("shape", [(12, 15, 10), (14, 11)])
def test_a_bent_and_turned_patch_is_read_where_the_formula_says(shape: tuple[int, ...]) -> None:
    """Against scipy's map_coordinates at matrix · (x + u(x)), for image and label."""
    image, label = patch(*shape)
    section = {
        "elastic": {"probability": 1.0, "magnitude": 0.1},
        "rotate": {"probability": 1.0, "degrees": 30},
        "scale": {"probability": 1.0, "low": 0.7, "high": 1.4},
    }
    moved, moved_label, draws = augmented(section, image, label)
    field = Elastic(ElasticSpec(**section["elastic"])).displacement(draws["elastic"], torch.Size(shape), CPU)
    matrix = (draws["rotate"]["matrix"] @ draws["scale"]["matrix"]).double().numpy()
    centre = (np.array(shape).reshape(-1, *(1,) * len(shape)) - 1) / 2
    for sample in range(3):
        offsets = np.indices(shape) - centre + field[sample].double().numpy()
        places = np.tensordot(matrix[sample], offsets, axes=1) + centre
        for channel in range(2):
            expected = map_coordinates(image[sample, channel].double().numpy(), places, order=1, mode="nearest")
            assert np.abs(moved[sample, channel].numpy() - expected).max() < 1e-3
        expected = map_coordinates(label[sample, 0].numpy(), places, order=0, mode="nearest")
        assert (moved_label[sample, 0].numpy() != expected).mean() < 0.005  # halves may be rounded either way


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 12), min_size=2, max_size=3).map(tuple),
    cells=st.integers(1, 5),
    values=st.sets(st.integers(0, 255), min_size=1, max_size=4).map(sorted),
)
def test_labels_stay_labels_whatever_the_shape(shape: tuple[int, ...], cells: int, values: list[int]) -> None:
    image, _ = patch(*shape)
    place = torch.randint(0, len(values), (3, 1, *shape), generator=torch.Generator().manual_seed(3))
    label = torch.tensor(values, dtype=torch.uint8)[place]
    section = {"elastic": {"probability": 1.0, "magnitude": 0.08, "cells": cells}}
    moved, moved_label, _ = augmented(section, image, label)
    assert moved.shape == image.shape
    assert moved_label.dtype == torch.uint8
    assert set(moved_label.unique().tolist()) <= set(values)
    assert moved.amin() >= image.amin() - 1e-4
    assert moved.amax() <= image.amax() + 1e-4


def test_the_label_bends_with_the_image() -> None:
    image = torch.zeros(3, 1, 32, 28, 24)
    image[:, :, 8:22, 7:20, 6:18] = 1.0
    label = image.to(torch.uint8)
    moved, moved_label, _ = augmented({"elastic": {"probability": 1.0, "magnitude": 0.1}}, image, label)
    assert ((moved > 0.5) == moved_label.bool()).float().mean() > 0.985
    assert (moved_label != label).float().mean() > 0.005


def test_only_the_samples_that_bend_are_bent() -> None:
    image, label = patch(10, 9, 8)
    field = torch.full((1, 3, 10, 9, 8), 0.0)
    field[:, 0] = 1.0  # reads one voxel further along the first axis
    bent = Displacement(torch.tensor([1]), field)
    moved, moved_label = resample(image, label, torch.eye(3).repeat(3, 1, 1), bent)
    assert torch.allclose(moved[[0, 2]], image[[0, 2]], atol=1e-4)
    assert torch.equal(moved_label[[0, 2]], label[[0, 2]])
    assert torch.allclose(moved[1, :, :-1], image[1, :, 1:], atol=1e-4)
    assert torch.equal(moved_label[1, :, :-1], label[1, :, 1:])
