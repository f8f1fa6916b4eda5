"""`resume --set` and `train --resume auto`: begun once and resumed ever after, refused with reasons, or nothing to do."""

import json
import os
import shutil
from pathlib import Path

import pytest

from fasttrain.cli import main
from fasttrain.telemetry.metrics_csv import read_metrics


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command line in this process, in an empty folder; gives its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    environ = dict(os.environ)

    def called(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return int(ended.value.code or 0), out, err

    yield called
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


@pytest.fixture
def auto(call, tiny_values: dict, phantoms: Path):
    """`train --resume auto` of the tiny recipe with one epoch, and more options."""
    values = {**tiny_values, "training.epochs": 1}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    base = ["train", "--recipe", "demo", "--data", phantoms, "--device", "cpu", "--resume", "auto", *sets]
    return lambda *more: call(*base, *more)


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "run.lock"}


def unfinished(run: Path) -> None:
    """As a pod leaves it that vanished after the last checkpoint."""
    (run / "summary.json").unlink()


def test_a_repeated_command_begins_once_and_goes_on_ever_after(auto, call, tmp_path: Path) -> None:
    code, out, _ = auto("--json")
    assert code == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads(out)["run"] == f"runs/{run.name}"
    code, out, err = auto("--json")
    assert (code, err) == (0, f"nothing to do: runs/{run.name} is finished\n")
    assert json.loads(out)["status"] == "done"
    unfinished(run)
    before = (run / "metrics.csv").read_text()
    code, _, err = auto()
    assert code == 0
    assert "resumed at step 5" in err
    assert (run / "metrics.csv").read_text() == before
    # What the command asks otherwise is taken up, by the rules of `resume --set`
    code, _, err = auto("--set", "training.epochs=2")
    assert code == 0
    assert "from here on: training.epochs 1 → 2" in err
    assert [row["epoch"] for row in read_metrics(run / "metrics.csv")] == [1, 2]
    code, _, err = auto("--set", "training.epochs=3", "--set", "network.features=[4,8,16]")
    assert code == 2
    assert "network.features: a run that goes on keeps it at [4, 8, 8], found [4, 8, 16]" in err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    code, _, err = call("resume", run, "--set", "training.epochs=1")
    assert code == 2
    assert err.startswith("fasttrain: training.epochs 1: ")


def test_a_run_without_a_checkpoint_begins_again_and_a_damaged_one_never(auto, tmp_path: Path) -> None:
    run = tmp_path / "here"
    assert auto("--run", run)[0] == 0
    rows = [row["train_loss"] for row in read_metrics(run / "metrics.csv")]
    unfinished(run)
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    for name in ("last.pt", "best.pt"):
        (damaged / "checkpoints" / name).write_bytes(b"PK")
    before = files_of(damaged)
    code, _, err = auto("--run", damaged)
    assert code == 6
    assert "last.pt is damaged" in err
    assert files_of(damaged) == before
    (damaged / "recipe.yaml").unlink()
    code, _, err = auto("--run", damaged)
    assert code == 6
    assert "holds checkpoints and no recipe.yaml" in err
    # Killed before its first checkpoint
    shutil.rmtree(run / "checkpoints")
    kept = [line for line in (run / "events.jsonl").read_text().splitlines() if "CheckpointSaved" not in line]
    (run / "events.jsonl").write_text("\n".join(kept) + "\n")
    code, _, err = auto("--run", run)
    assert code == 0
    assert "no checkpoint was written yet: all 5 steps are taken again" in err
    assert [row["train_loss"] for row in read_metrics(run / "metrics.csv")] == rows


def test_a_run_that_never_trained_is_begun_in_its_own_folder(auto, tmp_path: Path) -> None:
    run = tmp_path / "runs/demo-20260101-120000"
    (run / "checkpoints").mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: demo\n")
    (run / "summary.json").write_text('{"status": "failed", "steps": 0}')
    assert auto()[0] == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    assert (run / "checkpoints/last.pt").exists()


def test_usage_faults(call, tmp_path: Path) -> None:
    code, _, err = call("train", "--recipe", "demo", "--resume", "always")
    assert code == 2
    assert err.startswith("fasttrain: --resume always: should be auto; `fasttrain resume RUN` ")
    for options, said in (
        (("--kills", "0"), "--kills 0: should be from 1 to 100"),
        (("--budget", "soon"), "--budget soon: should be a time such as 90s"),
        (("--set", "training.epoch=1"), "did you mean"),
    ):
        code, _, err = call("drill", "--recipe", "demo", *options)
        assert code == 2
        assert said in err
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/recipe.yaml").write_text("name: demo\n")
    (tmp_path / "runs/one/summary.json").write_text('{"status": "done"}')
    code, _, err = call("resume", "--set", "training.epochs=2")
    assert code == 2
    assert err.endswith("name it, such as runs/one\n")
    (tmp_path / "all").mkdir()
    for name, text in (("recipe.yaml", "{}"), ("folds.json", "{}")):
        (tmp_path / "all" / name).write_text(text)
    code, _, err = call("resume", "all", "--set", "training.epochs=2")
    assert code == 2
    assert "holds all folds of a split, and --set is for one: name a fold, such as all/fold_0" in err
