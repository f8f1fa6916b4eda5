"""Sets whose shapes invite mistakes, worked out by hand, under every kind of cache: cold, and from what was stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from data_builders import make_recipe, save

from fasttrain.batches.order import Order
from fasttrain.batches.patch_maker import PatchMaker
from fasttrain.data.caches import CACHES, open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.engine.step import Precision
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.inference import Predictor
from fasttrain.engine.validating.validation import Validator
from fasttrain.networks import build_network
from fasttrain.recipe import Recipe
from fasttrain.samples import Case, CaseSource

KINDS = sorted(CACHES)
pytestmark = pytest.mark.parametrize("kind", KINDS)


def opened_twice(kind: str, cases: list[Case], recipe: Recipe, folder: Path, training: bool) -> Iterator[CaseSource]:
    for _ in ("cold", "warm"):
        source = open_case_source(kind, cases, Preprocess(recipe, training), 2, folder=folder / "cache")
        yield source
        source.close()


def test_a_shallow_case_beside_a_deep_one(kind: str, tmp_path: Path) -> None:
    """Voxel counts are kept by padding and cutting: the image is 10 × the label + 1, and 0 where it was padded."""
    cases, counts = [], []
    for number, shape in enumerate([(48, 48, 48), (48, 48, 20)]):
        label = np.zeros(shape, np.uint8)
        label[4:44, 10:20, 5:17], label[20:30, 30:45, 0:20] = 1, 2
        counts.append([int((label == value).sum()) for value in (1, 2)])
        files = {"i": label * np.float32(10) + 1, "l": label}
        paths = {name: save(tmp_path / f"{name}{number}.nii.gz", values) for name, values in files.items()}
        cases.append(Case(f"c{number}", (paths["i"],), paths["l"]))
    recipe = make_recipe(patch={"size": [32, 32, 32]})
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"batch_size": 2})})
    for source in opened_twice(kind, cases, recipe, tmp_path, training=True):
        shapes = [tuple(source[index].image.shape) for index in range(2)]
        assert shapes == [(1, 48, 48, 48), (1, 48, 48, 32)]
        for index in range(2):
            sample = source[index]
            assert sample.label is not None
            assert [int((sample.label == value).sum()) for value in (1, 2)] == counts[index]
            assert [table.dtype for table in sample.centres] == [torch.int32] * 2  # 73 728 voxels and more
        maker = PatchMaker(recipe, source, Order(2, 1, seed=0))
        seen = 0
        for first in range(0, 40, 2):
            batch = maker.make(first)
            assert batch.image.shape == batch.label.shape == (2, 1, 32, 32, 32)
            assert batch.label.dtype == torch.uint8
            inside = batch.image != 0
            assert torch.equal(batch.image[inside], batch.label[inside].float() * 10 + 1)
            assert int(batch.label[~inside].max() if bool((~inside).any()) else 0) == 0
            shallow = batch.names.index("c1")
            assert int(inside[shallow].sum()) == 32 * 32 * 20
            seen += int(batch.label.count_nonzero())
        assert seen > 0


def test_each_of_four_channels_is_normalised_by_itself(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(24, 24, 16, 4)).astype(np.float32) * [1, 2, 5, 10] + [0, 100, 200, 300]
    label = save(tmp_path / "l.nii.gz", rng.integers(0, 3, (24, 24, 16)).astype(np.uint8))
    case = Case("a", (save(tmp_path / "i.nii.gz", values.astype(np.float32)),), label)
    recipe = make_recipe(channels=["a", "b", "c", "d"], intensity={"kind": "zscore"})
    for source in opened_twice(kind, [case], recipe, tmp_path, training=True):
        image = source[0].image
        assert image.shape == (4, 24, 24, 16)
        assert image.mean((1, 2, 3)).abs().max() < 1e-4
        assert (image.std((1, 2, 3)) - 1).abs().max() < 1e-3
        whole = (values - values.mean((0, 1, 2))) / values.std((0, 1, 2))
        assert np.abs(image.numpy() - np.moveaxis(whole, -1, 0)).max() < 1e-3  # in the order of the file
        for table in source[0].centres:
            assert table.dtype == torch.uint16  # 9216 voxels


def test_an_odd_volume_validates_in_its_own_shape(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shape = (37, 45, 11)
    image = save(tmp_path / "i.nii.gz", rng.normal(size=shape).astype(np.float32))
    case = Case("a", (image,), save(tmp_path / "l.nii.gz", rng.integers(0, 3, shape).astype(np.uint8)))
    recipe = make_recipe(patch={"size": [16, 16, 16]})
    torch.manual_seed(0)
    network = build_network(recipe.network, recipe.patch.size, 1, recipe.output_channels)
    predictor = Predictor(network, recipe, Precision("cpu", None, None), torch.device("cpu"))
    for source in opened_twice(kind, [case], recipe, tmp_path, training=False):
        sample = source[0]
        assert sample.image.shape == (1, *shape)
        assert sample.grid.shape == sample.source_grid.shape == shape
        assert predictor.probabilities(sample).shape == (3, *shape)
        assert [predictor.class_map(sample, in_source).shape for in_source in (True, False)] == [shape, shape]
        scores = Validator(predictor, source, [case], recipe, keep_labels=False).run(StopRequest(), lambda *_: None)
        assert len(scores.cases) == 1
