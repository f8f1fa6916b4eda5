"""`fasttrain search` as a command: real trials of a tiny recipe, killed in the middle and gone on with, and what it refuses."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fasttrain.cli.main import run
from fasttrain.recipe import resolve
from fasttrain.run_folder import RunFolder

pytest.importorskip("optuna")
SETS = {
    "data.source.cases": 6,
    "data.split.validation": 2,
    "data.spacing": "[5,5,5]",
    "patch.size": "[16,16,16]",
    "network.features": "[4,8,8]",
    "network.strides": "[2,2]",
    "training.epochs": 4,
    "training.iterations_per_epoch": 3,
    "validation.every": 1,
    "output.plots": "false",
    "output.pictures": "off",
    "output.report": "false",
    "acceleration.amp": "off",
    "acceleration.channels_last": "off",
    "acceleration.threads": 1,
    "search.space": "{optimizer.learning_rate: {kind: float, low: 1e-4, high: 1e-2, log: true}}",
    "search.pruner": "{kind: median, min_epochs: 1, patience: 0}",
}
TINY = [
    "--recipe",
    "demo",
    "--device",
    "cpu",
    *(word for key, value in SETS.items() for word in ("--set", f"{key}={value}")),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def called(*words: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        run([*words])
    return int(ended.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = called(*words)
    return code, capsys.readouterr().err


def test_killed_in_the_middle_it_ends_with_the_trials_asked_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [sys.executable, "-m", "fasttrain", "search", "run", "--trials", "6", *TINY]
    first = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    study = place / "runs" / "search-demo"
    give_up = time.monotonic() + 200
    while not (study / "trial-0001" / "events.jsonl").exists():
        assert first.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert subprocess.run(words, stdout=subprocess.DEVNULL, timeout=250).returncode == 0
    capsys.readouterr()
    assert called("search", "status", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    counts = {state: one["count"] for state, one in found["states"].items()}
    assert found["trials"] == 6
    assert counts["complete"] + counts["pruned"] == 6
    assert 0 < found["device"]["training_share"] <= 1
    assert len(list(study.glob("trial-*"))) == 6
    best = found["best"][0]
    assert RunFolder(Path(best["run"])).read_summary()["best"]["value"] == best["values"]["score"]
    assert {Path(path).name for path in found["plots"]} >= {"history.png"}
    # Volumes are made once, whoever trains on them
    made = [line for run in study.glob("trial-*") for line in (run / "events.jsonl").read_text().splitlines()]
    assert any("RunEnded" in line for line in made)
    assert len(list((place / "cache" / "volumes" / "disk").iterdir())) == 2
    assert called("search", "best", "--write", "my.yaml") == 0
    assert resolve("my.yaml").recipe.optimizer.learning_rate == best["params"]["optimizer.learning_rate"]
    lines = {line.split()[0]: line for line in Path("my.yaml").read_text().splitlines()}
    # One that goes on keeps the recipe of its first number
    assert lines["learning_rate:"].endswith(f"# search, trial {int(best['run'].rpartition('-')[2])}")
    assert lines["every:"].endswith("# search")
    assert lines["beta1:"].endswith("# default")
    assert called("search", "best", "--write", "my.yaml") == 2
    assert called("monitor", "--once") == 0
    assert "6 of 6" in capsys.readouterr().out
    code, told = refused(capsys, "search", "run", *TINY, "--set", "training.batch_size=1")
    assert code == 2
    assert "training.batch_size 2 → 1" in told
    _a_pruned_trial_can_be_resumed(study)


def test_what_was_measured_for_one_trial_holds_for_the_next_on_a_cpu_too(place: Path) -> None:
    sets = ["acceleration.amp=auto", "acceleration.channels_last=auto", "search.pruner={kind: none}"]
    assert called("search", "run", "--trials", "2", *TINY, *(word for one in sets for word in ("--set", one))) == 0
    chosen = []
    for number in range(2):
        plan = json.loads((place / "runs" / "search-demo" / f"trial-{number:04d}" / "plan.json").read_text())
        chosen.append({one["name"]: (one["value"], one["reason"]) for one in plan["decisions"]})
    for name in ("amp", "channels_last"):
        assert chosen[0][name][0] == chosen[1][name][0]
        assert "the choice stands" in chosen[1][name][1]
        assert "the choice stands" not in chosen[0][name][1]


def _a_pruned_trial_can_be_resumed(study: Path) -> None:
    for folder in study.glob("trial-*"):
        summary = RunFolder(folder).read_summary()
        if summary["stopped_by"] == "pruned":
            assert summary["status"] == "stopped"
            assert RunFolder(folder).has_checkpoints()


def test_what_is_wrong_is_told_before_anything_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = ["--set", "search.space={optimizer.learning_rat: {kind: float, low: 1, high: 2}}"]
    code, told = refused(capsys, "search", "run", "-r", "demo", *space)
    assert code == 2
    assert "did you mean optimizer.learning_rate" in told
    assert refused(capsys, "search", "run", "-r", "demo", "--storage", "oracle://a/b")[0] == 2
    assert refused(capsys, "search", "run", "-r", "demo", "--parallel", "none")[0] == 2
    assert refused(capsys, "search", "run", "-r", "demo", "--hours", "-1")[0] == 2
    assert refused(capsys, "search", "status")[0] == 2
    assert refused(capsys, "search", "best", "nowhere")[0] == 2
    code, told = refused(capsys, "search", "run", "-r", "demo", "--storage", "postgresql://me:pw@127.0.0.1:9/x")
    assert code == 6
    assert "cannot be used" in told
    assert "pw" not in told
    (place / "full").mkdir()
    (place / "full" / "file").touch()
    code, told = refused(capsys, "search", "run", "-r", "demo", "--folder", "full")
    assert (code, "is not empty" in told) == (2, True)


def test_without_the_extra_it_says_how_to_install_it(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasttrain.studies.search import extra

    monkeypatch.setattr(extra.importlib.util, "find_spec", lambda name: None)
    code, told = refused(capsys, "search", "run", "-r", "demo")
    assert code == 4
    assert "pip install 'fasttrain[search]'" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_stderr_ends_no_search(place: Path) -> None:
    words = [sys.executable, "-m", "fasttrain", "search", "run", "--trials", "2", *TINY]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=full, text=True, timeout=200)
    assert done.returncode == 0
    assert "2 of 2: 2 complete" in done.stdout or "1 pruned" in done.stdout


def test_ctrl_c_saves_and_ends_with_its_code(place: Path) -> None:
    words = [sys.executable, "-m", "fasttrain", "search", "run", "--trials", "9", *TINY, "--set", "training.epochs=400"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    trial = place / "runs" / "search-demo" / "trial-0000"
    give_up = time.monotonic() + 200
    while not (trial / "checkpoints" / "last.pt").exists():
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "it goes on when the search is started again" in told
    assert RunFolder(trial).read_summary()["status"] == "stopped"
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, 0)
