"""Validation against numbers worked out by hand, on the grid of the file and on the preprocessed one."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates
from scipy.spatial import cKDTree

from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.engine.step import Precision
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.engine.validating.inference import Predictor
from fasttrain.engine.validating.validation import Validator, spacing_mm
from fasttrain.recipe import Recipe
from fasttrain.samples import Case

HIGH, LOW = 0.62, 0.5


class Threshold(torch.nn.Module):
    """Class 1 above HIGH, class 2 from LOW to HIGH: a network whose answer a person can work out."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        value = image[:, :1]
        classes = torch.where(value > HIGH, 1, torch.where(value > LOW, 2, 0))
        return torch.nn.functional.one_hot(classes[:, 0].long(), 3).movedim(-1, 1).float() * 20


def thresholded(image: np.ndarray) -> np.ndarray:
    return np.where(image > HIGH, 1, np.where(image > LOW, 2, 0))


@pytest.fixture(scope="module")
def balls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cases of two noisy balls in voxels of 1 × 1.5 × 3 mm, stored with other axis directions than RAS."""
    root, rng = tmp_path_factory.mktemp("balls"), np.random.default_rng(0)
    for number in range(2):
        shape, spacing = (44 + number, 36, 18), np.array([1.0, 1.5, 3.0])
        places = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1) * spacing
        label = np.zeros(shape, np.uint8)
        label[np.linalg.norm(places - [15, 18, 24], axis=-1) < 11 + number] = 1
        label[np.linalg.norm(places - [31, 36, 30], axis=-1) < 9] = 2
        image = np.select([label == 1, label == 2], [0.75, 0.56], 0.3) + rng.normal(0, 0.05, shape)
        affine = np.zeros((4, 4))
        affine[1, 0], affine[0, 1], affine[2, 2], affine[3, 3] = -spacing[0], spacing[1], spacing[2], 1
        affine[:3, 3] = [-20.0, 30.0, 5.0]
        for folder, values in (("images", image.astype(np.float32)), ("labels", label)):
            (root / folder).mkdir(exist_ok=True)
            nib.save(nib.Nifti1Image(values, affine), root / folder / f"ball{number}.nii.gz")
    return root


def parts(tiny, balls: Path, **more: object) -> tuple[Recipe, tuple[Case, ...], Validator]:
    recipe = tiny(
        data__source={"kind": "folders"},
        data__intensity={"kind": "none"},
        data__split={"kind": "last", "validation": 1},
        validation__window={"overlap": 0.0, "blend": "constant"},
        **more,
    ).recipe
    cases = find_cases(recipe.data, balls).cases
    source = open_case_source("none", cases, Preprocess(recipe, training=False), 1)
    predictor = Predictor(Threshold(), recipe, Precision("cpu", None, None), torch.device("cpu"))
    return recipe, cases, Validator(predictor, source, cases, recipe, keep_labels=False)


def silent(done: int, total: int) -> None: ...


def by_hand(made: np.ndarray, label: np.ndarray, value: int) -> float | None:
    both = int((made == value).sum() + (label == value).sum())
    if not both:
        return None
    return 2 * int(((made == value) & (label == value)).sum()) / both


def test_in_the_files_own_voxels_a_score_is_that_of_the_voxels(tiny, balls: Path) -> None:
    """Without resampling the prediction is a threshold of the file itself."""
    _, cases, validator = parts(tiny, balls, data__spacing=None)
    scores = validator.run(StopRequest(), silent)
    columns: dict[int, list[float]] = {1: [], 2: []}
    for case, score in zip(cases, scores.cases, strict=True):
        assert case.label is not None
        image = np.asarray(nib.load(case.images[0]).dataobj, dtype=np.float32)
        label = np.asarray(nib.load(case.label).dataobj)
        made = thresholded(image)
        for value, column in columns.items():
            expected = by_hand(made, label, value)
            assert expected is not None
            assert 0.5 < expected < 1  # neither found nor missed altogether, else this could not fail
            assert score.classes[value - 1].dice == pytest.approx(expected, abs=1e-6)
            column.append(score.classes[value - 1].dice)
    assert scores.summary.dice == pytest.approx(np.mean([np.mean(column) for column in columns.values()]), abs=1e-12)


def likeliest_in_world(scores: np.ndarray, affine: np.ndarray, shape: tuple[int, ...], onto: np.ndarray) -> np.ndarray:
    """The likeliest class on another grid by way of world coordinates, with SciPy: slow, plain, and nothing of ours."""
    places = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1).reshape(-1, 3)
    world = places @ onto[:3, :3].T + onto[:3, 3]
    index = (world - affine[:3, 3]) @ np.linalg.inv(affine[:3, :3]).T
    moved = [map_coordinates(one, index.T, order=1, mode="nearest") for one in scores]
    return np.argmax(moved, 0).reshape(shape)


def test_a_resampled_prediction_is_scored_in_the_files_voxels(tiny, balls: Path) -> None:
    _, cases, validator = parts(tiny, balls, data__spacing=[2.3, 1.9, 2.7])
    scores = validator.run(StopRequest(), silent)
    for index, (case, score) in enumerate(zip(cases, scores.cases, strict=True)):
        assert case.label is not None
        file = nib.load(case.label)
        label, sample = np.asarray(file.dataobj), validator.source[index]
        assert sample.grid.shape != sample.source_grid.shape
        probabilities = Threshold()(sample.image[None]).softmax(1)[0].numpy()
        back = likeliest_in_world(probabilities, sample.grid.affine, label.shape, file.affine)
        for value in (1, 2):
            expected = by_hand(back, label, value)
            assert expected is not None
            assert 0.5 < expected < 1
            assert score.classes[value - 1].dice == pytest.approx(expected, abs=1e-6)


def test_on_the_preprocessed_grid_a_score_is_that_of_its_voxels(tiny, balls: Path) -> None:
    _, _, validator = parts(tiny, balls, validation__grid="preprocessed")
    scores = validator.run(StopRequest(), silent)
    for index, score in enumerate(scores.cases):
        sample = validator.source[index]
        assert sample.label is not None
        made, label = Threshold()(sample.image[None]).argmax(1)[0].numpy(), sample.label[0].numpy()
        for value in (1, 2):
            assert score.classes[value - 1].dice == pytest.approx(by_hand(made, label, value), abs=1e-6)


def test_hd95_is_in_mm_of_the_grid_scored(tiny, balls: Path) -> None:
    _, cases, validator = parts(tiny, balls, data__spacing=None, validation__hd95=True)
    scores = validator.run(StopRequest(), silent)
    case, score = cases[0], scores.cases[0].classes[0]
    image = np.asarray(nib.load(case.images[0]).dataobj, dtype=np.float32)
    assert case.label is not None
    label = np.asarray(nib.load(case.label).dataobj) == 1
    made = thresholded(image) == 1
    spacing = np.linalg.norm(nib.load(case.images[0]).affine[:3, :3], axis=0)
    surfaces = []
    for mask in (made, label):
        padded = np.pad(mask, 1)
        inner = np.logical_and.reduce([np.roll(padded, step, axis) for axis in range(3) for step in (1, -1)])
        surfaces.append(np.argwhere(mask & ~inner[1:-1, 1:-1, 1:-1]) * spacing)
    there, back = (cKDTree(b).query(a)[0] for a, b in (surfaces, surfaces[::-1]))
    assert score.hd95 == pytest.approx(max(np.percentile(there, 95), np.percentile(back, 95)), rel=0.02)


def test_a_stop_is_heard_between_cases_and_progress_is_told(tiny, balls: Path) -> None:
    _, _, validator = parts(tiny, balls)
    stop, told = StopRequest(), []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        stop.ask("a test", 130)

    with pytest.raises(Stopped):
        validator.run(stop, progress)
    assert told == [(1, 2)]


def test_kept_labels_give_the_same_scores(tiny, balls: Path) -> None:
    _, _, fresh = parts(tiny, balls)
    _, _, keeping = parts(tiny, balls)
    keeping.kept.keep_labels = True
    first, second = (keeping.run(StopRequest(), silent) for _ in range(2))
    assert first.cases == second.cases == fresh.run(StopRequest(), silent).cases


def test_scoring_leaves_the_generators_and_the_weights_alone(tiny, balls: Path) -> None:
    _, _, validator = parts(tiny, balls)
    before = torch.get_rng_state()
    validator.run(StopRequest(), silent)
    assert torch.equal(before, torch.get_rng_state())


def test_spacing_is_the_length_of_the_affines_columns() -> None:
    turned = np.eye(4)
    turned[:3, :3] = np.array([[0.0, -2.0, 0.0], [1.5, 0.0, 0.0], [0.0, 0.0, 4.0]])
    assert spacing_mm(turned, 3) == pytest.approx((1.5, 2.0, 4.0))
    assert spacing_mm(turned, 2) == pytest.approx((1.5, 2.0))
