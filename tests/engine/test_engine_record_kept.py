"""What a run has reached stays on record when it is refused or stopped before it goes on."""

import json
import shutil
from pathlib import Path

import pytest

from fasttrain import train, train_folds
from fasttrain.engine.folds import resume_folds
from fasttrain.engine.run import resume
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import FasttrainError, OutOfMemoryError, RecipeError
from fasttrain.telemetry.events import Event, RunEnded, RunStarted, StepLogged

KEPT = ("best", "epochs", "steps", "cases")


class StopAt:
    """Asks for a stop at a step, or as soon as the run is told to have started; keeps how it ended."""

    def __init__(self, step: int) -> None:
        self.step, self.stop, self.ended = step, StopRequest(), []

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self.ended.append((event.best_value, event.best_epoch))
        begun = isinstance(event, RunStarted) and not self.step
        if begun or (isinstance(event, StepLogged) and event.step == self.step):
            self.stop.ask("a test", 143)

    def close(self) -> None: ...


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.fixture(scope="module")
def stopped(tiny, phantoms: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four epochs with two steps of its third."""
    run, watcher = tmp_path_factory.mktemp("stopped") / "run", StopAt(12)
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[watcher], stop=watcher.stop)
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"kind": "sgd"}},
        {"network": {"kind": "dynunet", "features": [4, 8, 16], "strides": [2, 2], "dropout": 0.1}},
    ],
    ids=["optimizer", "network"],
)
def test_a_resume_that_is_refused_for_its_recipe_keeps_what_was_reached(change: dict, tiny, run: Path) -> None:
    before = summary(run)
    (run / "recipe.yaml").write_text(tiny(**change).as_yaml())
    for _ in range(2):
        with pytest.raises(RecipeError):
            resume(run)
        assert {key: summary(run)[key] for key in KEPT} == {key: before[key] for key in KEPT}


@pytest.mark.parametrize(
    ("failing", "error", "code"),
    [
        ("fasttrain.engine.state.TrainState.restore", RecipeError("last.pt holds the state of another optimizer"), 2),
        ("fasttrain.engine.attempt.build", MemoryError("no memory for the cases"), 5),
    ],
    ids=["refused", "no memory"],
)
def test_a_resume_that_fails_before_it_goes_on_keeps_what_was_reached(
    failing: str, error: Exception, code: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise error

    before, watcher = summary(run), StopAt(-1)
    assert before["best"]["value"] is not None
    assert len(before["cases"]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(failing, fails)
        for _ in range(2):
            with pytest.raises(FasttrainError):
                resume(run, observers=[watcher])
            after = summary(run)
            assert (after["status"], after["exit_code"]) == ("failed", code)
            assert {key: after[key] for key in KEPT} == {key: before[key] for key in KEPT}
            assert after["seconds"]["training"] == before["seconds"]["training"]
            assert after["seconds"]["total"] > before["seconds"]["total"]
    assert watcher.ended == [(before["best"]["value"], before["best"]["epoch"])] * 2
    # With nothing in its way it goes on to its end and to scores of its own
    assert resume(run).exit_code == 0
    assert (summary(run)["epochs"], summary(run)["steps"]) == (4, 20)
    assert summary(run)["cases"] != before["cases"]


def test_a_resume_that_is_stopped_at_once_keeps_what_was_reached(run: Path) -> None:
    before, watcher = summary(run), StopAt(0)
    assert resume(run, observers=[watcher], stop=watcher.stop).exit_code == 143
    assert {key: summary(run)[key] for key in KEPT} == {key: before[key] for key in KEPT}


def test_scores_of_an_earlier_validation_are_not_taken_for_the_last(run: Path) -> None:
    """After a session that was killed there is no summary of it, and that of the one before is out of date."""
    before, watcher = summary(run), StopAt(17)
    resume(run, observers=[watcher], stop=watcher.stop)
    (run / "summary.json").write_text(json.dumps(before))
    again = StopAt(0)
    resume(run, observers=[again], stop=again.stop)
    assert (summary(run)["cases"], summary(run)["steps"]) == ({}, 17)


def test_a_run_that_fails_before_its_first_step_has_no_best(tiny, phantoms: Path, tmp_path: Path) -> None:
    wide = tiny(network={"kind": "unet", "features": [10_000_000, 10_000_000], "strides": [2]})
    with pytest.raises(OutOfMemoryError):
        train(wide, data=phantoms, run=tmp_path / "run", device="cpu")
    after = summary(tmp_path / "run")
    assert (after["best"]["value"], after["epochs"], after["steps"], after["cases"]) == (None, 0, 0, {})


def test_a_fold_that_is_refused_keeps_its_scores_in_the_whole(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe, run, watcher = tiny(data__split={"kind": "kfold", "folds": 3}), tmp_path / "all", StopAt(12)
    train_folds(
        recipe,
        data=phantoms,
        run=run,
        device="cpu",
        watch=lambda fold, folds: [watcher] if fold == 1 else [],
        stop=watcher.stop,
    )
    before, fold = summary(run), run / "fold_1" / "recipe.yaml"
    assert len(before["cases"]) == 4
    own = fold.read_text()
    other = recipe.with_values({("data", "split", "fold"): 1, ("optimizer",): {"kind": "sgd"}}, "a test")
    fold.write_text(other.as_yaml())
    with pytest.raises(RecipeError):
        resume_folds(run)
    after = summary(run)
    assert (after["status"], after["cases"], after["best"]) == ("failed", before["cases"], before["best"])
    assert [one["run"] for one in after["folds"]] == ["fold_0", "fold_1"]
    fold.write_text(own)
    assert resume_folds(run).exit_code == 0
    assert len(summary(run)["cases"]) == 6
