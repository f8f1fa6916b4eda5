"""A patient's voxel keeps its dose and its structures from the files through every cache and into the batch a network sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dose_patients import PLACE, PLACE_DOSE

from fasttrain.batches import LoaderSource, Loading, Order, ResidentSource, fill
from fasttrain.batches.device_room import voxel_bytes
from fasttrain.data.caches import CACHES, estimate_bytes, open_case_source
from fasttrain.data.openkbp import read_patient
from fasttrain.data.openkbp_import import import_openkbp
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.data.splits import split_cases
from fasttrain.errors import RecipeError
from fasttrain.kernels.structure_bits import change_sides, network_input, unpack, within_mask
from fasttrain.recipe import resolve
from fasttrain.samples import Case, Sample

RECIPE = resolve("openkbp", ["data.workers=0", "training.batch_size=1", "augment.flip=null"]).recipe
NAMES = RECIPE.data.class_names
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cases(patients: Path) -> tuple[Case, ...]:
    return find_cases(RECIPE.data, patients).cases


def dose_at(sample: Sample) -> float:
    return float(sample.image[(1, *PLACE)]) * RECIPE.data.dose_scale


@pytest.mark.parametrize("kind", sorted(CACHES))
def test_every_cache_gives_the_voxel_its_dose(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    for _ in ("cold", "warm"):
        source = open_case_source(kind, cases[:2], Preprocess(RECIPE), 1, folder=tmp_path)
        sample = source[0]
        assert (sample.image.dtype, sample.label.dtype) == (torch.float16, torch.int16)
        assert sample.image.nbytes + sample.label.nbytes == 6 * 128**3
        assert dose_at(sample) == pytest.approx(PLACE_DOSE, rel=1e-3)
        assert sample.label[(0, *PLACE)] == 1 << 10
        assert float(sample.image[0].max()) == 1.0, "19798 is clipped"
        (centres,) = sample.centres
        assert bool(within_mask(sample.label, 10).reshape(-1)[centres.long()].all())
        source.close()


def test_the_compact_form_gives_the_same_volumes(cases: tuple[Case, ...], patients: Path, tmp_path: Path) -> None:
    import_openkbp(patients, tmp_path)
    preprocess, compact = Preprocess(RECIPE), find_cases(RECIPE.data, tmp_path).cases
    assert [case.name for case in compact] == [case.name for case in cases]
    one, other = preprocess(cases[0]), preprocess(compact[0])
    assert torch.equal(one["image"], other["image"])
    assert torch.equal(one["label"], other["label"])
    assert estimate_bytes(compact, RECIPE) == estimate_bytes(cases, RECIPE)


@pytest.mark.parametrize("resident", [False, True], ids=["loader", "gpu cache"])
@pytest.mark.parametrize("flipped", [0.0, 1.0])
def test_the_batch_of_the_gpu_cache_and_of_the_loader(cases: tuple[Case, ...], resident: bool, flipped: float) -> None:
    """The GPU cache by its plain torch form."""
    values = [
        "data.workers=0",
        "training.batch_size=1",
        f"augment.flip.probability={flipped}",
        "augment.noise={probability: 1}",
        "augment.rotate=null",
        "augment.scale=null",
    ]
    recipe = resolve("openkbp", values).recipe
    source = open_case_source("memory", cases[:1], Preprocess(recipe), 1)
    sample = source[0]
    order = Order(1, 1, 0)
    batches = (
        ResidentSource(recipe, fill(source, recipe, CPU, 128**3 * voxel_bytes(recipe)), order, CPU)
        if resident
        else LoaderSource(recipe, source, order, CPU, Loading())
    )
    batch = next(batches.batches(0))
    assert batch.label.dtype == torch.int16
    i, j, k = PLACE
    place = (i, 127 - j, k) if flipped else PLACE
    assert float(batch.image[(0, 1, *place)]) * 70 == pytest.approx(PLACE_DOSE, rel=1e-3)
    expected = sample.image[1].float().flip(1) if flipped else sample.image[1].float()
    assert torch.allclose(batch.image[0, 1], expected, atol=1e-6), "no intensity technique touches the dose"
    assert not torch.allclose(
        batch.image[0, 0], (sample.image[0].flip(1) if flipped else sample.image[0]).float(), atol=1e-3
    )
    left, right = NAMES.index("LeftParotid"), NAMES.index("RightParotid")
    original, shown = sample.label[0], batch.label[0, 0]
    mirrored = shown.flip(1) if flipped else shown
    there, here = (left, right) if flipped else (left, left)
    assert torch.equal((mirrored >> here) & 1, (original >> there) & 1)
    stem = NAMES.index("Brainstem")
    assert torch.equal((mirrored >> stem) & 1, (original >> stem) & 1)
    batches.close()


def test_unpacking_is_a_channel_a_bit(cases: tuple[Case, ...]) -> None:
    patient = read_patient(cases[0], NAMES)
    sample = Preprocess(RECIPE).as_sample(Preprocess(RECIPE)(cases[0]))
    seen, target = unpack(sample.image[None].float(), sample.label[None], 10)
    assert (seen.shape, target.shape) == ((1, 11, 128, 128, 128), (1, 2, 128, 128, 128))
    for bit in range(10):
        assert torch.equal(seen[0, 1 + bit], torch.from_numpy((patient.structures >> bit) & 1).float())
    assert torch.equal(target[0, 1], torch.from_numpy((patient.structures >> 10) & 1).float())
    assert float(target[0, 0][PLACE]) * 70 == pytest.approx(PLACE_DOSE, rel=1e-3)
    assert torch.equal(network_input(sample.image.float(), sample.label, 10), seen[0])


def test_only_mirrored_samples_change_sides() -> None:
    rng = np.random.default_rng(0)
    label = torch.from_numpy(rng.integers(0, 1 << 11, (3, 1, 4, 4, 4)).astype(np.int16))
    changed = change_sides(label, torch.tensor([True, False, True]), [(3, 2)])
    assert torch.equal(changed[1], label[1])
    for bit, other in ((2, 3), (3, 2), (0, 0), (10, 10)):
        assert torch.equal((changed[::2] >> bit) & 1, (label[::2] >> other) & 1)
    assert torch.equal(change_sides(changed, torch.tensor([True, False, True]), [(3, 2)]), label)


def test_the_provided_split(cases: tuple[Case, ...], tmp_path: Path) -> None:
    split = split_cases(cases, RECIPE.data.split)
    assert [[case.name for case in part] for part in split.parts.values()] == [["pt_1", "pt_2"], ["pt_201"], []]
    with pytest.raises(RecipeError, match="lies in none of the folders train-pats"):
        split_cases([*cases, Case("pt_9", (tmp_path / "pt_9" / "ct.csv",), None)], RECIPE.data.split)
