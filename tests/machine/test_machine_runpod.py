"""A pod that stops itself: by the new and the old form of runpodctl, and what is said where it cannot."""

import subprocess
from pathlib import Path

import pytest
from pod_stubs import Place

from fasttrain.errors import MachineError
from fasttrain.machine.runpod import stop_pod, this_pod


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    # The program is looked for on this process's own PATH
    monkeypatch.setenv("PATH", place.environ["PATH"])
    return place


def test_a_pod_knows_itself(place: Place) -> None:
    assert this_pod(place.on_a_pod().environ) == "abc"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RUNPOD_POD_ID": ""}, "this is none"),
        ({"RUNPOD_POD_ID": "a; reboot"}, "no pod's id"),
        ({"PATH": "/nowhere"}, "needs runpodctl"),
    ],
)
def test_elsewhere_it_is_refused_with_the_reason(place: Place, changed: dict[str, str], told: str) -> None:
    with pytest.raises(MachineError, match=told) as caught:
        this_pod({**place.on_a_pod().environ, **changed})
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(("kind", "calls"), [("new", ["pod stop abc"]), ("old", ["pod stop abc", "stop pod abc"])])
def test_both_forms_stop_it(place: Place, kind: str, calls: list[str]) -> None:
    assert stop_pod("abc", place.on_a_pod(kind).environ) is None
    assert place.calls("runpodctl") == calls


@pytest.mark.parametrize(
    ("kind", "reason"), [("broken", "no route to host"), ("refusing", "stop failed; status is RUNNING")]
)
def test_what_it_cannot_stop_it_tries_again_and_then_says_why(place: Place, kind: str, reason: str) -> None:
    said = stop_pod("abc", place.on_a_pod(kind).environ, tries=2, pause_seconds=0)
    assert said is not None
    assert reason in said
    assert len(place.calls("runpodctl")) == 4


def test_one_that_hangs_is_given_up_with_all_that_it_began(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.machine.runpod._SECONDS_A_TRY", 0.3)
    begun: list[subprocess.Popen] = []
    environ = place.on_a_pod().environ
    # What holds its output open is a child of it
    place.add("runpodctl", "#!/usr/bin/env bash\nsleep 300 &\nwait\n")
    said = stop_pod("abc", environ, tries=1, begun=begun.append)
    assert said == "runpodctl gave no answer in 0.3 s"
    assert len(begun) == 2
    for process in begun:
        left = subprocess.run(["pgrep", "-r", "R,S,D", "-g", str(process.pid)], capture_output=True)
        assert left.stdout == b""


def test_a_runpodctl_that_has_gone_is_no_traceback(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    said = stop_pod("abc", {"PATH": "/nowhere"}, tries=1)
    assert said is not None
    assert "runpodctl" in said
