"""The run folder: claimed by one process, made only where nothing lies, written whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fasttrain.errors import InUseError, RecipeError, StorageError
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import make_new_run_path, new_run_path, newest_unfinished
from fasttrain.whole_files import write_json, write_whole


def python(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


HOLD = """
import sys
from pathlib import Path
from fasttrain.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.create()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holder = python(HOLD, run)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"{run} is in use by process {holder.pid} on .*; wait for it"):
            RunFolder(run).claim()
        with pytest.raises(StorageError, match=f"in use by process {holder.pid}"):
            RunFolder(run).claim()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    folder = RunFolder(run)
    folder.claim()
    assert (run / "run.lock").read_text().startswith(f"process {os.getpid()} ")
    folder.release()
    folder.release()


def test_a_release_lets_another_process_in(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.release()
    (tmp_path / "run" / "run.lock").unlink()
    (tmp_path / "run" / "checkpoints").rmdir()
    other = python(HOLD, tmp_path / "run")
    assert other.stdout.readline() == "held\n", other.communicate()
    other.communicate("")
    assert other.returncode == 0


def test_a_child_process_does_not_keep_a_killed_holders_claim(tmp_path: Path) -> None:
    """Loader workers outlive a killed trainer for a while; they must not hold its run."""
    holder = python(
        HOLD.replace("import sys", "import sys, subprocess, os").replace(
            'print("held"', 'child = os.fork()\nif child == 0:\n    import time; time.sleep(60)\nprint(f"held {child}"'
        ),
        tmp_path / "run",
    )
    child = int(holder.stdout.readline().split()[1])
    holder.kill()
    holder.wait()
    try:
        os.kill(child, 0)
        RunFolder(tmp_path / "run").claim()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    folder.create()
    assert folder.checkpoints.is_dir()
    assert not folder.holds_a_run()
    folder.release()
    empty = tmp_path / "empty"
    empty.mkdir()
    RunFolder(empty).create()


def test_a_folder_with_a_run_names_resume(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(RecipeError, match=f"already holds a run.*`fasttrain resume {tmp_path}`"):
        RunFolder(tmp_path).create()


def test_other_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RecipeError, match="not empty and holds no run"):
        RunFolder(tmp_path).create()
    with pytest.raises(RecipeError, match="is a file"):
        RunFolder(tmp_path / "file").create()
    with pytest.raises(StorageError, match="cannot be made: Not a directory; choose another with --run"):
        RunFolder(tmp_path / "file" / "run").create()
    with pytest.raises(StorageError, match="File name too long; choose another with --run"):
        RunFolder(tmp_path / ("a" * 300)).create()
    with pytest.raises(StorageError, match="cannot be written: .*choose another with --run"):
        RunFolder(tmp_path / "nowhere").claim()
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"status": "done", "dice": 0.5, "name": "Längs"})
    assert json.loads(path.read_text()) == {"status": "done", "dice": 0.5, "name": "Längs"}
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_a_failure_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail() -> None:
        with write_whole(path) as stream:
            stream.write(b"new" * 1000)
            stream.flush()
            assert path.read_bytes() == b"old"
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_number_that_json_does_not_know_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"dice": 0.5})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"dice": float("nan")})
    assert json.loads(path.read_text()) == {"dice": 0.5}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match="nowhere/file cannot be written: No such file"),
        write_whole(tmp_path / "nowhere" / "file"),
    ):
        pass
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with (
        pytest.raises(StorageError, match="folder cannot be written: Is a directory"),
        write_whole(tmp_path / "folder") as stream,
    ):
        stream.write(b"x")
    assert os.listdir(tmp_path) == ["folder"]


def in_own_mounts(program: str, mount: str, folder: Path) -> None:
    """Runs a Python program in a mount namespace of its own in which `mount` was done; skips where that is not allowed."""
    folder.mkdir()
    script = f'{mount} "$1" || exit 99; exec "$2" -c "$3" "$1"'
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", str(folder), sys.executable, textwrap.dedent(program)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def test_a_full_disk_leaves_the_old_file_and_says_how_much_is_free(tmp_path: Path) -> None:
    in_own_mounts(
        """
        import os, re, sys
        from pathlib import Path
        from fasttrain.errors import StorageError
        from fasttrain.run_folder import RunFolder
        from fasttrain.whole_files import write_whole
        path = Path(sys.argv[1]) / "file"
        with write_whole(path) as stream:
            stream.write(b"old" * 1000)
        for chunk in (1 << 20, 1000):  # larger and smaller than Python's buffer
            try:
                with write_whole(path) as stream:
                    for _ in range((1 << 20) // chunk):
                        stream.write(bytes(chunk))
            except StorageError as error:
                (sentence,) = error.faults
                assert sentence.startswith(f"{path} cannot be written: No space left on device ("), sentence
                assert re.search(r"\\([\\d,]+ bytes free\\)$", sentence), sentence
            else:
                raise SystemExit("a megabyte went into 64 kB")
            assert path.read_bytes() == b"old" * 1000
            assert os.listdir(path.parent) == ["file"]
        with write_whole(path) as stream:
            stream.write(b"new")
        assert path.read_bytes() == b"new"

        # A disk without a byte left: the claim is a sentence too
        run = RunFolder(path.parent / "run")
        run.checkpoints.mkdir(parents=True)
        with open(path.parent / "fill", "wb", buffering=0) as fill:
            try:
                while True:
                    fill.write(bytes(4096))
            except OSError:
                pass
        try:
            run.claim()
        except StorageError as error:
            assert "No space left on device" in str(error), error
        else:
            raise SystemExit("claimed on a full disk")
        """,
        "mount -t tmpfs -o size=64k none",
        tmp_path / "disk",
    )


def test_a_read_only_disk_is_a_sentence(tmp_path: Path) -> None:
    in_own_mounts(
        """
        import sys
        from pathlib import Path
        from fasttrain.errors import StorageError
        from fasttrain.run_folder import RunFolder
        from fasttrain.whole_files import write_whole
        disk = Path(sys.argv[1])
        def whole():
            with write_whole(disk / "file") as stream:
                stream.write(b"x")
        for action in (RunFolder(disk / "run").create, RunFolder(disk).claim, whole):
            try:
                action()
            except StorageError as error:
                assert "Read-only file system" in str(error) and str(disk) in str(error), error
            else:
                raise SystemExit("written on a read-only disk")
        RunFolder(disk).tidy()
        """,
        "mount -t tmpfs -o ro,size=64k none",
        tmp_path / "disk",
    )


def begun(path: Path, at: float, status: object = None) -> Path:
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text("name: x\n")
    os.utime(path / "recipe.yaml", (at, at))
    if status is not None:
        (path / "summary.json").write_text(status if isinstance(status, str) else json.dumps(status))
    return path


def test_the_newest_unfinished_run(tmp_path: Path) -> None:
    base = tmp_path / "runs"
    assert newest_unfinished(base) == (None, None)
    base.mkdir()
    (base / "other").mkdir()
    (base / "file").write_text("x")
    assert newest_unfinished(base) == (None, None)
    begun(base / "z", 100, {"status": "stopped"})
    middle = begun(base / "b", 200)
    newest = begun(base / "a", 300, {"status": "done"})
    assert newest_unfinished(base) == (middle, newest)
    (middle / "summary.json").write_text('{"status": "done"}')
    assert newest_unfinished(base) == (base / "z", newest)
    (base / "z" / "summary.json").write_text('{"status": "done"}')
    assert newest_unfinished(base) == (None, newest)


@pytest.mark.parametrize("summary", ["", "{", "[]", "null", '{"state": 1}', "\udcff"])
def test_a_broken_summary_is_no_end(tmp_path: Path, summary: str) -> None:
    run = begun(tmp_path / "run", 100)
    (run / "summary.json").write_bytes(summary.encode(errors="surrogateescape"))
    assert not RunFolder(run).finished()


def test_a_run_that_cannot_be_gone_on_with_where_it_lies_can_be_copied(tmp_path: Path) -> None:
    """As on a disk that can only be read: a resume has no --run."""
    run = begun(tmp_path / "run", 100)
    (run / "run.lock").mkdir()
    with pytest.raises(StorageError, match="cannot be written: .*copy the run to another folder and go on there"):
        RunFolder(run).claim()


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        path = new_run_path("demo", tmp_path, now=lambda: 1_700_000_000.4)
        path.mkdir()
        paths.append(path.name)
    assert paths == [paths[0], f"{paths[0]}-2", f"{paths[0]}-3"]
    assert paths[0].startswith("demo-2023")


def test_a_name_that_was_taken_meanwhile_gives_way_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Both looked before either had made its own
    seen = new_run_path("demo")
    made = [make_new_run_path("demo", seen), make_new_run_path("demo", seen), make_new_run_path("demo")]
    assert made[0] == seen
    assert len(set(made)) == 3
    assert all(path.is_dir() and path.parent == Path("runs") for path in made)


@pytest.mark.parametrize("kind", ["file", "dangling"])
def test_where_no_run_can_be_made_that_is_said_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("") if kind == "file" else Path("runs").symlink_to("gone/far/away")
    with pytest.raises(StorageError, match="cannot be made.*choose another with --run"):
        make_new_run_path("demo")


def test_periodic_checkpoints_are_listed_by_number(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.epoch_files() == []
    assert not folder.has_checkpoints()
    folder.checkpoints.mkdir()
    for name in ("epoch_0010.pt", "epoch_0009.pt", "epoch_12000.pt", "epoch_x.pt", "last.pt", ".epoch_0011.pt.9.part"):
        (folder.checkpoints / name).touch()
    assert [path.name for path in folder.epoch_files()] == ["epoch_0009.pt", "epoch_0010.pt", "epoch_12000.pt"]
    assert folder.epoch_file(9).name == "epoch_0009.pt"
    assert folder.has_checkpoints()


def test_half_written_files_are_tidied_away_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.tidy()
    folder.checkpoints.mkdir()
    for path in (
        tmp_path / ".summary.json.7.part",
        folder.checkpoints / ".last.pt.7.part",
        folder.last,
        tmp_path / "my.part",
    ):
        path.touch()
    folder.tidy()
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["last.pt", "my.part"]


def test_a_run_that_came_and_went_between_look_and_claim_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, claim = RunFolder(tmp_path / "run"), RunFolder.claim

    def late(self: RunFolder) -> None:
        """The other process has its recipe written, trains and is done with it, all before this one's claim."""
        self.recipe.write_text("name: theirs\n")
        self.metrics.write_text("epoch,step\n")
        claim(self)

    monkeypatch.setattr(RunFolder, "claim", late)
    with pytest.raises(RecipeError, match="already holds a run"):
        folder.create()
    folder.release()
    assert folder.metrics.read_text() == "epoch,step\n"
    monkeypatch.undo()
    other = RunFolder(tmp_path / "other")
    other.create()
    other.release()


def test_who_has_a_folder_is_known_without_claiming_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert RunFolder(run).in_use_by() is None
    holder = python(HOLD, run)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        (run / "recipe.yaml").write_text("x: 1\n")
        assert (RunFolder(run).in_use_by() or "").startswith(f"process {holder.pid} on ")
        with pytest.raises(InUseError, match=f"is in use by process {holder.pid}"):
            RunFolder(run).check_new()
    finally:
        holder.kill()
        holder.communicate()
    assert RunFolder(run).in_use_by() is None
    with pytest.raises(RecipeError, match="already holds a run"):
        RunFolder(run).check_new()
    # Asked by the process that has it, which must not lose its claim by that
    mine = RunFolder(run)
    mine.claim()
    assert RunFolder(run).in_use_by() is None
    other = python(HOLD.replace("folder.create()", "print(folder.in_use_by())"), run)
    assert f"process {os.getpid()} on " in other.communicate(timeout=60)[0]
    mine.release()


@pytest.mark.parametrize("name", ["summary.json", "events.jsonl", "checkpoints/best.pt"])
def test_a_folder_in_place_of_a_file_is_refused_with_the_claim(name: str, tmp_path: Path) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/plots").write_text("")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(StorageError, match="is a folder, and the run writes a file there") as caught:
        folder.claim()
    assert len(caught.value.faults) == 2
    (tmp_path / "run" / name).rmdir()
    (tmp_path / "run/plots").unlink()
    folder.claim()
    folder.release()
