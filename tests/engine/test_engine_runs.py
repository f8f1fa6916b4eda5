"""Whole runs: what they leave behind, and that an interruption changes nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fasttrain import train
from fasttrain.delivery import open_run
from fasttrain.engine.run import RunResult, prepare, resume
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import DataError, MachineError, RecipeError, StorageError
from fasttrain.telemetry.event_log import read_events
from fasttrain.telemetry.events import EpochEnded, Event, Progress, StepLogged
from fasttrain.telemetry.metrics_csv import read_metrics

TIMED = {"seconds", "patches_per_second", "wait_share"}


class StopAt:
    """An observer that asks for a stop at a moment."""

    def __init__(self, stop: StopRequest, moment) -> None:
        self.stop, self.moment = stop, moment

    def on_event(self, event: Event) -> None:
        if self.moment(event):
            self.stop.ask("a test", 143)

    def close(self) -> None: ...


def losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "StepLogged"}


def rows(run: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMED} for row in read_metrics(run / "metrics.csv")]


def same_weights(one: Path, other: Path) -> bool:
    first, second = (torch.load(path / "checkpoints/last.pt", weights_only=True)["network"] for path in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def stopped(recipe, data: Path, run: Path, moment) -> RunResult:
    stop = StopRequest()
    return train(recipe, data=data, run=run, device="cpu", stop=stop, observers=[StopAt(stop, moment)])


def test_a_run_leaves_what_the_readme_says(whole_run: RunResult) -> None:
    run = whole_run.run
    for name in ("recipe.yaml", "environment.json", "plan.json", "metrics.csv", "events.jsonl", "summary.json"):
        assert (run / name).is_file()
    assert (run / "checkpoints/last.pt").is_file()
    assert (run / "checkpoints/best.pt").is_file()
    summary = json.loads((run / "summary.json").read_text())
    assert summary == whole_run.summary
    assert summary["status"] == "done"
    assert summary["stopped_by"] is None
    assert summary["exit_code"] == whole_run.exit_code == 0
    assert summary["best"]["metric"] == "val_dice"
    assert 0 < summary["seconds"]["to_first_step"] < summary["seconds"]["total"]
    start = summary["seconds"]["start"]
    assert list(start) == ["import", "device", "check", "plan", "read", "build", "first_step"]
    assert all(seconds > 0 for seconds in start.values())
    assert sum(start.values()) == pytest.approx(summary["seconds"]["to_first_step"], abs=1e-3)
    told = [event for event in read_events(run / "events.jsonl") if event["event"] == "FirstStep"]
    assert [event["parts"] for event in told] == [start]
    assert summary["steps"] == 20
    table = read_metrics(run / "metrics.csv")
    assert [row["epoch"] for row in table] == [1, 2, 3, 4]
    assert [row["step"] for row in table] == [5, 10, 15, 20]
    assert sorted(losses(run)) == list(range(1, 21))
    scored = [row["val_dice"] for row in table]
    assert summary["best"]["value"] == max(scored)
    assert table[0]["train_loss"] == pytest.approx(sum(losses(run)[step] for step in range(1, 6)) / 5)
    plan = json.loads((run / "plan.json").read_text())
    assert all(decision["reason"] for decision in plan["decisions"])
    assert len(plan["cases"]["training"]) == 4


@pytest.mark.parametrize("step", [3, 5, 12])
def test_stopped_and_resumed_is_unbroken(step: int, tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path) -> None:
    """In the middle of an epoch and on its last step, dropout and all."""
    moment = lambda event: isinstance(event, StepLogged) and event.step == step  # noqa: E731
    first = stopped(tiny(), phantoms, tmp_path / "run", moment)
    assert first.exit_code == 143
    assert first.summary["status"] == "stopped"
    assert first.summary["steps"] == step
    second = resume(tmp_path / "run")
    assert second.exit_code == 0
    assert losses(tmp_path / "run") == losses(whole_run.run)
    assert rows(tmp_path / "run") == rows(whole_run.run)
    assert same_weights(tmp_path / "run", whole_run.run)


def test_a_stop_while_validating_closes_the_epoch_once(tiny, phantoms, whole_run: RunResult, tmp_path: Path) -> None:
    seen: list[int] = []

    def moment(event: Event) -> bool:
        if isinstance(event, EpochEnded):
            seen.append(event.epoch)
        return isinstance(event, Progress) and event.what == "validating" and len(seen) == 1

    assert stopped(tiny(), phantoms, tmp_path / "run", moment).summary["epochs"] == 1
    resume(tmp_path / "run")
    assert rows(tmp_path / "run") == rows(whole_run.run)
    assert losses(tmp_path / "run") == losses(whole_run.run)


def test_a_stop_while_reading_cases_begins_again_the_same(tiny, phantoms, whole_run: RunResult, tmp_path: Path) -> None:
    reading = lambda event: isinstance(event, Progress) and event.what == "reading training cases"  # noqa: E731
    first = stopped(tiny(), phantoms, tmp_path / "run", reading)
    assert first.exit_code == 143
    assert first.summary["steps"] == 0
    resume(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole_run.run)


def test_a_stop_while_files_are_checked_leaves_no_run(tiny, phantoms, tmp_path: Path) -> None:
    checking = lambda event: isinstance(event, Progress) and event.what == "checking files"  # noqa: E731
    with pytest.raises(Stopped):
        stopped(tiny(), phantoms, tmp_path / "run", checking)
    assert not (tmp_path / "run").exists()


def test_a_stop_while_steps_are_measured_leaves_no_run(tiny, phantoms, tmp_path: Path) -> None:
    """A limit, which nothing ends from beside, must not wait for steps that are slow on a busy machine."""
    measured: list[int] = []

    def measuring(event: Event) -> bool:
        found = isinstance(event, Progress) and event.what == "measuring a training step"
        measured.extend([1] if found else [])
        return found

    with pytest.raises(Stopped):
        stopped(
            tiny(acceleration__amp="auto", acceleration__channels_last="auto"), phantoms, tmp_path / "run", measuring
        )
    assert len(measured) == 1
    assert not (tmp_path / "run").exists()


def test_workers_and_caches_change_nothing(tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path) -> None:
    result = train(tiny(data__workers=2, data__cache__kind="none"), data=phantoms, run=tmp_path / "run", device="cpu")
    assert losses(result.run) == losses(whole_run.run)
    assert rows(result.run) == rows(whole_run.run)


def test_checkpoints_by_steps_and_periodic_ones(tiny, phantoms: Path, tmp_path: Path) -> None:
    recipe = tiny(output__checkpoint_every="2 steps", output__keep_every=1, output__keep=2)
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cpu")
    assert sorted(path.name for path in (result.run / "checkpoints").glob("epoch_*")) == [
        "epoch_0003.pt",
        "epoch_0004.pt",
    ]
    events = [json.loads(line) for line in (result.run / "events.jsonl").read_text().splitlines()]
    saved = [
        event["step"] for event in events if event["event"] == "CheckpointSaved" and event["path"].endswith("last.pt")
    ]
    assert saved == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]


def test_a_finished_run_is_left_alone(whole_run: RunResult) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole_run.run.rglob("*")}
    assert resume(whole_run.run).summary == whole_run.summary
    assert {path: path.stat().st_mtime_ns for path in whole_run.run.rglob("*")} == before


def test_a_damaged_last_checkpoint_falls_back_and_ends_the_same(tiny, phantoms, whole_run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    moment = lambda event: isinstance(event, StepLogged) and event.step == 13  # noqa: E731
    stopped(tiny(output__keep_every=1), phantoms, run, moment)
    last = run / "checkpoints/last.pt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    heard: list[str] = []

    class Listener:
        def on_event(self, event: Event) -> None:
            heard.append(getattr(event, "text", ""))

        def close(self) -> None: ...

    resume(run, observers=[Listener()])
    told = " ".join(heard)
    assert "last.pt is damaged" in told
    assert "holds epoch 2, step 10" in told
    assert losses(run) == losses(whole_run.run)
    assert rows(run) == rows(whole_run.run)


def test_no_sound_checkpoint_is_refused_and_nothing_touched(tiny, phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(tiny(), phantoms, run, lambda event: isinstance(event, StepLogged) and event.step == 7)
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"")
    before = (run / "metrics.csv").read_text()
    with pytest.raises(StorageError, match="damaged"):
        resume(run)
    assert (run / "metrics.csv").read_text() == before


def test_other_cases_are_refused(tiny, phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(tiny(), phantoms, run, lambda event: isinstance(event, StepLogged) and event.step == 3)
    plan = json.loads((run / "plan.json").read_text())
    plan["cases"]["training"][0] = "another"
    (run / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match="not those the run began with"):
        resume(run)


def test_another_network_is_refused_by_layer_and_shape(tiny, phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(tiny(), phantoms, run, lambda event: isinstance(event, StepLogged) and event.step == 3)
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("features: [4, 8, 8]", "features: [4, 8, 16]"))
    with pytest.raises(RecipeError, match="has shape"):
        resume(run)


def test_a_moved_run_and_moved_data_go_on(tiny, phantoms: Path, whole_run: RunResult, tmp_path: Path) -> None:
    stopped(tiny(), phantoms, tmp_path / "run", lambda event: isinstance(event, StepLogged) and event.step == 8)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    shutil.copytree(phantoms, tmp_path / "data")
    resume(tmp_path / "elsewhere", data=tmp_path / "data")
    assert losses(tmp_path / "elsewhere") == losses(whole_run.run)


def test_a_folder_that_holds_a_run_is_refused_before_anything_slow(tiny, whole_run: RunResult) -> None:
    with pytest.raises(RecipeError, match="already holds a run"):
        train(tiny(), data="/nowhere", run=whole_run.run)


def test_two_runs_that_nobody_named_begin_in_one_second(tiny, phantoms: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    taken = Path("runs/demo-1")
    # Free when this run looks; the other one makes it while this one checks its cases
    monkeypatch.setattr("fasttrain.engine.run.new_run_path", lambda name: taken)
    stop = StopRequest()

    class OtherBegins:
        def on_event(self, event: Event) -> None:
            taken.mkdir(parents=True, exist_ok=True)
            (taken / "recipe.yaml").write_text("of another run")
            if isinstance(event, StepLogged):
                stop.ask("a test", 143)

        def close(self) -> None: ...

    result = train(tiny(), data=phantoms, device="cpu", observers=[OtherBegins()], stop=stop)
    assert result.run != taken
    assert result.run.parent == Path("runs")
    assert result.summary["steps"] >= 1
    assert [path.name for path in taken.iterdir()] == ["recipe.yaml"]


def test_faulty_data_begin_no_run(tiny, tmp_path: Path, phantoms: Path) -> None:
    shutil.copytree(phantoms, tmp_path / "data")
    victim = sorted((tmp_path / "data/labelsTr").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:-50])  # the header is whole
    with pytest.raises(DataError, match=victim.name):
        train(tiny(data__source={"kind": "decathlon"}), data=tmp_path / "data", run=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there(tiny, phantoms: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(MachineError, match="cuda"):
        train(tiny(), data=phantoms, run=tmp_path / "run", device="cuda")
    assert not (tmp_path / "run").exists()


def test_fp16_on_a_cpu_is_refused(tiny, phantoms: Path) -> None:
    with pytest.raises(MachineError, match="fp16 needs a GPU"):
        prepare(tiny(acceleration__amp="fp16").recipe, phantoms, "cpu")


def test_a_dry_run_decides_and_writes_nothing(tiny, phantoms: Path) -> None:
    prepared = prepare(tiny(acceleration__amp="auto", acceleration__channels_last="auto").recipe, phantoms, "cpu")
    assert prepared.plan.amp in ("bf16", "off")
    measured = {decision.name: decision.reason for decision in prepared.plan.decisions}
    assert measured["amp"].startswith("measured")
    assert "NDHWC" in measured["channels_last"]
    assert "NCDHW" in measured["channels_last"]
    sizes = prepared.plan.sizes
    assert (sizes.training_cases, sizes.validation_cases, sizes.total_steps) == (4, 2, 20)


@pytest.mark.parametrize("name", ["environment.json", "plan.json"])
@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"hardware": 3, "cases": []}'])
def test_a_damaged_record_is_one_sentence(name: str, content: str, whole_run: RunResult, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run.run, run)
    (run / name).write_text(content)
    with pytest.raises(StorageError, match=name):
        open_run(run, "cpu")
    (run / "summary.json").unlink()
    with pytest.raises(StorageError, match=name):
        resume(run)
