"""Limits and --on-finish as words of a command line: what is read, what follows a refusal, what a resume drops and says."""

import json
from pathlib import Path

import pytest
from made_runs import made_run

from fasttrain.cli.limit_options import read_limits, tell_dropped
from fasttrain.cli.main import run
from fasttrain.engine.limits import Limits
from fasttrain.errors import RecipeError
from fasttrain.run_folder import RunFolder


@pytest.mark.parametrize(
    ("text", "hours"),
    [("2", 2), ("1.5", 1.5), ("2h", 2), ("90m", 1.5), ("5400s", 1.5), ("45 min", 0.75), ("1e3", 1000)],
)
def test_hours_are_a_number_or_a_time(text: str, hours: float) -> None:
    assert read_limits(text, None, None, None) == Limits(max_hours=hours)
    assert read_limits(None, 2.0, 1.0, None, of_run=True) == Limits(None, 2.0, 1.0, hours_of_run=True)


@pytest.mark.parametrize("text", ["2x", "", "h", "3 epochs", "5 steps", "two"])
def test_what_is_no_time_gets_examples(text: str) -> None:
    with pytest.raises(RecipeError, match="--max-hours .*: should be hours or a time, such as 2, 1.5, 2h or 90m"):
        read_limits(text, None, None, None)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_a_number_that_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="should be a number above 0"):
        read_limits(text, None, None, None)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command line in this process; its exit code, stderr, and what --on-finish noted."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        noted = tmp_path / "noted"
        noted.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as caught:
            run(list(words))
        return int(caught.value.code or 0), capsys.readouterr().err, noted.read_text() if noted.exists() else ""

    return call


NOTE = "echo $FASTTRAIN_EXIT_CODE >noted"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--on-finish", NOTE, "--max-cost", "much"],
        ["train", f"--on-finish={NOTE}", "-r", "demo", "--recpie"],
        ["train", "-r", "demo", "extra", "--debug", "--on-finish", NOTE],
        ["train", "-r", "demo", "--max-hours", "2x", "--on-finish", NOTE],
        ["train", "--on-finish", "false", "--on-finish", NOTE],
        ["resume", "--on-finish", NOTE, "--run", "r1"],
        ["tune", "--on-finish", NOTE, "--budgte", "3m"],
    ],
)
def test_a_refused_option_is_an_end_too(ended, words: list[str]) -> None:
    code, err, noted = ended(*words)
    assert (code, noted) == (2, "2\n"), err
    # And the next command of the same process begins anew
    assert ended("train", "--recpie")[2] == ""


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--dry-run", "-r", "demo", "--on-finish", NOTE, "--max-cost", "much"],
        ["train", "--", "--on-finish", NOTE],
        ["check", "--on-finish", NOTE],
        ["train", "-r", "demo", "--on-finish"],
        ["train", "--help", "--on-finish", NOTE],
    ],
)
def test_what_asks_for_nothing_is_followed_by_nothing(ended, words: list[str]) -> None:
    assert ended(*words)[2] == ""


def test_stop_pod_elsewhere_is_told_beside_the_refusal(ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_POD_ID", raising=False)
    code, err, _ = ended("train", "--recpie", "--on-finish", "stop-pod")
    assert code == 2
    assert "no such option: --recpie" in err
    assert "stop-pod works on a RunPod pod" in err


def limited(path: Path, options: str) -> RunFolder:
    """A run whose last attempt had limits."""
    folder = made_run(path, status=None)
    lines = folder.events.read_text().splitlines()
    started = [number for number, text in enumerate(lines) if json.loads(text)["event"] == "RunStarted"][-1]
    lines[started] = json.dumps({**json.loads(lines[started]), "limit_options": options})
    folder.events.write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("then", "now", "dropped"),
    [
        (
            "--max-hours 6 --max-cost 10 --price-per-hour 2.5",
            Limits(),
            "--max-hours 6 --max-cost 10 --price-per-hour 2.5",
        ),
        ("--max-hours 6 --max-cost 10 --price-per-hour 2.5", Limits(max_hours=1), "--max-cost 10 --price-per-hour 2.5"),
        ("--until-dice 0.9", Limits(max_hours=1), "--until-dice 0.9"),
        ("--max-hours 6", Limits(max_hours=1), None),
        ("--price-per-hour 2.5", Limits(), None),
        ("", Limits(), None),
    ],
)
def test_limits_that_are_not_given_again_are_named(tmp_path: Path, then: str, now: Limits, dropped: str | None) -> None:
    told = tell_dropped(limited(tmp_path / "run", then), now)
    assert (
        (told is None) if dropped is None else (f"limits belong to the command: {dropped} of the last one" in str(told))
    )
    # Of all folds it is the fold that was at work last
    (tmp_path / "whole").mkdir()
    limited(tmp_path / "whole" / "fold_0", "--max-hours 99")
    limited(tmp_path / "whole" / "fold_1", then)
    assert tell_dropped(RunFolder(tmp_path / "whole"), now) == told
    # A run of an older fasttrain did not write them down
    assert tell_dropped(made_run(tmp_path / "old"), now) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resume", "--run", "r 1"], "the run is named without it: `fasttrain resume 'r 1'`"),
        (["monitor", "--run=r1"], "the run is named without it: `fasttrain monitor r1`"),
        (["tune-batch", "tiny.yaml"], "a recipe is named by it: `fasttrain tune-batch --recipe tiny.yaml`"),
        (["train", "-r", "demo", "--resume"], "`--resume auto` begins the run and goes on with it ever after"),
    ],
)
def test_what_was_meant_is_said(ended, words: list[str], said: str) -> None:
    code, err, _ = ended(*words)
    assert code == 2
    (line,) = err.splitlines()
    assert said in line
    assert line.endswith("shows what there is")


def test_a_run_that_a_limit_ended_says_how_it_goes_on_without(ended, tmp_path: Path) -> None:
    made_run(tmp_path / "run", stopped_by="--max-hours 1")
    code, err, _ = ended("resume", "run")
    assert code == 0
    assert "was ended by --max-hours 1; to go on, resume it with a wider one, or with --max-hours 10000 for none" in err
    assert "limits belong" not in err
