"""`tune-batch`, `tune` and `train --tuned` as commands: real trials of a tiny recipe, and what they refuse."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_trials import MadeTrials

from fasttrain.cli.main import run
from fasttrain.errors import StorageError
from fasttrain.recipe import resolve
from fasttrain.run_folder import RunFolder
from fasttrain.studies.task import Outcome

SETS = {
    "data.source.cases": 6,
    "data.split.validation": 2,
    "data.spacing": "[5,5,5]",
    "patch.size": "[16,16,16]",
    "network.features": "[4,8,8]",
    "network.strides": "[2,2]",
    "training.epochs": 1,
    "training.iterations_per_epoch": 3,
    "training.batch_policy": "scale_linear",
    "output.plots": "false",
    "output.pictures": "off",
    "acceleration.amp": "off",
    "acceleration.channels_last": "off",
    "acceleration.threads": 1,
}
TINY = ["--recipe", "demo", *(word for key, value in SETS.items() for word in ("--set", f"{key}={value}"))]


class Folder:
    """Calls fasttrain in a folder of its own, with a cache folder of its own."""

    def __init__(self, path: Path, data: Path) -> None:
        self.path, self.data = path, data
        self.environment = {**os.environ, "FASTTRAIN_CACHE": str(path / "cache"), "PYTHONPATH": os.getcwd()}

    def here(self, command: str, *more: str, tiny: bool = True) -> int:
        """The exit code of a command in this very process, for what ends before anything slow."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.path)
            patch.setenv("FASTTRAIN_CACHE", self.environment["FASTTRAIN_CACHE"])
            # The process has more to do than this command
            patch.setattr("fasttrain.cli.run_commands.limit_threads", lambda count: None)
            patch.setattr("fasttrain.cli.tune_study.limit_threads", lambda count: None)
            with pytest.raises(SystemExit) as ended:
                run(self.words(command, *more, tiny=tiny)[3:])
        return int(ended.value.code or 0)

    def words(self, command: str, *more: str, tiny: bool = True) -> list[str]:
        place = ["--data", str(self.data)] if tiny else []
        return [sys.executable, "-m", "fasttrain", command, *(TINY if tiny else ()), *place, *more]

    def call(self, command: str, *more: str, tiny: bool = True) -> subprocess.CompletedProcess[str]:
        words = self.words(command, *more, tiny=tiny)
        return subprocess.run(words, cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, phantoms: Path) -> Folder:
    return Folder(tmp_path_factory.mktemp("tuning"), phantoms)


@pytest.fixture(scope="module")
def swept(folder: Folder) -> dict:
    """The document of one sweep that the other tests look at."""
    answer = folder.call("tune-batch", "--run", "swept", "--batch-sizes", "1,4", "--prefer", "largest", "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_one_document_has_every_trial_the_choice_and_its_effect(swept: dict, folder: Folder) -> None:
    assert swept["status"] == "done"
    assert [row["batch_size"] for row in swept["trials"]] == [1, 4]
    assert all(row["patches_per_second"] > 0 for row in swept["trials"])
    assert swept["chosen"]["batch_size"] == 4
    assert swept["effect"]["learning_rate"] == [0.003, 0.006]
    assert swept["effect"]["steps_per_epoch"] == [3, 3]
    assert swept["validation"]["case"] in ("phantom_004", "phantom_005")
    assert swept["limit"]["by"] in ("data", "compute", "bandwidth", "kernels", "set")
    # A product of matrices and a copy, of which no layer can do more than a part
    assert (
        "TFLOP/s" in swept["limit"]["why"]
        or "GFLOP/s" in swept["limit"]["why"]
        or swept["limit"]["by"] in ("data", "set")
    )
    assert swept["machine"]["torch"]
    tune = folder.path / "swept" / "tune"
    assert (tune / "batch.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tune / "lock.json").read_text())["settings"] == {"training.batch_size": 4}
    # Nothing was trained
    assert sorted(one.name for one in (folder.path / "swept").iterdir()) == ["run.lock", "tune"]


def test_train_uses_what_was_tuned_and_a_resume_keeps_it(swept: dict, folder: Folder) -> None:
    answer = folder.call("train", "--tuned", "--run", "trained")
    assert answer.returncode == 0, answer.stderr
    assert "training.batch_size=4" in answer.stderr
    text = (folder.path / "trained" / "recipe.yaml").read_text()
    assert any("batch_size: 4" in line and "# tuned" in line for line in text.splitlines())
    recipe = resolve(str(folder.path / "trained" / "recipe.yaml")).recipe
    assert (recipe.training.batch_size, recipe.optimizer.learning_rate) == (4, 0.006)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", "patch.size=[24,24,24]"], "patch.size was [16, 16, 16] and is [24, 24, 24]"),
        (["--set", "network.features=[4,8,16]"], "network.features was [4, 8, 8] and is [4, 8, 16]"),
        (["--set", "training.batch_size=3"], "--set training.batch_size and --tuned both decide it"),
    ],
)
def test_a_changed_recipe_is_refused_with_the_reason(
    swept: dict, folder: Folder, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.here("train", "--tuned", "--run", "refused", *more) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert not (folder.path / "refused").exists()


def test_tune_trains_with_what_it_found(folder: Folder) -> None:
    answer = folder.call(
        "tune", "--run", "tuned", "--batch-sizes", "2,4", "--workers", "0", "--window-batches", "4,8", "--budget", "60s",
        "--set", "training.epochs=9", "--until-dice", "1e-9", "--price-per-hour", "3600",
        "--on-finish", "echo ended $FASTTRAIN_EXIT_CODE $FASTTRAIN_RUN",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "← chosen" in answer.stdout
    assert "validation.window.batch_size" in answer.stdout
    run = folder.path / "tuned"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["stopped_by"]) == ("done", "--until-dice 1e-09")
    # A second costs a USD, those of the measuring too, which are no part of the start of training
    assert summary["cost"]["run"] > summary["seconds"]["total"] + 2
    assert summary["seconds"]["to_first_step"] < summary["cost"]["run"] - 2
    assert answer.stderr.splitlines()[-1] == f"ended 0 {run}"
    lock = json.loads((run / "tune" / "lock.json").read_text())
    recipe = resolve(str(run / "recipe.yaml")).recipe
    assert recipe.training.batch_size == lock["settings"].get("training.batch_size", 2)
    assert recipe.validation.window.batch_size == lock["settings"].get("validation.window.batch_size", 4)


def test_ctrl_c_keeps_the_table_so_far(folder: Folder) -> None:
    words = folder.words("tune-batch", "--run", "stopped", "--budget", "10m")
    process = subprocess.Popen(
        words, cwd=folder.path, env=folder.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "patches/s" not in process.stderr.readline():
        assert process.poll() is None
    # Written after each trial, for whoever kills the process outright
    tune = folder.path / "stopped" / "tune"
    while not (tune / "table.json").exists():
        time.sleep(0.005)
    kept = json.loads((tune / "table.json").read_text())
    assert (kept["status"], len(kept["trials"])) == ("running", 1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 130
    assert out.splitlines()[0].startswith("batch  patches/s")
    assert "the recipe's own" in out
    assert "stopped; the table holds what was measured until then" in err
    assert len(json.loads((tune / "table.json").read_text())["trials"]) >= 1
    assert not (tune / "lock.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune-batch", "-r", "demo", "--prefer", "fastest"],
         "--prefer fastest: there is no such preference; there are throughput, memory, largest"),
        (["tune", "-r", "demo", "--no-train", "--max-hours", "2h"], "--no-train trains nothing that --max-hours 2 could end"),
        (["tune", "-r", "demo", "--max-cost", "2"], "--max-cost 2 needs --price-per-hour"),
        (["tune", "-r", "demo", "--until-dice", "90"], "--until-dice 90: should be above 0 and at most 1"),
        (["tune", "-r", "demo", "--fold", "0"], "--fold 0: the recipe's data.split.kind is last"),
        (["tune", "-r", "hippocampus", "--fold", "all"], "`train --tuned --fold all` trains every fold"),
        (["tune-batch", "-r", "demo", "--margin", "2"], "--margin 2: should be a share of the memory"),
        (["tune-batch", "-r", "demo", "--batch-sizes", "0"], "--batch-sizes 0: should be a whole number of at least 1"),
        (["tune-batch", "-r", "demo", "--batch-sizes", "dynunt:2"], "'dynunt' is no network.kind; did you mean dynunet or unet?"),
        (["tune-batch", "-r", "demo", "--budget", "soon"], "--budget soon: should be a time such as 90s, 3m or 1h"),
        (["tune-batch", "-r", "demo", "--trials", "0"], "--trials 0: should be a whole number of at least 1"),
        (["tune-batch", "-r", "demo", "--device", "gpu"], "--device gpu: should be auto, cpu, cuda or cuda:N"),
        (["tune-batch", "-r", "demo", "--gpus", "0"], "--gpus 0: should be a number from 1, or all"),
        (["tune-batch", "-r", "demo", "--gpus", "all", "--device", "cpu"], "--gpus all with --device cpu: there is no number"),
        (["tune-batch", "-r", "demo", "--gpus", "2", "--device", "cuda:1"], "--gpus 2 with --device cuda:1, which is one card"),
        (["tune-batch"], "missing option '--recipe'"),
        (["tune", "-r", "demo", "--stitching", "tpu"], "--stitching tpu: there is no such choice"),
        (["tune", "-r", "demo", "--caches", "gpuu"], "--caches gpuu: there is no such choice; did you mean gpu?"),
        (["tune", "-r", "dem"], "there is no recipe 'dem'; did you mean demo?"),
        (["train", "-r", "demo", "--tuned"], "--tuned: nothing was tuned on this machine yet"),
    ],
)  # fmt: skip
def test_usage_faults(tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    empty = Folder(tmp_path, tmp_path)
    assert empty.here(*words, tiny=False) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert not (tmp_path / "runs").exists()


def test_more_gpus_than_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasttrain.cli.launching._cards", lambda: (2, ""))
    assert Folder(tmp_path, tmp_path).here("tune-batch", "-r", "demo", "--gpus", "3", tiny=False) == 4
    assert capsys.readouterr().err == "fasttrain: --gpus 3: there are 2; say --gpus 2 or --gpus all, or rent more\n"
    assert not (tmp_path / "runs").exists()


def test_two_ranks_measure_and_what_they_found_is_for_two(
    tmp_path: Path, phantoms: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path, phantoms)
    answer = folder.call("tune-batch", "--run", "two", "--batch-sizes", "3", "--gpus", "2", "--device", "cpu", "--json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["ranks"], found["settings"]) == (2, {"training.batch_size": 3})
    # Three patches a rank, at a rate that is scaled by both
    assert found["effect"]["effective_batch"] == [4, 6]
    assert found["effect"]["learning_rate"] == [0.006, 0.009]
    assert found["validation"]["seconds"] > 0
    assert json.loads((tmp_path / "two" / "tune" / "lock.json").read_text())["ranks"] == 2
    assert folder.here("train", "--tuned", "--run", "refused", "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert "it was measured with 2 ranks, and 1 trains here; `fasttrain tune-batch` measures anew" in said
    assert not (tmp_path / "refused").exists()


def test_a_folder_that_holds_a_run_or_is_in_use_is_refused(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.path / "held").mkdir()
    (folder.path / "held" / "recipe.yaml").write_text("name: x\n")
    assert folder.here("tune-batch", "--run", "held") == 2
    assert "already holds a run" in capsys.readouterr().err
    other = RunFolder(folder.path / "used")
    other.path.mkdir()
    other.claim()
    try:
        assert folder.here("tune-batch", "--run", "used") == 6
    finally:
        other.release()
    assert "is in use by" in capsys.readouterr().err


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Has a study in this process ask made trials, and gives the folder it runs in."""

    def asked(**change: object) -> Folder:
        def server(place: Path, *_: object) -> MadeTrials:
            place.mkdir(parents=True)
            return MadeTrials(**change)

        monkeypatch.setattr("fasttrain.studies.trials.TrialServer", server)
        return Folder(tmp_path, tmp_path)

    return asked


def test_a_failure_keeps_the_table_and_gives_a_script_one_document(made, capsys: pytest.CaptureFixture[str]) -> None:
    fault = Outcome("failed", faults=("SIGKILL ended its process",), exit_code=4, log="batch-4.log")
    folder = made(**{"batch-4": fault})
    assert folder.here("tune-batch", "-r", "demo", "--run", "one", "--json", tiny=False) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["faults"] == ["the trial of batch 4 failed: SIGKILL ended its process; its log is batch-4.log"]
    table = json.loads((folder.path / "one" / "tune" / "table.json").read_text())
    assert (table["status"], table["exit_code"], [row["batch_size"] for row in table["trials"]]) == ("failed", 4, [2])
    assert folder.here("tune-batch", "-r", "demo", "--run", "two", tiny=False) == 4
    assert "the recipe's own" in capsys.readouterr().out


def test_a_cache_folder_that_fills_up_meanwhile_ends_with_6_and_shows_the_table(
    made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made()

    def full(*_: object) -> None:
        raise StorageError("cache/tuned/demo.json cannot be written: No space left on device (0 bytes free)")

    monkeypatch.setattr("fasttrain.studies.lock.write_lock", full)
    assert folder.here("tune-batch", "-r", "demo", "--run", "one", tiny=False) == 6
    out, err = capsys.readouterr()
    assert "← chosen" in out
    assert "No space left on device" in err


def test_a_cache_folder_that_cannot_be_written_is_told_before_any_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert Folder(tmp_path, tmp_path).here("tune-batch", "-r", "demo", "--run", "one", tiny=False) == 6
    assert "cache/tuned cannot be written: Not a directory; set FASTTRAIN_CACHE" in capsys.readouterr().err
    assert not (tmp_path / "one").exists()


def test_two_that_begin_in_one_second_take_two_folders(made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made()
    (folder.path / "runs" / "demo-1").mkdir(parents=True)
    # Both looked before either had made its own
    monkeypatch.setattr("fasttrain.cli.tune_study.new_run_path", lambda name: folder.path / "runs" / "demo-1")
    monkeypatch.setattr("fasttrain.run_paths.new_run_path", lambda name: folder.path / "runs" / "demo-1-2")
    assert folder.here("tune-batch", "-r", "demo", tiny=False) == 0
    assert list((folder.path / "runs" / "demo-1").iterdir()) == []
    assert (folder.path / "runs" / "demo-1-2" / "tune" / "lock.json").exists()


def test_a_limit_that_the_measuring_took_ends_before_the_training(
    made, phantoms: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours count from the start of the process on: there may be none left."""
    folder = made()
    # With the settings of these very cases: others would be made beside them, for every test that comes after
    words = [*TINY, "--data", str(phantoms), "--run", "one", "--max-hours", "0.0000001", "--json"]
    assert folder.here("tune", *words, tiny=False) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"status": "stopped", "stopped_by": "--max-hours 1e-07", "exit_code": 0}
    assert "fasttrain: stopped by --max-hours 1e-07 before training began" in err
    assert (folder.path / "one/tune/lock.json").exists()
    assert not (folder.path / "one/recipe.yaml").exists()


def test_faulty_data_is_exit_3(made, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(look=Outcome("failed", faults=("a.nii.gz: unreadable", "b.nii.gz: unreadable"), exit_code=3))
    assert folder.here("tune-batch", "-r", "demo", "--run", "one", tiny=False) == 3
    assert capsys.readouterr().err == "fasttrain: a.nii.gz: unreadable\nfasttrain: b.nii.gz: unreadable\n"
    assert not (folder.path / "one" / "tune" / "table.json").exists()
