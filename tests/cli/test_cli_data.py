"""`data fetch` as it is typed: what goes to stdout and stderr, usage, exit codes, the bar on a terminal."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from fasttrain.cli import main
from fasttrain.cli.fetch_view import BarFetchView, PlainFetchView, open_fetch_view
from fasttrain.data.location import DECATHLON_TASKS
from fasttrain.recipe import resolve


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    document = {"training": [{"image": "imagesTr/a.nii.gz", "label": "labelsTr/a.nii.gz"}], "test": []}
    files = {
        "dataset.json": json.dumps(document).encode(),
        "imagesTr/a.nii.gz": b"image",
        "labelsTr/a.nii.gz": b"label",
    }
    path = tmp_path / "Task02_Heart.tar"
    with tarfile.open(path, "w") as tar:
        for name, blob in files.items():
            info = tarfile.TarInfo(f"Task02_Heart/{name}")
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
    return path


@pytest.fixture
def fetch(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(exit code, stdout, stderr) of `data fetch`, in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("FASTTRAIN_DATA", raising=False)

    def called(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main.run(["data", "fetch", *map(str, arguments)])
        return (ended.value.code or 0, *capsys.readouterr())

    return called


def origin(archive: Path) -> list[str]:
    return ["--from", archive.as_uri(), "--md5", hashlib.md5(archive.read_bytes()).hexdigest()]


def test_where_the_recipes_look(fetch, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here" / "data" / "heart"
    code, out, err = fetch("heart", *origin(archive))
    assert (code, out) == (0, f"{here}\n")
    assert (here / "dataset.json").is_file()
    assert "Task02_Heart: 1 case with and 0 without a label" in err
    assert "CC BY-SA 4.0" in err
    monkeypatch.setenv("FASTTRAIN_DATA", str(tmp_path / "sets"))
    assert fetch("heart", *origin(archive))[:2] == (0, f"{tmp_path / 'sets' / 'heart'}\n")
    code, out, err = fetch("heart", "--to", tmp_path / "given", *origin(archive))
    assert (code, out) == (0, f"{tmp_path / 'given'}\n")
    assert f"train on it with: fasttrain train --recipe heart --data {tmp_path / 'given'}" in err


def test_every_set_that_can_be_fetched_has_a_recipe() -> None:
    for name, task in DECATHLON_TASKS.items():
        recipe = resolve(name).recipe
        assert (recipe.data_name, recipe.data.source.kind) == (name, "decathlon"), task


def test_a_train_that_lacks_its_data_names_the_command_that_mends_it(
    fetch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(["train", "--recipe", "hippocampus", "--device", "cpu", "--dry-run"])
    assert ended.value.code == 3
    assert "fetch it with `fasttrain data fetch hippocampus`" in capsys.readouterr().err


def test_one_document(fetch, archive: Path, tmp_path: Path) -> None:
    code, out, _ = fetch("heart", "--json", *origin(archive))
    assert code == 0
    assert json.loads(out) == {
        "name": "heart",
        "task": "Task02_Heart",
        "folder": str(tmp_path / "here" / "data" / "heart"),
        "cases": 1,
        "unlabelled_cases": 0,
        "already_there": False,
        "address": archive.as_uri(),
        "md5": origin(archive)[-1],
        "archive_bytes": archive.stat().st_size,
    }
    code, out, err = fetch("heart", "--json")
    assert code == 0
    assert json.loads(out)["already_there"] is True
    assert "holds the whole set already" in err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["spleeen"], 2, "did you mean spleen?"),
        (["liver"], 2, "there are spleen, hippocampus, heart, brain-tumor"),
        ([], 2, "NAME"),
        (["heart", "--from", "ftp://x/y"], 2, "https://"),
        (["heart", "--md5", "12"], 2, "32 hexadecimal digits"),
        (["heart", "--retries", "-1"], 2, "--retries"),
        (["heart", "--md5", "0" * 32, "--from", "file:///nowhere/x.tar"], 3, "does not exist"),
        (["heart", "--md5", "0" * 32, "--from", "http://127.0.0.1:9/x", "--retries", "0"], 4, "cannot be reached"),
        (
            ["heart", "--md5", "0" * 32, "--from", "http://127.0.0.1:9/x", "--to", "/proc/none/x"],
            6,
            "cannot be written",
        ),
    ],
)
def test_faults(
    fetch, arguments: list[str], code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    found, out, err = fetch(*arguments)
    assert (found, out) == (code, "")
    assert told in err
    assert err.splitlines()[-1].startswith("fasttrain: ")
    assert sum(line.startswith("fasttrain: ") for line in err.splitlines()) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_help_names_every_set(fetch) -> None:
    code, out, _ = fetch("--help")
    assert code == 0
    for name in DECATHLON_TASKS:
        assert name in out


def test_plain_lines_have_a_sign_of_life() -> None:
    stream = io.StringIO()
    view = PlainFetchView(stream, heartbeat_seconds=0.05)
    view.say("begun\nand\x1b[2J")
    view.advance("downloading x", 3 << 20, 7 << 20)
    time.sleep(0.2)
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "begun and[2J"
    assert any("downloading x, MiB: 3 of 7" in line for line in lines[1:])
    assert "\r" not in stream.getvalue()


def test_a_bar_on_a_terminal() -> None:
    stream = io.StringIO()
    view = BarFetchView(Console(file=stream, force_terminal=True, width=100))
    view.advance("downloading [bold]x", 1 << 20, 4 << 20)
    view.say("a [red]sentence")
    view.advance("downloading [bold]x", 2 << 20, 4 << 20)
    view.advance("downloading [bold]x", 0, 4 << 20)
    view.advance("checking", 4 << 20, 4 << 20)
    view.close()
    text = stream.getvalue()
    assert "a [red]sentence" in text
    assert "checking" in text
    assert "4.0/4.0 MiB" in text
    assert text.rstrip().endswith("\x1b[?25h")
    view.close()


def test_the_bar_is_only_for_terminals_that_can_draw() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, environ, kind in (
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, PlainFetchView),
        (Terminal(), {"TERM": "dumb"}, PlainFetchView),
        (Terminal(), {}, PlainFetchView),
        (Terminal(), {"TERM": "xterm"}, BarFetchView),
    ):
        view = open_fetch_view(stream, environ)
        view.close()
        assert type(view) is kind
