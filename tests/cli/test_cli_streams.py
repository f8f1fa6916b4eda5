"""Where stderr cannot be written the exit code still tells what happened; what is written there is one line a fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


def fasttrain(redirection: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    script = f'exec "{sys.executable}" -m fasttrain "$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", script, "bash", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        # Wherever the test was started: the package may not be installed
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


@needs_full
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["train", "-r", "nosuch"], 2),
        (["trian"], 2),
        (["recipes"], 2),
        (["recipes", "list", "--debug", "--nothing"], 2),
        (["train", "-r", "nosuch", "--debug"], 2),
        (["recipes", "copy", "demo", "nowhere/x.yaml"], 6),
        (["recipes", "list"], 0),
    ],
)
def test_a_full_stderr_does_not_change_the_exit_code(arguments: list[str], code: int, tmp_path: Path) -> None:
    assert fasttrain("2>/dev/full", *arguments, folder=tmp_path).returncode == code


@needs_full
def test_both_streams_full(tmp_path: Path) -> None:
    assert fasttrain(">/dev/full 2>&1", "recipes", "list", folder=tmp_path).returncode == 6
    assert fasttrain("2>/dev/full", "recipes", "validate", "demo", folder=tmp_path).returncode == 6


def test_a_stderr_that_nobody_reads_does_not_change_the_exit_code(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fasttrain", "train", "-r", "nosuch"],
            stderr=writing,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            cwd=tmp_path,
        )
    finally:
        os.close(writing)
    assert done.returncode == 2


def test_a_key_with_control_characters_stays_on_its_line(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text('extends: demo\n"a\\nb\\e[31mred": 1\n')
    done = fasttrain("", "recipes", "validate", "odd.yaml", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "fasttrain: odd.yaml:2: a b[31mred: no such key\n"


def test_a_library_error_of_many_lines_is_one(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from fasttrain.cli import main

    def fails() -> None:
        raise RuntimeError("first\n  second\x1b[2J\nthird")

    monkeypatch.setattr("fasttrain.cli.recipe_commands.bundled_recipes", fails)
    with pytest.raises(SystemExit) as ended:
        main.run(["recipes", "list"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (1, "", 1)
    assert "\x1b" not in err


def test_a_copy_onto_a_full_disk_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = """
    mount -t tmpfs -o size=4k none "$1" || exit 99
    head -c 4096 /dev/zero > "$1/fill"
    "$2" -m fasttrain recipes copy demo "$1/mine.yaml" && exit 98
    code=$?
    ls "$1"
    exit $code
    """
    try:
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", script, "bash", str(disk), sys.executable],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 6
    assert done.stderr == f"fasttrain: {disk}/mine.yaml cannot be written: No space left on device\n"
    assert done.stdout == "fill\n"
