"""`runs list`, `runs compare`, `report`, and what a dry run says of time and cost, through the command line."""

import json
import os
import shutil
from pathlib import Path

import pytest
from made_runs import made_run

from fasttrain.cli import main
from fasttrain.engine.run import RunResult


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


def test_the_list(call, tmp_path: Path) -> None:
    code, _, err = call("runs", "list")
    assert code == 2
    assert err == "fasttrain: runs is not there, so that there are no runs to list; name the folder that holds them\n"
    (tmp_path / "runs").mkdir()
    assert call("runs", "list")[:2] == (0, "no runs in runs\n")
    made_run(tmp_path / "runs" / "sound")
    made_run(tmp_path / "runs" / "gone", status=None)
    made_run(tmp_path / "runs" / "broken\nname").plan.write_text("{")
    code, out, _ = call("runs", "list")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 4
    assert next(line for line in lines if "sound" in line).split()[:6][-3:] == ["demo", "done", "0.3000"]
    assert "killed" in next(line for line in lines if "gone" in line)
    assert "damaged: plan.json is damaged" in next(line for line in lines if "broken name" in line)
    code, out, _ = call("runs", "list", "--json")
    found = {run["run"]: run for run in json.loads(out)["runs"]}
    assert found["runs/sound"]["best"] == {"metric": "val_dice", "value": pytest.approx(0.3), "epoch": 3}
    assert found["runs/broken\nname"]["status"] == "damaged"
    assert found["runs/gone"]["cost"] is None


def test_what_differs_between_two(call, tmp_path: Path) -> None:
    made_run(tmp_path / "a")
    made_run(
        tmp_path / "b",
        epochs=2,
        recipe={"training.seed": 5, "network": {"kind": "unet", "features": [8, 16], "strides": [2]}},
        hardware={"device_name": "Another CPU"},
        plan={"decisions": [{"name": "amp", "value": "bf16", "reason": "measured"}]},
        cases={"case_a": {"liver": 0.5, "kidney": 0.5}, "case_z": {"liver": 0.5, "kidney": 0.5}},
    )
    code, out, _ = call("runs", "compare", "a", "b", "--json")
    assert code == 0
    found = json.loads(out)
    recipe = {one["key"]: (one["a"], one["b"]) for one in found["recipe"]}
    assert set(recipe) == {"training.seed", "network.kind", "training.epochs"}
    assert recipe["training.epochs"] == (3, 2)
    assert found["plan"][0] == {"key": "amp", "a": "off", "b": "bf16"}
    assert {"key": "hardware.device_name", "a": "A CPU", "b": "Another CPU"} in found["machine"]
    result = {one["key"]: (one["a"], one["b"]) for one in found["result"]}
    assert result["best"] == (pytest.approx(0.3), pytest.approx(0.2))
    assert result["last mean, liver"] == (pytest.approx(0.7), pytest.approx(0.5))
    assert any("different cases" in note and "case_z" in note for note in found["notes"])
    png = tmp_path / found["png"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.name == "compare-a-b.png"
    code, out, _ = call("runs", "compare", "a", "b", "--png", "drawn.png")
    assert code == 0
    assert "network.kind" in out
    assert "-0.1" in out
    assert (tmp_path / "drawn.png").exists()


def test_the_same_values_differ_in_nothing(call, tmp_path: Path) -> None:
    shutil.copytree(made_run(tmp_path / "a").path, tmp_path / "b")
    found = json.loads(call("runs", "compare", "a", "b", "--json")[1])
    assert (found["recipe"], found["plan"], found["machine"], found["notes"]) == ([], [], [], [])
    assert all(one["a"] == one["b"] for one in found["result"])


def test_what_cannot_be_compared(call, tmp_path: Path) -> None:
    made_run(tmp_path / "a")
    code, _, err = call("runs", "compare", "a", "nowhere")
    assert (code, err) == (2, "fasttrain: nowhere holds no run; see `fasttrain runs list`\n")
    assert call("runs", "compare", "a", tmp_path / "a")[0] == 2
    assert call("runs", "compare", "a", "a", "--png", "x.png")[0] == 2
    code, _, err = call("runs", "compare", "a", made_run(tmp_path / "b").path, "--png", "nowhere/x.png")
    assert code == 6
    assert "nowhere/x.png cannot be written" in err
    damaged = made_run(tmp_path / "damaged", status=None)
    for path in (damaged.plan, damaged.recipe, damaged.metrics, damaged.environment):
        path.write_text("{")
    code, out, _ = call("runs", "compare", "a", "damaged")
    assert code == 0
    assert "recipes are not compared" in out
    assert "metrics" not in call("runs", "compare", "a", "b")[1]


def test_the_report_by_hand(call, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a")
    assert call("report", "a")[:2] == (0, "a/report.html\n")
    size = folder.report.stat().st_size
    found = json.loads(call("report", "a", "--out", "page.html", "--json")[1])
    assert found == {"run": "a", "report": "page.html", "bytes": pytest.approx(size, abs=100)}
    assert call("report", "nowhere")[0] == 2
    code, _, err = call("report", "a", "--out", "nowhere/page.html")
    assert code == 6
    assert len(err.splitlines()) == 1


def test_a_run_writes_its_report_as_it_ends(whole_run: RunResult) -> None:
    text = (whole_run.run / "report.html").read_text()
    assert "ended, done" in text
    for case in whole_run.summary["cases"]:
        assert case in text
    events = (whole_run.run / "events.jsonl").read_text()
    seconds = float(events.rpartition("written in ")[2].split()[0])
    assert seconds < 2.0
    # Before the last word, so that whoever waits for that finds the page
    assert events.index("written in ") < events.index('"RunEnded"')


def test_a_report_that_cannot_be_written_ends_no_run(tiny, phantoms: Path, tmp_path: Path, monkeypatch) -> None:
    from fasttrain import train
    from fasttrain.engine import ending

    def full(folder: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ending, "write_report", full)
    result = train(tiny(training__epochs=1), data=phantoms, run=tmp_path / "run", device="cpu")
    assert (result.exit_code, result.summary["status"]) == (0, "done")
    assert (tmp_path / "run" / "events.jsonl").read_text().count("no report was written: ") == 1
    assert not (tmp_path / "run" / "report.html").exists()
    monkeypatch.undo()
    off = train(tiny(training__epochs=1, output__report=False), data=phantoms, run=tmp_path / "off", device="cpu")
    assert off.exit_code == 0
    assert not (tmp_path / "off" / "report.html").exists()


def test_a_dry_run_says_what_it_will_take(
    call, whole_run: RunResult, tiny_values: dict, phantoms: Path, tmp_path: Path
) -> None:
    def dry(*more: object, **changed: object) -> dict:
        values = {**tiny_values, **{key.replace("__", "."): value for key, value in changed.items()}}
        sets = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        base = ["train", "--recipe", "demo", "--data", phantoms, "--device", "cpu", "--dry-run", "--json", *sets]
        code, out, err = call(*base, *more)
        assert code == 0, err
        return json.loads(out)

    found = dry()
    assert found["estimate"] is None
    assert "not known" in found["estimate_told"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "past").symlink_to(whole_run.run)
    found = dry("--price-per-hour", "3600", training__epochs=8)
    seconds = found["estimate"]["hours"] * 3600
    past = whole_run.summary["seconds"]
    twice = past["total"] + past["training"] + past["validation"]
    assert seconds == pytest.approx(twice, rel=0.5)
    assert found["estimate"]["cost"] == pytest.approx(seconds)
    assert found["estimate"]["run"] == "runs/past"
    assert dry(training__batch_size=4)["estimate"] is None
