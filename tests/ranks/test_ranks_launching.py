"""`--gpus N`: what it takes and refuses, and that ranks which are started by it end together, with one sentence and none left."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fasttrain.cli import launching
from fasttrain.cli.launching import count_of, launched
from fasttrain.cli.on_finish import OnFinish
from fasttrain.engine.resuming.auto import run_of_command
from fasttrain.errors import MachineError, RecipeError
from fasttrain.machine import driver as drivers
from fasttrain.machine.driver import Card, Driver
from fasttrain.machine.own_launcher import VARIABLE, OwnLauncher, own_launcher

SETTINGS = [
    "data.source.cases=4",
    "data.split.validation=2",
    "data.spacing=[4,4,4]",
    "patch.size=[16,16,16]",
    "network.features=[4,4,4]",
    "network.strides=[2,2]",
    "training.epochs=500",
    "training.iterations_per_epoch=8",
    "validation.every=500",
    "output.report=false",
    "output.plots=false",
    "acceleration.amp=off",
    "acceleration.channels_last=on",
]


def _cards(monkeypatch: pytest.MonkeyPatch, count: int, instances: tuple[str, ...] | None = None) -> None:
    cards = tuple(Card(f"GPU-{number}aaa", "H100", instances=instances) for number in range(count))
    monkeypatch.setattr(drivers, "read_driver", lambda: Driver("580", (13, 0), cards))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("gpus", ["0", "-1", "two", "1.5", "", "ALL", "9999999"])
def test_a_number_or_all(gpus: str) -> None:
    with pytest.raises(RecipeError, match="should be a number from 1, or all"):
        count_of(gpus, "auto")


def test_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 4)
    assert [count_of(gpus, "auto") for gpus in ("1", "2", "4", "all")] == [1, 2, 4, 4]
    assert count_of("2", "cuda") == 2
    with pytest.raises(MachineError, match="--gpus 5: there are 4; say --gpus 4 or --gpus all, or rent more"):
        count_of("5", "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert count_of("all", "auto") == 2
    with pytest.raises(MachineError, match="--gpus 3: there are 2, by CUDA_VISIBLE_DEVICES='3,1'"):
        count_of("3", "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
    assert count_of("all", "auto") == 1


def test_no_gpu_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 0)
    for gpus in ("2", "all"):
        with pytest.raises(MachineError, match="use --device cpu"):
            count_of(gpus, "auto")


def test_parts_of_a_card_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 1, ("MIG-1", "MIG-2"))
    for gpus in ("2", "all"):
        with pytest.raises(MachineError, match="MIG instances, parts of a card"):
            count_of(gpus, "auto")
    assert count_of("1", "auto") == 1


def test_processes_on_the_cpu_are_counted_by_the_user() -> None:
    assert count_of("3", "cpu") == 3
    with pytest.raises(RecipeError, match="there are no GPUs to count|there is no number of GPUs"):
        count_of("all", "cpu")


def test_more_processes_than_cpus_are_a_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "cpu_limit", lambda: 2)
    assert count_of("8", "cpu") == 8
    with pytest.raises(MachineError, match="--gpus 99999 with --device cpu: 2 CPUs may be used here; say --gpus 8 or"):
        count_of("99999", "cpu")
    monkeypatch.setattr(launching, "cpu_limit", lambda: 96)
    assert count_of("96", "cpu") == 96


def test_one_card_by_number_is_none_for_several() -> None:
    assert count_of("1", "cuda:1") == 1
    with pytest.raises(RecipeError, match="--gpus 2 with --device cuda:1, which is one card"):
        count_of("2", "cuda:1")


def test_in_a_rank_of_another_launcher_it_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert launched("2", "auto") is None
    assert launched("all", "auto") is None
    assert launched(None, "auto") is None
    with pytest.raises(
        RecipeError, match="--gpus 4: this is one of 2 ranks that a launcher has started on this machine"
    ):
        launched("4", "auto")


def test_the_ranks_are_given_the_same_command_without_it() -> None:
    assert launching._without_option(["train", "--gpus", "2", "-r", "demo", "--gpus=3", "--json"]) == [
        "train",
        "-r",
        "demo",
        "--json",
    ]
    assert launching._without_option(["resume", "--", "--gpus"]) == ["resume", "--", "--gpus"]
    assert launching._without_option(["train", "--gpus"]) == ["train"]


def test_the_first_note_of_a_kind_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = OwnLauncher(os.getpid() + 1, tmp_path)
    monkeypatch.setenv(VARIABLE, launch.variable)
    rank = own_launcher()
    assert rank is not None
    rank.tell(run="/runs/first", lost=["rank 1 is gone"])
    rank.tell(run="/runs/second", said=True)
    assert (launch.told("run"), launch.told("lost"), launch.told("said")) == ("/runs/first", ["rank 1 is gone"], True)
    assert launch.told("in_use") is None
    assert not rank.asked
    launch.ask()
    assert rank.asked
    # The process that started the ranks is none of them
    monkeypatch.setenv(VARIABLE, OwnLauncher(os.getpid(), tmp_path).variable)
    assert own_launcher() is None


def test_what_follows_the_end_is_left_to_who_started_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = OnFinish()
    done = tmp_path / "done"
    launch = OwnLauncher(os.getpid() + 1, tmp_path / "notes")
    launch.folder.mkdir()
    monkeypatch.setenv(VARIABLE, launch.variable)
    asked.ask(f"touch {done}")
    assert asked.option == f" --on-finish 'touch {done}'"
    asked.carry_out(6)
    assert not done.exists()
    assert launch.told("in_use") is False
    monkeypatch.delenv(VARIABLE)
    asked.ask(f"touch {done}")
    asked.carry_out(6)
    assert done.exists()


def test_a_command_begun_anew_means_its_own_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, began in (
        ("demo-20260101-000000", "2026-01-01T00:00:00+00:00"),
        ("demo-20260301-000000", "2026-03-01T00:00:00+00:00"),
    ):
        (runs / name).mkdir(parents=True)
        (runs / name / "recipe.yaml").write_text("name: demo\n")
        (runs / name / "events.jsonl").write_text(json.dumps({"time": began, "event": "RunStarted"}) + "\n")
    february = 1769904000.0
    assert run_of_command("demo", None, runs, since=february)[0] == runs / "demo-20260301-000000"
    assert run_of_command("demo", None, runs, since=february + 60 * 86400) == (None, False)
    assert run_of_command("demo", None, runs)[0] == runs / "demo-20260301-000000"


def _two_ranks(command: str, place: Path, run: Path, sets: list[str]) -> list[str]:
    """A command line of fasttrain's, without the program."""
    words = [command, "--recipe", "demo", "--data", str(place / "data"), "--run", str(run)]
    return [*words, "--device", "cpu", "--gpus", "2", *(part for setting in sets for part in ("--set", setting))]


def _ranks_of(run: Path) -> dict[int, int]:
    """Rank → process."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            if str(run).encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.update({int(one[5:]): int(name) for one in environ if one.startswith(b"RANK=")})
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
def test_a_rank_that_is_killed_ends_all_with_one_sentence(tmp_path: Path) -> None:
    run, finished = tmp_path / "run", tmp_path / "finished"
    words = _two_ranks("train", tmp_path, run, SETTINGS)
    words += ["--on-finish", f"echo $FASTTRAIN_EXIT_CODE $FASTTRAIN_RUN > {finished}"]
    with (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen([sys.executable, "-m", "fasttrain", *words], stdout=subprocess.PIPE, stderr=err)
    try:
        until = time.monotonic() + 90
        while time.monotonic() < until and process.poll() is None and not (run / "checkpoints" / "last.pt").exists():
            time.sleep(0.05)
        os.kill(_ranks_of(run)[1], signal.SIGKILL)
        killed_at = time.monotonic()
        assert process.wait(60) == 137
        assert time.monotonic() - killed_at < 30
    finally:
        for one in (process.pid, *_ranks_of(run).values()):
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
    told = (tmp_path / "err").read_text()
    sentences = [line for line in told.splitlines() if line.startswith("fasttrain: ")]
    assert len(sentences) == 1, told
    assert sentences[0].startswith("fasttrain: rank 1 was killed by SIGKILL")
    assert "Traceback" not in told
    assert _ranks_of(run) == {}
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 137)
    assert summary["error"].startswith("rank 1 on ")
    assert finished.read_text() == f"137 {run}\n"
    # What the sentence says goes on, with as many processes on the CPU
    line = shlex.split(sentences[0].split("`")[-2])[1:]
    again = [sys.executable, "-m", "fasttrain", *line, "--max-hours", "0.0001", "--json"]
    ended = subprocess.run(again, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["stopped_by"].startswith("--max-hours")


def test_tune_trains_with_as_many_ranks_as_it_measured(tmp_path: Path) -> None:
    run, finished = tmp_path / "run", tmp_path / "finished"
    sets = [*SETTINGS, "training.batch_size=1", "training.epochs=2", "validation.every=2"]
    words = _two_ranks("tune", tmp_path, run, sets)
    words += [
        "--json",
        "--budget",
        "8s",
        "--batch-sizes",
        "1",
        "--caches",
        "memory",
        "--workers",
        "0",
        "--max-hours",
        "1",
    ]
    words += ["--on-finish", f"echo $FASTTRAIN_EXIT_CODE $FASTTRAIN_RUN >> {finished}"]
    environ = {**os.environ, "FASTTRAIN_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(
        [sys.executable, "-m", "fasttrain", *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=environ,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert (document["status"], document["run"]) == ("done", str(run))
    sizes = json.loads((run / "plan.json").read_text())["sizes"]
    assert (sizes["ranks"], sizes["effective_batch"]) == (2, 2)
    assert (run / "tune" / "lock.json").exists()
    assert finished.read_text() == f"0 {run}\n"
