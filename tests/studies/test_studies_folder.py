"""The folder that a profile or an ablation writes into: whose it is, and who goes on in it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.errors import InUseError, RecipeError, StorageError
from fasttrain.studies.study_folder import UNFINISHED, NewStudyFolder

AT_WORK = """
import sys, time
from pathlib import Path
from fasttrain.studies.study_folder import NewStudyFolder
with NewStudyFolder(Path(sys.argv[1]), "demo", "profile") as folder:
    (folder.path / "trace.json").write_text("half")
    (folder.path / ".profile.json.1.part").write_text("half")
    (folder.path / ".trace.json.1.part").mkdir()
    (folder.path / ".trace.json.1.part/trace.json.tmp").write_text("half")
    print("begun", flush=True)
    time.sleep(60)
"""


def made(folder: Path, command: str = "profile") -> NewStudyFolder:
    return NewStudyFolder(folder, "demo", command)


def test_what_was_killed_is_left_to_the_same_command_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", AT_WORK, str(out)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        with pytest.raises(InUseError, match="another profile is at work there"):
            made(out)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(RecipeError, match="is not empty"):
        made(out, "ablate")
    with made(out) as folder:
        assert {path.name for path in out.iterdir()} == {UNFINISHED, "trace.json"}
        folder.finish()
    assert [path.name for path in out.iterdir()] == ["trace.json"]
    with pytest.raises(RecipeError, match="is not empty"):
        made(out)


def test_a_folder_in_which_nothing_came_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError), made(Path("out")):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), NewStudyFolder(None, "demo-profile", "profile"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
    # Somebody else's stays
    Path("mine").mkdir()
    with made(Path("mine")):
        pass
    assert list(Path("mine").iterdir()) == []


def test_a_failure_keeps_what_was_written_for_the_next_try(tmp_path: Path) -> None:
    def failing(folder: NewStudyFolder) -> None:
        with folder:
            (folder.path / "trial.log").write_text("why")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing(made(tmp_path / "out"))
    with made(tmp_path / "out") as folder:
        assert (folder.path / "trial.log").read_text() == "why"


def test_what_cannot_be_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="is a file"):
        made(tmp_path / "file")
    with pytest.raises(StorageError, match="choose another with --out"):
        made(tmp_path / "file" / "out")
