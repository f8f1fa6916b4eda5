"""Pictures and TensorBoard files of real runs: which cases, which slices, and that nothing about them changes or ends a run."""

import sys
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

import fasttrain.engine.validating.pictures
from fasttrain import train
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.engine.run import resume
from fasttrain.engine.step import Precision
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.validating.inference import Predictor
from fasttrain.engine.validating.pictures import pick_cases, planes_of
from fasttrain.engine.validating.validation import Judged, Validator
from fasttrain.errors import EXIT_INTERRUPTED, MachineError
from fasttrain.samples import Case, Grid, Sample
from fasttrain.scoring import CaseScore
from fasttrain.scoring.case_score import ClassScore
from fasttrain.telemetry.events import EpochEnded, Message, StepLogged


class Heard:
    def __init__(self, stop: StopRequest | None = None, after: int = 0, code: int = EXIT_INTERRUPTED) -> None:
        self.events: list[object] = []
        self.stop, self.after, self.code = stop, after, code

    def on_event(self, event: object) -> None:
        self.events.append(event)
        if self.stop is not None and isinstance(event, StepLogged) and event.step == self.after:
            self.stop.ask("a test", self.code)

    def close(self) -> None: ...

    def warnings(self) -> list[str]:
        return [one.text for one in self.events if isinstance(one, Message) and one.level == "warning"]


def pictures(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "pictures").iterdir()) if (run / "pictures").is_dir() else []


def scored(*dices: tuple[float | None, ...]) -> list[CaseScore]:
    return [CaseScore(f"c{n}", tuple(map(ClassScore, one)), 0.9) for n, one in enumerate(dices)]


def test_worst_median_and_best_are_those_of_the_mean_over_counted_classes() -> None:
    scores = scored((0.9, None), (0.2, 0.4), (None, None), (0.5, 0.7), (0.8, 0.7), (0.4, 0.6))
    assert pick_cases(scores) == {"worst": 1, "median": 3, "best": 0}
    assert pick_cases(scored((0.5,), (0.1,))) == {"worst": 1, "best": 0}
    assert pick_cases(scored((None,), (0.1,))) == {"only": 1}
    assert pick_cases(scored((None,))) == {}
    assert pick_cases(scored((0.5,), (0.5,), (0.5,))) == {"worst": 0, "median": 1, "best": 2}


def judged(shape: tuple[int, ...], affine: np.ndarray, marked: tuple[slice, ...]) -> Judged:
    """A case whose image counts its voxels, on a grid that is not the one the network saw."""
    image = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(1, *shape)
    label = torch.zeros(shape, dtype=torch.uint8)
    label[marked] = 1
    grid = Grid(shape, affine)
    sample = Sample("a", image, label[None], (), None, grid, grid)
    return Judged(sample, label.clone(), label, grid)


def test_slices_go_through_the_middle_of_the_fullest_and_keep_spacing_and_sides() -> None:
    affine = np.zeros((4, 4))
    affine[1, 0], affine[0, 1], affine[2, 2], affine[3, 3] = -2.0, 1.0, 3.0, 1  # axes run P, R, S
    case = judged((8, 7, 6), affine, (slice(2, 5), slice(1, 4), slice(3, 6)))
    axial, coronal, sagittal = planes_of(case)
    volume = case.sample.image[0].numpy()
    assert np.array_equal(axial.image, volume[:, :, 4])
    assert np.array_equal(coronal.image, volume[3])
    assert np.array_equal(sagittal.image, volume[:, 2])
    assert (axial.toward, coronal.toward, sagittal.toward) == (("P", "R"), ("R", "S"), ("P", "S"))
    assert (axial.spacing_mm, coronal.spacing_mm, sagittal.spacing_mm) == ((2, 1), (1, 3), (2, 3))
    assert axial.label.sum() == coronal.prediction.sum() == 9


def test_a_volume_without_foreground_is_cut_in_the_middle() -> None:
    axial, coronal, sagittal = planes_of(judged((8, 7, 6), np.eye(4), (slice(0),) * 3))
    volume = judged((8, 7, 6), np.eye(4), (slice(0),) * 3).sample.image[0].numpy()
    assert np.array_equal(axial.image, volume[:, :, 3])
    assert np.array_equal(coronal.image, volume[:, 3])
    assert np.array_equal(sagittal.image, volume[4])


def test_a_plane_image_is_one_plane() -> None:
    (only,) = planes_of(judged((8, 7), np.diag([-1.5, 2.0, 1.0, 1.0]), (slice(2, 4), slice(2, 4))))
    assert only.image.shape == (8, 7)
    assert only.toward == ("L", "A")
    assert only.spacing_mm == (1.5, 2.0)


def test_the_image_of_a_slice_is_the_files_own_where_the_network_saw_another_grid() -> None:
    case = judged((9, 9, 9), np.eye(4), (slice(4, 5),) * 3)
    ramp = torch.arange(9.0)[:, None, None].expand(1, 9, 9, 9).clone()
    fine = Grid((17, 9, 9), np.diag([0.5, 1.0, 1.0, 1.0]))
    label = torch.zeros((17, 9, 9), dtype=torch.uint8)
    label[7, 4, 4] = 1
    sample = replace(case.sample, image=ramp)
    axial, _, sagittal = planes_of(Judged(sample, label, label, fine))
    assert np.allclose(axial.image, (np.arange(17) / 2)[:, None])
    assert np.allclose(sagittal.image, 3.5)


def test_a_run_ends_with_pictures_and_is_otherwise_the_same(tiny, phantoms: Path, tmp_path: Path, whole_run) -> None:
    heard = Heard()
    with_pictures = tiny(output__pictures="last", output__tensorboard=_has_tensorboard())
    result = train(with_pictures, data=phantoms, run=tmp_path / "run", device="cpu", observers=[heard])
    names = pictures(result.run)
    assert [name.split("_phantom")[0] for name in names] == ["epoch_0004_best", "epoch_0004_worst"]
    assert all((result.run / "pictures" / name).read_bytes().endswith(b"IEND\xaeB`\x82") for name in names)
    assert not heard.warnings()
    assert result.summary["best"] == whole_run.summary["best"]
    assert _weights(result.run, whole_run.run)


def _weights(run: Path, other: Path) -> bool:
    own, theirs = (torch.load(path / "checkpoints" / "last.pt", weights_only=True) for path in (run, other))
    own, theirs = (saved.get("state", saved)["network"] for saved in (own, theirs))
    return all(torch.equal(own[name], theirs[name]) for name in own)


def _has_tensorboard() -> bool:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


def test_off_draws_nothing(whole_run) -> None:
    assert not (whole_run.run / "pictures").exists()
    assert not (whole_run.run / "tensorboard").exists()


def test_best_draws_each_new_best_and_the_last(tiny, phantoms: Path, tmp_path: Path) -> None:
    heard = Heard()
    recipe = tiny(output__pictures="best", optimizer__learning_rate=1e-2, training__iterations_per_epoch=10)
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cpu", observers=[heard])
    best = {event.epoch for event in heard.events if isinstance(event, EpochEnded) and event.is_best}
    assert {int(name.split("_")[1]) for name in pictures(result.run)} == best | {4}


def test_a_run_that_was_told_to_stop_draws_when_it_is_gone_on_with(tiny, phantoms: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    recipe = tiny(output__pictures="best")
    run = tmp_path / "run"
    train(recipe, data=phantoms, run=run, device="cpu", observers=[Heard(stop, after=13)], stop=stop)
    (run / "pictures").mkdir(exist_ok=True)
    for left in ("epoch_0003_best_gone.png", "epoch_0004_worst_gone.png", ".epoch_0004_worst_gone.png.1.part"):
        (run / "pictures" / left).touch()
    resume(run, device="cpu")
    names = pictures(run)
    assert not any("gone" in name for name in names)
    assert sum(name.startswith("epoch_0004_") for name in names) == 2


def test_early_stopping_is_an_end_with_pictures(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(
        output__pictures="last",
        training__epochs=9,
        training__early_stopping={"patience": 1},
        optimizer__learning_rate=1e-12,
        schedule={"kind": "constant"},
    )
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cpu")
    assert result.summary["epochs"] < 9
    assert {int(name.split("_")[1]) for name in pictures(result.run)} == {result.summary["epochs"]}


@pytest.mark.parametrize("place", ["folder", "drawing"])
def test_a_failure_in_drawing_is_one_warning(tiny, phantoms: Path, tmp_path: Path, monkeypatch, place: str) -> None:
    heard = Heard()
    run = tmp_path / "run"

    class Spoiler(Heard):
        def on_event(self, event: object) -> None:
            if isinstance(event, StepLogged) and event.step == 1:
                (run / "pictures").touch()

    if place == "drawing":
        monkeypatch.setattr(
            fasttrain.engine.validating.pictures, "planes_of", lambda _: (_ for _ in ()).throw(MemoryError())
        )
    observers = [heard, Spoiler()] if place == "folder" else [heard]
    recipe = tiny(output__pictures="best", training__epochs=2, optimizer__learning_rate=1e-2)
    result = train(recipe, data=phantoms, run=run, device="cpu", observers=observers)
    assert result.exit_code == 0
    assert result.summary["status"] == "done"
    (warning,) = heard.warnings()
    assert "no picture of case phantom_00" in warning
    assert ("pictures cannot be made" if place == "folder" else "MemoryError") in warning


class Counting(torch.nn.Module):
    """Calls everything background but counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.cat([torch.ones_like(image), torch.zeros_like(image), torch.zeros_like(image)], 1)


@pytest.mark.parametrize(("count", "asked_again"), [(3, False), (4, True)])
def test_few_cases_are_not_predicted_again(tiny, phantoms: Path, count: int, asked_again: bool) -> None:
    recipe = tiny(validation__window={"overlap": 0.0, "blend": "constant", "batch_size": 512}).recipe
    cases: tuple[Case, ...] = find_cases(recipe.data, phantoms).cases[:count]
    source = open_case_source("none", cases, Preprocess(recipe, training=False), 1)
    network = Counting()
    predictor = Predictor(network, recipe, Precision("cpu", None, None), torch.device("cpu"))
    validator = Validator(predictor, source, cases, recipe, keep_labels=False, keep_predictions=True)
    validator.run(StopRequest(), lambda done, total: None)
    calls = network.calls
    again = validator.judge(1)
    assert (network.calls > calls) == asked_again
    assert again.prediction.shape == again.label.shape == nib.load(cases[1].images[0]).shape


def test_tensorboard_of_an_interrupted_run_is_that_of_an_unbroken_one(tiny, phantoms: Path, tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the package tensorboard is not installed"
    )

    def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
        found = accumulators.EventAccumulator(str(run / "tensorboard"), size_guidance={accumulators.SCALARS: 0})
        found.Reload()
        same = ["training/loss", "training/learning_rate", "epoch/loss", "validation/dice", "dice/liver"]
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in same}

    recipe, stop = tiny(output__tensorboard=True), StopRequest()
    whole = train(recipe, data=phantoms, run=tmp_path / "whole", device="cpu").run
    parted = tmp_path / "parted"
    train(recipe, data=phantoms, run=parted, device="cpu", observers=[Heard(stop, after=13)], stop=stop)
    # As a kill would leave it: the newest steps are logged, but their checkpoint was not written
    (parted / "checkpoints" / "last.pt").write_bytes((parted / "checkpoints" / "best.pt").read_bytes())
    resume(parted, device="cpu")
    assert len(list((parted / "tensorboard").iterdir())) == 2
    assert scalars(parted) == scalars(whole)
    assert [step for step, _ in scalars(whole)["training/loss"]] == list(range(1, 21))
    assert [step for step, _ in scalars(whole)["validation/dice"]] == [5, 10, 15, 20]


def test_a_missing_tensorboard_is_found_before_anything_is_written(tiny, tmp_path: Path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MachineError, match="pip install"):
        train(tiny(output__tensorboard=True), data=tmp_path / "data", run=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "data").exists()
