"""Runs that go wrong: losses that are not finite, crashes, killed workers; and resumes for every optimiser."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from fasttrain import train
from fasttrain.checkpoints import read_checkpoint
from fasttrain.engine.failures import explaining
from fasttrain.engine.fit import Fit
from fasttrain.engine.run import RunResult, resume
from fasttrain.engine.saving import Saver
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DivergedError, MachineError, RecipeError, StorageError
from fasttrain.recipe import resolve
from fasttrain.telemetry.events import CheckpointSaved, EpochEnded, Event, StepLogged, ValidationFigures
from fasttrain.telemetry.metrics_csv import read_metrics

TIMED = {"seconds", "patches_per_second", "wait_share"}


class When:
    """An observer that does something at a moment."""

    def __init__(self, moment, act) -> None:
        self.moment, self.act = moment, act

    def on_event(self, event: Event) -> None:
        if self.moment(event):
            self.act()

    def close(self) -> None: ...


def at_step(step: int):
    return lambda event: isinstance(event, StepLogged) and event.step == step


def losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "StepLogged"}


def rows(run: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMED} for row in read_metrics(run / "metrics.csv")]


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return read_checkpoint(run / f"checkpoints/{name}.pt")["network"]


def crash() -> None:
    raise RuntimeError("the power went")


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": {"kind": "sgd", "learning_rate": 0.02, "momentum": 0.9}, "schedule": {"kind": "poly"}},
        {"optimizer": {"kind": "adamw", "learning_rate": 3e-3}, "training__accumulate": 2},
        {
            "network": {"kind": "unet", "features": [4, 8], "strides": [2], "norm": "batch", "dropout": 0.2},
            "training__accumulate": 2,
        },
        {"network__deep_supervision": 1, "loss": {"kind": "dice"}, "data__workers": 1},
    ],
    ids=["sgd", "adamw and accumulation", "unet with batch norm", "deep supervision with a worker"],
)
def test_2n_steps_are_n_and_n(more: dict, tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(training__epochs=2, **more)
    whole = train(recipe, data=phantoms, run=tmp_path / "whole", device="cpu").run
    stop = StopRequest()
    watcher = When(at_step(4), lambda: stop.ask("a test", 143))
    broken = train(recipe, data=phantoms, run=tmp_path / "broken", device="cpu", observers=[watcher], stop=stop).run
    torch.manual_seed(123)  # whatever the process has drawn since
    resume(broken)
    assert losses(broken) == losses(whole)
    assert len(losses(whole)) == 10
    assert rows(broken) == rows(whole)
    one, other = weights(broken), weights(whole)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_of_a_crashed_run_that_no_checkpoint_knows_go(
    tiny, phantoms: Path, whole_run: RunResult, tmp_path
) -> None:
    """The checkpoint is of epoch 1 (`best`, which may be of a later one, is removed), rows of epochs 2 and 3 are on the disk."""
    run = tmp_path / "run"
    recipe = tiny(output__checkpoint_every="4 steps")
    kept: dict[str, bytes] = {}
    last = run / "checkpoints/last.pt"

    def keep() -> None:
        kept.setdefault("last", last.read_bytes())

    of_step_eight = When(lambda event: isinstance(event, CheckpointSaved) and event.step == 8, keep)
    with pytest.raises(RuntimeError, match="the power went"):
        train(recipe, data=phantoms, run=run, device="cpu", observers=[of_step_eight, When(at_step(18), crash)])
    assert [row["epoch"] for row in rows(run)] == [1, 2, 3]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["error"]) == ("failed", 1, "the power went")
    last.write_bytes(kept["last"])
    (run / "checkpoints/best.pt").unlink()
    seen: list[list[dict]] = []
    began = When(lambda event: type(event).__name__ == "RunStarted", lambda: seen.append(rows(run)))
    resume(run, observers=[began])
    assert [row["epoch"] for row in seen[0]] == [1]
    assert rows(run) == rows(whole_run.run)
    assert losses(run) == losses(whole_run.run)


def crash_before_saving(monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """At the end of that epoch, when its row is written."""
    save = Saver.save_epoch

    def crashing(saver: Saver, *given: bool) -> None:
        if saver.state.progress.epoch == epoch:
            crash()
        save(saver, *given)

    monkeypatch.setattr(Saver, "save_epoch", crashing)


def test_a_crash_between_a_row_and_its_checkpoint_writes_no_row_twice(
    tiny, phantoms, whole_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    before_the_row = When(lambda event: isinstance(event, EpochEnded) and event.epoch == 3, crash)
    with pytest.raises(RuntimeError, match="the power went"):
        train(
            tiny(output__checkpoint_every="7 steps"), data=phantoms, run=run, device="cpu", observers=[before_the_row]
        )
    resume(run)
    assert rows(run) == rows(whole_run.run)
    assert losses(run) == losses(whole_run.run)
    other = tmp_path / "other"
    with monkeypatch.context() as patch:
        crash_before_saving(patch, 3)
        with pytest.raises(RuntimeError, match="the power went"):
            train(tiny(), data=phantoms, run=other, device="cpu")
    assert [row["epoch"] for row in rows(other)] == [1, 2, 3]
    assert read_checkpoint(other / "checkpoints/last.pt")["progress"]["epoch"] == 2
    resume(other)
    assert rows(other) == rows(whole_run.run)


def test_the_row_of_an_epoch_that_the_checkpoint_has_open_is_written_anew(
    tiny, phantoms, whole_run, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped on an epoch's last step; the resume writes its row and crashes before `last` knows that it is closed."""
    run, stop = tmp_path / "run", StopRequest()
    watcher = When(at_step(5), lambda: stop.ask("a test", 143))
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[watcher], stop=stop)
    with monkeypatch.context() as patch:
        crash_before_saving(patch, 1)
        with pytest.raises(RuntimeError, match="the power went"):
            resume(run)
    assert [row["step"] for row in rows(run)] == [5]
    assert read_checkpoint(run / "checkpoints/last.pt")["progress"]["step_in_epoch"] == 5
    resume(run)
    assert rows(run) == rows(whole_run.run)


def test_a_run_that_diverges_ends_with_7_and_keeps_sound_weights(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(
        optimizer={"kind": "sgd", "learning_rate": 1e30},
        schedule={"kind": "constant"},
        training__epochs=20,
        output__keep_every=1,
        output__keep=99,
    )
    with pytest.raises(DivergedError, match=r"losses in a row were not finite.*lower optimizer.learning_rate"):
        train(recipe, data=phantoms, run=tmp_path / "run", device="cpu")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 7)
    assert 20 <= summary["steps"] <= 27
    files = sorted((tmp_path / "run/checkpoints").glob("*.pt"))
    assert files
    for path in files:
        assert all(torch.isfinite(tensor).all() for tensor in read_checkpoint(path)["network"].values())
    # An epoch without a finite loss has an empty cell or "nan", never a number
    table = rows(tmp_path / "run")
    assert table[-1]["train_loss"] is None or math.isnan(table[-1]["train_loss"])
    json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[-1])


def test_a_state_that_is_not_finite_is_never_saved(tiny, phantoms: Path, tmp_path: Path) -> None:
    """A weight that goes bad behind the step's back: the former checkpoint stands, and that is said."""
    import fasttrain.engine.build as build

    networks = []
    original = build.build_network

    def noted(*args: object):
        networks.append(original(*args))
        return networks[-1]

    def poison() -> None:
        with torch.no_grad():
            next(networks[-1].parameters()).view(-1)[0] = float("nan")

    heard: list[str] = []

    class Listener:
        def on_event(self, event: Event) -> None:
            heard.append(getattr(event, "text", ""))

        def close(self) -> None: ...

    patch = pytest.MonkeyPatch()
    patch.setattr(build, "build_network", noted)
    try:
        # Such a weight makes every later loss NaN, and a run must not end as done on those
        with pytest.raises(DivergedError, match="the last 7 of 15 steps were not finite"):
            train(
                tiny(training__epochs=3),
                data=phantoms,
                run=tmp_path / "run",
                device="cpu",
                observers=[Listener(), When(at_step(8), poison)],
            )
    finally:
        patch.undo()
    assert any("not renewed, since a weight is not finite" in text for text in heard)
    state = read_checkpoint(tmp_path / "run/checkpoints/last.pt")
    assert state["progress"]["step"] == 5
    assert all(torch.isfinite(tensor).all() for tensor in state["network"].values())


@pytest.mark.parametrize(
    ("former", "now", "better"),
    [
        (None, 0.1, True),
        (0.2, 0.3, True),
        (0.2, 0.2, False),
        (0.2, None, False),
        (None, None, False),
        (None, float("nan"), False),
        (0.2, float("nan"), False),
    ],
)
def test_only_a_number_moves_the_best(former: float | None, now: float | None, better: bool) -> None:
    fit = Fit.__new__(Fit)
    fit.recipe = resolve("demo").recipe
    fit.progress = type("Progress", (), {"best_value": former})()
    assert fit._is_best(ValidationFigures(now, {}, {})) is better
    assert fit._is_best(None) is False


@pytest.mark.parametrize(
    ("former", "now", "better"),
    [
        (None, 9.0, True),
        (3.0, 2.9, True),
        (3.0, 3.0, False),
        (3.0, 3.1, False),
        (3.0, None, False),
        (3.0, float("nan"), False),
    ],
)
def test_a_lower_error_of_the_dose_moves_the_best(former: float | None, now: float | None, better: bool) -> None:
    fit = Fit.__new__(Fit)
    fit.recipe = resolve("openkbp").recipe
    fit.progress = type("Progress", (), {"best_value": former})()
    assert fit._is_best(ValidationFigures(None, {}, {}, dose_score=now)) is better


@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_a_worker_killed_at_any_moment_is_one_sentence(pause: float, tiny, phantoms: Path, tmp_path: Path) -> None:
    """torch raises it while the trainer waits for a batch, or in the middle of something else (the pause)."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def kill() -> None:
        workers = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        os.kill(workers[0].pid, signal.SIGKILL)
        time.sleep(pause)

    with pytest.raises(MachineError, match=r"a data loader worker ended: .*lower data.workers \(now 2\)"):
        train(
            tiny(data__workers=2), data=phantoms, run=tmp_path / "run", device="cpu", observers=[When(at_step(7), kill)]
        )
    assert json.loads((tmp_path / "run/summary.json").read_text())["exit_code"] == 4
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


def test_a_run_whose_worker_was_killed_goes_on(tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def kill() -> None:
        workers = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        os.kill(workers[-1].pid, signal.SIGKILL)
        time.sleep(0.3)

    with pytest.raises(MachineError):
        train(
            tiny(data__workers=2), data=phantoms, run=tmp_path / "run", device="cpu", observers=[When(at_step(8), kill)]
        )
    resume(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole_run.run)
    assert rows(tmp_path / "run") == rows(whole_run.run)


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from tiny_recipe import TINY
    from fasttrain import load_recipe, train
    recipe = load_recipe("demo", {{**TINY, "output.checkpoint_every": "3 steps", "data.workers": 1}})
    class Told:
        def on_event(self, event):
            if type(event).__name__ == "StepLogged":
                print(event.step, flush=True)
        def close(self): ...
    train(recipe, data={data!r}, run={run!r}, device="cpu", observers=[Told()])
"""


def test_a_run_killed_outright_goes_on_as_if_unbroken(phantoms: Path, whole_run: RunResult, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tests = Path(__file__).parent.parent
    text = textwrap.dedent(SCRIPT).format(tests=str(tests), data=str(phantoms), run=str(run))
    trainer = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=tests.parent)
    try:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if int(line) == 12:
                break
    finally:
        trainer.kill()
        trainer.wait()
    assert not (run / "summary.json").exists()
    assert resume(run).summary["status"] == "done"
    assert losses(run) == losses(whole_run.run)
    assert rows(run) == rows(whole_run.run)


@pytest.mark.parametrize(("kind", "other"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_a_resume_with_another_optimizer_is_refused(
    kind: str, other: str, tiny, phantoms: Path, tmp_path: Path
) -> None:
    run, stop = tmp_path / "run", StopRequest()
    watcher = When(at_step(2), lambda: stop.ask("a test", 143))
    train(tiny(optimizer={"kind": kind}), data=phantoms, run=run, device="cpu", observers=[watcher], stop=stop)
    (run / "recipe.yaml").write_text(tiny(optimizer={"kind": other}).as_yaml())
    with pytest.raises(RecipeError, match=f"optimizer.kind: a run that goes on keeps it at {kind}, found {other}"):
        resume(run)
    # Of a run that keeps no copy of its recipe, the checkpoint itself tells
    plan = json.loads((run / "plan.json").read_text())
    del plan["recipe"]
    (run / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(RecipeError, match=r"last.pt holds the state of another optimizer.*optimizer.kind"):
        resume(run)


def test_what_cannot_be_resumed_is_one_sentence(tiny, phantoms: Path, tmp_path: Path) -> None:
    run, stop = tmp_path / "run", StopRequest()
    watcher = When(at_step(2), lambda: stop.ask("a test", 143))
    train(tiny(), data=phantoms, run=run, device="cpu", observers=[watcher], stop=stop)
    with pytest.raises(RecipeError, match="holds no run"):
        resume(tmp_path / "nothing")
    (run / "environment.json").write_text("{")
    with pytest.raises(StorageError, match="environment.json is damaged: it is no JSON document"):
        resume(run)


def test_a_stop_on_the_very_last_step_is_closed_by_the_resume(tiny, phantoms, whole_run: RunResult, tmp_path) -> None:
    run, stop = tmp_path / "run", StopRequest()
    watcher = When(at_step(20), lambda: stop.ask("a test", 143))
    first = train(tiny(), data=phantoms, run=run, device="cpu", observers=[watcher], stop=stop)
    assert (first.summary["status"], first.summary["stopped_by"]) == ("stopped", "a test")
    assert [row["epoch"] for row in rows(run)] == [1, 2, 3]
    assert resume(run).summary["status"] == "done"
    assert rows(run) == rows(whole_run.run)


def test_a_stop_asked_for_after_all_was_done_is_done(tiny, phantoms: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    last = When(lambda event: isinstance(event, EpochEnded) and event.epoch == 2, lambda: stop.ask("late", 143))
    result = train(
        tiny(training__epochs=2), data=phantoms, run=tmp_path / "run", device="cpu", observers=[last], stop=stop
    )
    assert (result.summary["status"], result.exit_code) == ("done", 0)


def test_a_plane_trains_and_validates(tmp_path: Path, tiny) -> None:
    """A 2D recipe over images of (X, Y, 1), to the files' own grids and back."""
    import nibabel as nib
    import numpy as np

    rng = np.random.default_rng(0)
    for number in range(5):
        image = rng.normal(0, 0.1, (40, 34, 1)).astype(np.float32)
        label = np.zeros(image.shape, np.uint8)
        label[8 + number : 24, 10:22] = 1
        for folder, values in (("images", image + label), ("labels", label)):
            (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values, np.diag([0.8, 0.8, 3, 1])), tmp_path / f"data/{folder}/p{number}.nii.gz")
    recipe = tiny(
        data__source={"kind": "folders"},
        data__classes={1: "square"},
        data__split={"kind": "last", "validation": 2},
        data__spacing=[1.0, 1.0],
        data__orientation=None,
        data__intensity={"kind": "none"},
        patch__size=[16, 16],
        augment__flip={"probability": 0.5, "axes": [0, 1]},
        optimizer={"kind": "adamw", "learning_rate": 2e-2},
        network__dropout=0.0,
        training__epochs=6,
        validation__hd95=True,
    )
    result = train(recipe, data=tmp_path / "data", run=tmp_path / "run", device="cpu")
    table = read_metrics(result.run / "metrics.csv")
    assert result.summary["best"]["value"] > 0.8
    assert table[-1]["val_hd95"] is not None


def test_a_norm_that_sees_one_voxel_is_no_bug_of_ours(tiny) -> None:
    """Networks by name tell it in their first step."""
    recipe = tiny(network={"kind": "monai", "name": "VNet"}, training__batch_size=1).recipe
    told = "network.name: a norm layer .* raise patch.size or training.batch_size"
    with pytest.raises(RecipeError, match=told), explaining(recipe):
        torch.nn.BatchNorm3d(4)(torch.zeros(1, 4, 1, 1, 1))
    with pytest.raises(ValueError, match="another"), explaining(recipe):
        raise ValueError("another")
