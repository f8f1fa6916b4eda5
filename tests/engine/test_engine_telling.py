"""What is told inside a case that takes long: windows, by the clock and not each of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fasttrain.delivery import evaluate, open_run, predict
from fasttrain.engine.run import RunResult
from fasttrain.engine.step import Precision
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.engine.validating import inference
from fasttrain.engine.validating.inference import Ensemble, Predictor, telling


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock of the engine that stands still until it is moved on."""
    now = [100.0]
    monkeypatch.setattr(inference.time, "monotonic", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_windows_are_told_once_a_second_and_not_in_a_short_case(clock: Callable[[float], None]) -> None:
    told: list[tuple[int, int, str]] = []
    one = telling(lambda done, total, within: told.append((done, total, within)), 2, 5, "case_7")
    assert one is not None
    for window in range(1, 9):
        clock(0.3)
        one(window, 96)
    assert told == [(2, 5, "case_7, 4 of 96 windows"), (2, 5, "case_7, 8 of 96 windows")]
    assert telling(None, 0, 1, "quiet") is None


def test_an_ensemble_tells_of_a_window_when_all_its_networks_have_answered(tiny) -> None:
    recipe = tiny(validation__window={"overlap": 0.0, "batch_size": 2}).recipe
    calls: list[int] = []

    class Network(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            calls.append(len(image))
            return torch.cat([image] * recipe.data.class_count, 1)

    class Volume:
        image = torch.randn(1, 16, 16, 64)

    precision, device = Precision("cpu", None, None), torch.device("cpu")
    ensemble = Ensemble([Predictor(Network(), recipe, precision, device) for _ in range(3)])
    told: list[tuple[int, int, int]] = []
    ensemble.probabilities(Volume(), lambda done, total: told.append((done, total, len(calls))))  # type: ignore[arg-type]
    assert told == [(2, 4, 3), (4, 4, 6)]


def test_evaluate_and_predict_tell_of_windows_and_a_stop_is_heard_between_them(
    whole_run: RunResult, phantoms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "_SECONDS_BETWEEN", 0.0)
    run, stop = open_run(whole_run.run, "cpu"), StopRequest()
    told: list[tuple[int, int, str]] = []
    within = lambda done, total, text: told.append((done, total, text))  # noqa: E731
    image = sorted((phantoms / "imagesTr").iterdir())[0]
    predict(run, image, tmp_path / "a.nii.gz", lambda *_: None, stop, within=within)
    name = image.name.removesuffix(".nii.gz")
    counts = [text.removeprefix(f"{name}, ").split(" ") for _, _, text in told]
    assert all((done, total) == (0, 1) for done, total, _ in told)
    assert counts[-1][0] == counts[-1][2]
    assert int(counts[-1][2]) > 1
    told.clear()
    evaluate(run, "validation", None, lambda *_: None, stop, within)
    assert {(done, total) for done, total, _ in told} == {(0, 2), (1, 2)}

    def ask(done: int, total: int, text: str) -> None:
        stop.ask("a test", 130)
        stop.check()

    with pytest.raises(Stopped):
        predict(run, image, tmp_path / "b.nii.gz", lambda *_: None, stop, within=ask)
    assert not (tmp_path / "b.nii.gz").exists()
