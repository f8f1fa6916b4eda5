"""What the scripts for RunPod make of their arguments: help, misspelt words, forms of one option, and the exit code they give."""

from pathlib import Path

import pytest
from pod_stubs import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_training_that_ends_at_once_gives_its_exit_code(place: Place) -> None:
    for code in (0, 2):
        done = place.run("runpod/train.sh", "first", "--recipe", "x", STUB_CODES=str(code), FASTTRAIN_LOOK_SECONDS="20")
        assert done.returncode == code
        assert f"it has ended already, with exit code {code}" in done.stderr
    # Refused by the loop itself
    done = place.run("runpod/train.sh", "first", "--resume", "never", FASTTRAIN_LOOK_SECONDS="20")
    assert (done.returncode, place.calls("fasttrain")) == (2, ["train --resume auto --run " + run_of(place)] * 2)
    assert "--resume never: this script always resumes" in done.stderr


def run_of(place: Place) -> str:
    """What follows in the calls of that test."""
    return f"{place.volume}/runs/first --recipe x"


@pytest.mark.parametrize(
    "script",
    ["keep_training", "setup_env", *(f"runpod/{name}" for name in ("set_up", "train", "start", "watch", "stop_pod"))],
)
def test_help_is_the_head_of_a_script_and_does_nothing(place: Place, script: str) -> None:
    place.on_a_pod()
    done = place.run(f"{script}.sh", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"scripts/{script}.sh" in done.stdout.splitlines()[0]
    assert "#" not in done.stdout.replace("#!", "")
    assert "set -euo" not in done.stdout
    assert (place.calls("runpodctl"), place.calls("fasttrain"), list(place.volume.iterdir())) == ([], [], [])


def test_a_misspelt_word_stops_no_pod_and_makes_no_environment(place: Place) -> None:
    place.on_a_pod()
    assert place.run("runpod/stop_pod.sh", "--chek").returncode == 2
    assert place.run("setup_env.sh", "--dev").returncode == 2
    assert place.calls("runpodctl") == []
    assert not (place.folder / "--dev").exists()


@pytest.mark.parametrize(
    ("given", "tuned"),
    [
        (["--recipe=spleen"], "--recipe=spleen"),
        (["-rspleen", "-straining.epochs=2"], "-rspleen -straining.epochs=2"),
        (["--recipe", "spleen", "--set=a.b=c", "--data=/d", "--device=cuda:1"], None),
        (["-r", "spleen", "--device", "cuda:1"], "-r spleen --device cuda:1"),
    ],
)
def test_what_decides_on_speed_is_told_to_the_tuning_in_every_form(
    place: Place, given: list[str], tuned: str | None
) -> None:
    place.with_set_up_of_its_own().on_a_pod()
    # And what does not, is not
    done = place.run("runpod/start.sh", "first", "--fetch=spleen", "--tune", *given, "--max-hours=9", "--on-finish=:")
    assert done.returncode == 0, done.stderr
    words = tuned or " ".join(given)
    training = f"train --resume auto --run {place.volume}/runs/first {words} --max-hours=9 --tuned"
    assert place.calls("fasttrain") == ["doctor", "data fetch spleen", f"tune --no-train {words}", training]
    assert place.calls("runpodctl") == ["pod get abc"]
