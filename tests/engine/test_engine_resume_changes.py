"""Resuming with something changed: the batch, the epochs, the folder, the device, what may not change; and what is told of it."""

import json
import math
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fasttrain import train
from fasttrain.checkpoints import read_checkpoint, write_checkpoint
from fasttrain.engine.optimisation.optim import learning_rate
from fasttrain.engine.planning.sizes import Sizes
from fasttrain.engine.resuming.auto import asked_otherwise, run_of_command
from fasttrain.engine.resuming.carrying_on import carry_on
from fasttrain.engine.resuming.changes import as_values, changes_between
from fasttrain.engine.resuming.going_on import look_at
from fasttrain.engine.run import RunResult, resume
from fasttrain.engine.state import Progress
from fasttrain.engine.step import Step
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.recipe import resolve
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import newest_unfinished, runs_by_age
from fasttrain.telemetry.events import EpochEnded, Event, Message, RunStarted, StepLogged
from fasttrain.telemetry.metrics_csv import read_metrics

A_PASS = {
    "training__iterations_per_epoch": None,
    "data__samples_per_case": 3,
    "training__epochs": 3,
    "validation__every": 3,
}
"""Epochs of 12 patches of four cases."""


class Listener:
    """Keeps what a run tells, and asks for a stop after a step."""

    def __init__(self, step: int | None = None) -> None:
        self.step, self.stop, self.events = step, StopRequest(), []

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StepLogged) and event.step == self.step:
            self.stop.ask("a test", 143)

    def close(self) -> None: ...

    @property
    def told(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Message))

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Message) and event.level == "warning"]

    @property
    def rates(self) -> dict[int, float]:
        return {event.step: event.learning_rate for event in self.events if isinstance(event, StepLogged)}


def stopped(recipe, data: Path, run: Path, step: int) -> Path:
    listener = Listener(step)
    train(recipe, data=data, run=run, device="cpu", stop=listener.stop, observers=[listener])
    return run


def went_on(run: Path, *assignments: str, step: int | None = None, **more) -> Listener:
    listener = Listener(step)
    resume(run, assignments=assignments, observers=[listener], stop=listener.stop, **more)
    return listener


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "run.lock"}


@pytest.fixture(scope="module")
def interrupted(tiny, phantoms: Path, tmp_path_factory) -> Path:
    """A run that ended after seven of its 20 steps; to be copied, not changed."""
    return stopped(tiny(), phantoms, tmp_path_factory.mktemp("interrupted") / "run", 7)


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


@pytest.mark.parametrize(("step", "workers"), [(1, 2), (5, 0), (7, 0)])
def test_with_another_batch_every_case_is_seen_once_an_epoch(
    step: int, workers: int, tiny, phantoms, tmp_path, monkeypatch
) -> None:
    """Also where what is left of the open epoch is no multiple of the new batch: 2 of 12 patches, then batches of 4."""
    seen: list[tuple[int, str]] = []
    whole_pass = Step._pass

    def noted(self, batch):
        seen.extend(zip(batch.positions, batch.names, strict=True))
        return whole_pass(self, batch)

    monkeypatch.setattr(Step, "_pass", noted)
    run = stopped(tiny(**A_PASS), phantoms, tmp_path / "run", step)
    listener = went_on(run, "training.batch_size=4", f"data.workers={workers}")
    assert [position for position, _ in seen] == list(range(36))
    for epoch in range(3):
        names = Counter(name for _, name in seen[12 * epoch : 12 * (epoch + 1)])
        assert list(names.values()) == [3, 3, 3, 3]
    left = 12 - 2 * step % 12
    steps = step + math.ceil(left / 4) + 3 * (2 - step // 6)
    rows = read_metrics(run / "metrics.csv")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[-1]["step"] == steps == RunFolder(run).read_summary()["steps"]
    assert f"effective batch 2 → 4: the {2 * step} patches seen carry on" in listener.told
    assert f"{left} patches left" in listener.told
    # One resume more has nothing to convert
    assert went_on(run).told == ""


@pytest.mark.gpu
def test_with_another_batch_on_a_gpu(tiny, phantoms: Path, tmp_path: Path) -> None:
    """The short step comes before the graph is recorded, and changes nothing about that."""
    exact = {"network__dropout": 0.0, "acceleration__tf32": "off"}
    losses = []
    for device, graphs in (("cpu", "off"), ("cuda", "off"), ("cuda", "on")):
        recipe = tiny(**A_PASS, **exact, acceleration__cuda_graphs=graphs)
        run, listener = tmp_path / f"{device}-{graphs}", Listener(1)
        train(recipe, data=phantoms, run=run, device=device, stop=listener.stop, observers=[listener])
        assert "of which the first takes 2" in (went := went_on(run, "training.batch_size=4")).told
        assert went.warnings == []
        losses.append([row["train_loss"] for row in read_metrics(run / "metrics.csv")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[2] == pytest.approx(losses[1], rel=1e-2)


def test_a_short_step_is_a_step_of_that_size(tiny, phantoms: Path, tmp_path: Path) -> None:
    """The first step after the change takes the two odd patches: its loss is that of the two-patch step that would have come."""
    run = stopped(tiny(**A_PASS, network__dropout=0.0), phantoms, tmp_path / "run", 1)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    as_it_was, changed = went_on(run, step=2), went_on(other, "training.batch_size=4", step=2)
    losses = [next(event.loss for event in one.events if isinstance(event, StepLogged)) for one in (as_it_was, changed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("policy", "growth", "accumulate"),
    [("keep_lr", 1, 1), ("scale_linear", 2, 1), ("scale_sqrt", math.sqrt(2), 1), ("keep_effective", 1, None)],
)
def test_the_batch_policy_decides_the_learning_rate(policy, growth, accumulate, tiny, phantoms, tmp_path) -> None:
    more = {"training__iterations_per_epoch": 9, "schedule": {"kind": "constant"}, "training__accumulate": 2}
    recipe = tiny(training__batch_policy=policy, **more)
    run = stopped(recipe, phantoms, tmp_path / "run", 2)
    listener = went_on(run, "training.batch_size=4", step=4)
    now = resolve(str(run / "recipe.yaml")).recipe
    assert now.training.batch_size == 4
    assert now.training.accumulate == (2 if accumulate else 1)
    rate = growth * recipe.recipe.optimizer.learning_rate
    assert list(listener.rates.values()) == pytest.approx([rate] * len(listener.rates), rel=1e-5)
    if policy == "keep_effective":
        assert "effective batch" not in listener.told
        assert sorted(listener.rates) == [3, 4]
    else:
        assert f"training.batch_policy: {policy}" in listener.told
        assert "learning rate: " in listener.told
    # What is set besides stands
    assert "learning_rate" not in listener.told.partition("\n")[0] or growth != 1


def test_a_rate_that_is_set_beside_the_batch_stands(run: Path) -> None:
    went_on(run, "training.batch_policy=scale_linear", "training.batch_size=4", "optimizer.learning_rate=1e-4", step=8)
    assert resolve(str(run / "recipe.yaml")).recipe.optimizer.learning_rate == 1e-4


def test_a_change_whose_session_left_no_checkpoint_is_made_again(interrupted: Path, run: Path) -> None:
    """The records say 4, the newest checkpoint is of a batch of 2."""
    went_on(run, "training.batch_size=4", step=8)
    shutil.copy(interrupted / "checkpoints/last.pt", run / "checkpoints/last.pt")
    listener = went_on(run, step=8)
    assert "effective batch 2 → 4" in listener.told
    assert "effective batch" not in went_on(run, step=9).told


@given(
    length=st.integers(1, 60),
    batches=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    epoch=st.integers(0, 5),
    taken=st.integers(0, 60),
)
def test_an_open_epoch_ends_at_the_sample_where_it_would_have(length: int, batches, epoch: int, taken: int) -> None:
    old, new = batches
    steps = math.ceil(length / old)
    taken = min(taken, steps)
    progress = Progress(
        step=epoch * steps + taken, epoch=epoch, step_in_epoch=taken, position=old * (epoch * steps + taken)
    )
    progress.effective_batch, progress.epoch_steps = old, steps
    sizes = Sizes(1, 1, 0, 1, new, 1, new, math.ceil(length / new), 6, 6 * math.ceil(length / new), 0)
    carry_on(progress, sizes)
    whole = progress.epoch_steps - progress.step_in_epoch
    if taken:
        end = progress.position + whole * new - (new - progress.short_samples if progress.short_samples else 0)
        assert end == old * steps * (epoch + 1)
    else:
        assert whole == sizes.steps_per_epoch
    assert 0 <= progress.short_samples < new
    # At the end of the open epoch the schedule is where it is in a run that never had another batch
    assert progress.step + whole + progress.schedule_shift == (epoch + 1) * sizes.steps_per_epoch
    again = Progress(**vars(progress))
    carry_on(again, sizes)
    assert again == progress


def test_a_finished_run_is_extended(tiny, phantoms: Path, tmp_path: Path) -> None:
    done = train(tiny(training__epochs=2), data=phantoms, run=tmp_path / "run", device="cpu")
    assert done.exit_code == 0
    with pytest.raises(RecipeError, match="has trained 2 epochs already; set it above that"):
        resume(done.run, assignments=["training.epochs=2"])
    assert went_on(done.run).events == []
    listener = went_on(done.run, "training.epochs=3")
    assert "training.epochs 2 → 3" in listener.told
    assert "the schedule (cosine) ends after 5 more steps" in listener.told
    # The schedule is the one that three epochs have, from where the run is in it
    rate = learning_rate(tiny().recipe.schedule, tiny().recipe.optimizer.learning_rate, 15)
    assert listener.rates == {step: rate(step - 1) for step in range(11, 16)}
    assert [row["epoch"] for row in read_metrics(done.run / "metrics.csv")] == [1, 2, 3]


def test_a_run_that_early_stopping_ended_is_not_ended_again_at_once(tiny, phantoms: Path, tmp_path: Path) -> None:
    stopping = {"patience": 1, "threshold": 1.0}
    done = train(tiny(training__early_stopping=stopping), data=phantoms, run=tmp_path / "run", device="cpu")
    assert done.summary["epochs"] == 2
    with pytest.raises(RecipeError, match="was ended by early stopping after epoch 2.*early_stopping=null"):
        resume(done.run, assignments=["training.epochs=5"])
    assert went_on(done.run, "training.early_stopping=null", step=11).rates


def test_a_changed_network_is_refused_by_layer_and_shape(run: Path) -> None:
    before = files_of(run)
    with pytest.raises(RecipeError) as caught:
        resume(run, assignments=["network.features=[4,16,8]"])
    assert "network.features: a run that goes on keeps it at [4, 8, 8], found [4, 16, 8]" in caught.value.faults[0]
    layers = [fault for fault in caught.value.faults if "layer " in fault]
    assert len(layers) == 3
    assert "has shape (8, 4, 3, 3, 3), the recipe's network (16, 4, 3, 3, 3)" in layers[0]
    assert "more of its" in caught.value.faults[-1]
    assert files_of(run) == before


def test_all_that_cannot_change_is_refused_at_once_with_reasons(run: Path) -> None:
    before = files_of(run)
    refused = {
        "optimizer.kind=sgd": "another optimizer has another",
        "training.seed=3": "all draws hang on it",
        "data.split.validation=1": "would be scored",
        "data.samples_per_case=5": "seen twice in an epoch",
        "data.cache.kind=smart": "an order of its own",
        "data.spacing=[3,3,3]": "prepared as they were",
        "network.norm=batch": "in the network as it was",
        "validation.hd95=true": "other columns",
    }
    with pytest.raises(RecipeError) as caught:
        resume(run, assignments=[*refused, "training.epochs=9"])
    for assignment, reason in refused.items():
        key = assignment.partition("=")[0]
        assert any(fault.startswith(f"--set {key}: ") and reason in fault for fault in caught.value.faults), key
    assert "training.epochs" not in "".join(caught.value.faults)
    assert files_of(run) == before
    # An edited recipe.yaml is judged alike
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("1: liver", "1: Leber"))
    with pytest.raises(
        RecipeError, match=r"recipe.yaml: data.classes: a run that goes on keeps it at .*liver.*prepared as they"
    ):
        resume(run)
    (run / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match="training.epochs 1: .* has trained"):
        resume(stop_after_two(run), assignments=["training.epochs=1"])


def stop_after_two(run: Path) -> Path:
    went_on(run, step=11)
    return run


def test_what_is_safe_is_taken_up(run: Path) -> None:
    """Rates and decays of the optimizer among it, which torch would take from the checkpoint."""
    settings = [
        "optimizer.weight_decay=0.5",
        "augment.rotate=null",
        "data.workers=1",
        "output.keep_every=1",
        "training.ema={decay: 0.9}",
    ]
    listener = went_on(run, *settings, "loss.ce_weight=2.0", step=9)
    saved = read_checkpoint(run / "checkpoints/last.pt")
    assert saved["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    assert saved["ema"] is not None
    assert "average of the weights, which the checkpoint has not" in listener.told
    assert "optimizer.weight_decay 0.01 → 0.5" in listener.told
    # They stay without being said again
    assert "weight_decay" not in went_on(run, step=10).told
    assert read_checkpoint(run / "checkpoints/last.pt")["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


def test_a_key_that_fasttrain_has_learnt_since_is_no_change(tiny) -> None:
    then, now = as_values(tiny().recipe), as_values(tiny(training__epochs=5).recipe)
    del then["data"]["nan_policy"], then["training"]["ema"]
    assert [str(change) for change in changes_between(then, now)] == ["training.epochs 4 → 5"]
    then["data"]["classes"] = {"1": "liver"}
    assert [change.key for change in changes_between(then, now)] == ["data.classes", "training.epochs"]


def test_momentum_that_begins_on_a_resume_begins_at_zero(tiny, phantoms: Path, tmp_path: Path) -> None:
    sgd = {"kind": "sgd", "learning_rate": 1e-3, "momentum": 0.0, "nesterov": False}
    run = stopped(tiny(optimizer=sgd), phantoms, tmp_path / "run", 2)
    listener = went_on(run, "optimizer.momentum=0.9", step=5)
    assert all(math.isfinite(event.loss) for event in listener.events if isinstance(event, StepLogged))
    buffers = read_checkpoint(run / "checkpoints/last.pt")["optimizer"]["state"]
    assert all(torch.isfinite(state["momentum_buffer"]).all() for state in buffers.values())


def test_a_moved_run_finds_data_that_moved_too(
    interrupted: Path, phantoms, whole_run: RunResult, tmp_path, monkeypatch
) -> None:
    data, run = tmp_path / "elsewhere/sets/demo-data", Path(shutil.copytree(interrupted, tmp_path / "elsewhere/run"))
    shutil.copytree(phantoms, data)
    record = json.loads((run / "environment.json").read_text())
    record["arguments"]["data"] = str(tmp_path / "gone")
    (run / "environment.json").write_text(json.dumps(record))
    listener = went_on(run, data=data, step=9)
    assert listener.warnings == []
    # From now on it is there that the run finds them, named or not
    assert went_on(run, step=10).warnings == []
    record["arguments"]["data"] = str(tmp_path / "gone")
    (run / "environment.json").write_text(json.dumps(record))
    monkeypatch.setenv("FASTTRAIN_DATA", str(tmp_path / "sets"))
    (tmp_path / "sets").mkdir()
    shutil.copytree(phantoms, tmp_path / "sets/demo")
    found = went_on(run, step=11)
    assert any("gone is not there; the cases are taken from" in text for text in found.warnings)
    losses = [row["train_loss"] for row in read_metrics(run / "metrics.csv")]
    assert losses == [row["train_loss"] for row in read_metrics(whole_run.run / "metrics.csv")][:2]


def test_data_that_is_nowhere_is_a_sentence(tiny, phantoms: Path, tmp_path: Path, monkeypatch) -> None:
    folders = {"kind": "folders", "images": "imagesTr", "labels": "labelsTr"}
    shutil.copytree(phantoms, tmp_path / "data")
    run = stopped(tiny(data__source=folders), tmp_path / "data", tmp_path / "run", 2)
    (tmp_path / "data").rename(tmp_path / "moved")
    monkeypatch.setenv("FASTTRAIN_DATA", str(tmp_path / "none"))
    before = files_of(run)
    with pytest.raises(
        DataError, match="are no more at .*data, and not at .*none/demo .* name their folder with --data"
    ):
        resume(run)
    assert files_of(run) == before
    assert went_on(run, data=tmp_path / "moved", step=3).warnings == []


def test_a_run_of_a_gpu_goes_on_on_a_cpu(run: Path, whole_run: RunResult) -> None:
    """As a checkpoint of a GPU is: a generator of its own, and an optimizer that updates in another way."""
    path = run / "checkpoints/last.pt"
    saved = read_checkpoint(path)
    state = {key: value for key, value in saved.items() if key not in ("format", "checksum")}
    state["random"]["cuda"] = torch.zeros(16, dtype=torch.uint8)
    for group in state["optimizer"]["param_groups"]:
        group |= {"capturable": True, "fused": None, "foreach": True}
    write_checkpoint(path, state)
    record = json.loads((run / "environment.json").read_text())
    record["hardware"]["device_name"] = "NVIDIA H100 80GB HBM3"
    (run / "environment.json").write_text(json.dumps(record))
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "amp": "bf16", "cuda_graphs": True}))
    listener = went_on(run, device="cpu", step=11)
    assert "not restored: the GPU's generator: there is no GPU here" in listener.told
    assert any(
        text.startswith("the run was on NVIDIA H100 80GB HBM3 and goes on on ")
        and "amp bf16 → off, cuda_graphs on → off" in text
        for text in listener.warnings
    )
    losses = [[row["train_loss"] for row in read_metrics(one / "metrics.csv")] for one in (run, whole_run.run)]
    assert losses[0] == losses[1][:2]
    # The records are of where it is now
    assert json.loads((run / "environment.json").read_text())["hardware"]["device_name"] != "NVIDIA H100 80GB HBM3"
    assert json.loads((run / "plan.json").read_text())["amp"] == "off"


def test_what_was_restored_and_what_not_is_told(interrupted: Path, run: Path) -> None:
    listener = went_on(run, step=12)
    assert "restored from last.pt (1 epoch done, 7 steps, 14 patches seen): the weights of " in listener.told
    assert "the state of adamw" in listener.told
    assert "not restored: nothing, all of it was taken up" in listener.told
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(interrupted / "checkpoints", run / "checkpoints")
    again = went_on(run, step=8)
    assert "not restored: steps 8 to 12, which were taken after this checkpoint and will be taken again" in again.told


def test_the_epochs_that_a_damaged_checkpoint_loses_are_named(tiny, phantoms: Path, tmp_path: Path) -> None:
    run = stopped(tiny(output__keep_every=1), phantoms, tmp_path / "run", 17)
    for name in ("last.pt", "best.pt", "epoch_0003.pt", "epoch_0002.pt"):
        (run / "checkpoints" / name).write_bytes(b"")
    listener = went_on(run, step=6)
    assert any(
        "going on from epoch_0001.pt, which holds epoch 1, step 5; epochs 2 to 3 are lost" in t
        for t in listener.warnings
    )


def test_a_checkpoint_without_the_later_fields_is_read(run: Path, whole_run: RunResult) -> None:
    """As versions wrote it that knew no other batch."""
    path = run / "checkpoints/last.pt"
    state = {key: value for key, value in read_checkpoint(path).items() if key not in ("format", "checksum")}
    for field in ("effective_batch", "epoch_first", "epoch_steps", "short_samples", "schedule_shift", "learning_rate"):
        del state["progress"][field]
    write_checkpoint(path, state)
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(
        json.dumps({key: value for key, value in plan.items() if key not in ("recipe", "asked")})
    )
    assert went_on(run, step=11).warnings == []
    whole_rows = read_metrics(whole_run.run / "metrics.csv")[:2]
    for row, whole in zip(read_metrics(run / "metrics.csv"), whole_rows, strict=True):
        assert (row["train_loss"], row["lr"]) == (whole["train_loss"], whole["lr"])
    state["progress"]["of_a_later_version"] = 1
    write_checkpoint(path, state)
    # Which is of a later step by now
    (run / "checkpoints/best.pt").unlink(missing_ok=True)
    (run / "summary.json").unlink()
    with pytest.raises(StorageError, match="written by a later version"):
        resume(run)


def test_the_newest_run_is_the_one_that_began_last_also_among_copies(run: Path, tmp_path: Path) -> None:
    """Copied to another machine, files have the time of the copy, and in any order."""
    line, *rest = (run / "events.jsonl").read_text().splitlines()
    for name, time in (("old", "2026-01-01T00:00:00.000+00:00"), ("new", "2026-02-01T00:00:00.000+00:00")):
        copy = Path(shutil.copytree(run, tmp_path / "runs" / name))
        (copy / "events.jsonl").write_text("\n".join([json.dumps({**json.loads(line), "time": time}), *rest]))
    (tmp_path / "runs/.drill-demo-1").mkdir()
    os.utime(tmp_path / "runs/old/recipe.yaml", (2e9, 2e9))
    assert [one.path.name for one in runs_by_age(tmp_path / "runs")] == ["new", "old"]
    assert newest_unfinished(tmp_path / "runs")[0] == tmp_path / "runs/new"


def test_which_run_a_repeated_command_means(tiny, run: Path, tmp_path: Path) -> None:
    assert run_of_command("demo", run) == (run, True)
    assert run_of_command("demo", tmp_path / "new") == (tmp_path / "new", False)
    assert run_of_command("demo", None, tmp_path) == (None, False)
    dated, other = tmp_path / "runs/demo-20260101-120000", tmp_path / "runs/demo-big-20260202-120000"
    shutil.copytree(run, dated)
    shutil.copytree(run, other)
    assert run_of_command("demo", None, tmp_path / "runs") == (dated, True)
    (dated / "recipe.yaml").unlink()
    with pytest.raises(StorageError, match="holds checkpoints and no recipe.yaml"):
        run_of_command("demo", None, tmp_path / "runs")
    assert asked_otherwise(RunFolder(run), tiny().recipe) == {}
    changed = tiny(training__epochs=7, schedule={"kind": "poly"}).recipe
    assert asked_otherwise(RunFolder(run), changed) == {
        "training.epochs": 7,
        "schedule": {"kind": "poly", "warmup": 0.0, "power": 0.9},
    }


def test_a_command_that_means_another_network_is_told_by_its_recipe(tiny, run: Path) -> None:
    folder = RunFolder(run)
    other = tiny(network__features=[4, 4, 4], optimizer__kind="adam").recipe
    with pytest.raises(RecipeError) as caught:
        look_at(folder, asked_otherwise(folder, other), other)
    assert caught.value.faults[0].startswith(
        "recipe demo of this command: network.features: a run that goes on keeps it at"
    )
    assert not any("--set" in fault for fault in caught.value.faults)
    # By `resume --set` it was set
    with pytest.raises(RecipeError, match=r"--set network\.features: a run that goes on keeps it"):
        look_at(folder, ["network.features=[4,4,4]"])


def test_a_repeated_command_does_not_undo_what_a_resume_set(tiny, run: Path) -> None:
    went_on(run, "training.batch_size=4", step=8)
    folder = RunFolder(run)
    assert asked_otherwise(folder, tiny().recipe) == {}
    changed = tiny(training__epochs=5).recipe
    listener = Listener(9)
    resume(run, assignments=asked_otherwise(folder, changed), asked=changed, observers=[listener], stop=listener.stop)
    now = resolve(str(folder.recipe)).recipe.training
    assert (now.batch_size, now.epochs) == (4, 5)
    assert asked_otherwise(folder, changed) == {}
    assert any(isinstance(event, RunStarted) and event.epochs == 5 for event in listener.events)
    assert not any(isinstance(event, EpochEnded) for event in listener.events)
