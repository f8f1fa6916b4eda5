"""A real `fasttrain data fetch` that is killed or told to stop half-way, and started again, ends with the right bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fetch_server import CASES, Server, contents, md5, serving, set_archive, set_files

FILES = set_files(1.0)
ARCHIVE = set_archive(FILES)


def start(server: Server, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "fasttrain",
        "data",
        "fetch",
        "spleen",
        "--to",
        str(folder),
        "--from",
        server.address,
    ]
    return subprocess.Popen(
        [*command, "--md5", md5(ARCHIVE), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        env={**os.environ, "no_proxy": "*", "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def wait_for(part: Path, size: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not part.exists() or part.stat().st_size < size:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("ranges", [True, False])
def test_killed_half_way_and_started_again(tmp_path: Path, ranges: bool) -> None:
    folder, part = tmp_path / "spleen", tmp_path / "spleen.tar.part"
    with serving(ARCHIVE, seconds_a_block=0.02, ranges=ranges) as server:
        for size in (200_000, 500_000) if ranges else (200_000,):
            process = start(server, folder)
            wait_for(part, size, process)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            process.communicate()
            assert not folder.exists()
            assert ARCHIVE.startswith(part.read_bytes())
        server.seconds_a_block = 0.0
        process = start(server, folder, "--json")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert contents(folder) == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"spleen"}
    document = json.loads(out)
    assert (document["md5"], document["cases"], document["archive_bytes"]) == (md5(ARCHIVE), CASES, len(ARCHIVE))
    assert ("going on after" in err) == ranges
    assert "\r" not in err
    assert "\x1b" not in err
    if ranges:
        assert [int(asked.get("Range", "bytes=0-")[6:-1]) >= size for asked, size in zip(
            server.asked, (0, 200_000, 500_000), strict=True
        )] == [True] * 3  # fmt: skip


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_stop_keeps_the_part_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder, part = tmp_path / "spleen", tmp_path / "spleen.tar.part"
    with serving(ARCHIVE, seconds_a_block=0.02) as server:
        process = start(server, folder)
        wait_for(part, 200_000, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == code
        assert out == ""
        assert "run the same command again to go on" in err.splitlines()[-1]
        assert "Traceback" not in err
        assert {path.name for path in tmp_path.iterdir()} == {"spleen.tar.part", "spleen.tar.part.json"}
        kept = part.stat().st_size
        server.seconds_a_block = 0.0
        assert start(server, folder).wait(60) == 0
        assert server.asked[1]["Range"] == f"bytes={kept}-"
    assert contents(folder) == FILES


def test_two_processes_do_not_collide(tmp_path: Path) -> None:
    folder = tmp_path / "spleen"
    with serving(ARCHIVE, seconds_a_block=0.05) as server:
        first = start(server, folder)
        wait_for(tmp_path / "spleen.tar.part", 1, first)
        second = start(server, folder)
        _, err = second.communicate(timeout=60)
        assert second.returncode == 6
        assert "another `fasttrain data fetch` is at work" in err
        first.communicate(timeout=60)
    assert first.returncode == 0
    assert contents(folder) == FILES
