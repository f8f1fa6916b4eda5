"""A study beside another one on the same device: told once, and not where the other one is over or elsewhere."""

import subprocess
import sys
import textwrap
from pathlib import Path

from fasttrain.studies.turns import told_of_others
from fasttrain.telemetry.events import Event

CPU = {"device": "cpu", "device_name": "EPYC"}


def test_another_study_is_told_of_until_its_process_has_ended(tmp_path: Path) -> None:
    (tmp_path / "tuned").mkdir()
    script = """
        import sys
        from pathlib import Path
        from fasttrain.studies.turns import told_of_others
        with told_of_others(Path(sys.argv[1]), {"device": "cpu", "device_name": "EPYC"}, print):
            print("measuring", flush=True)
            sys.stdin.read()
    """
    words = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "measuring\n"
        heard: list[Event] = []
        with told_of_others(tmp_path, CPU, heard.append):
            pass
        assert [event.level for event in heard] == ["warning"]
        assert "another tune or tune-batch measures on EPYC now" in heard[0].text
        with told_of_others(tmp_path, {**CPU, "device": "cuda:1"}, heard.append):
            pass
        assert len(heard) == 1
    finally:
        other.kill()
        other.wait()
    with told_of_others(tmp_path, CPU, heard.append):
        pass
    assert len(heard) == 1


def test_nowhere_to_write_is_no_hindrance(tmp_path: Path) -> None:
    with told_of_others(tmp_path / "nowhere", CPU, lambda event: None):
        pass
