"""Records of a run that are damaged are sentences, and a process that is killed while it writes leaves what was there."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fasttrain.errors import StorageError
from fasttrain.run_folder import RunFolder
from fasttrain.whole_files import read_record, write_json

NEEDED = {"format": int, "arguments.data": str}


def test_a_sound_record(tmp_path: Path) -> None:
    record = {"format": 1, "arguments": {"data": "x"}, "more": [1]}
    write_json(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json", NEEDED) == record


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no JSON document"),
        (b"{", "is no JSON document"),
        (b"\xff", "is no JSON document"),
        (b"[" * 100_000, "is no JSON document"),
        (b"[]", "has no proper 'format'"),
        (b"null", "has no proper 'format'"),
        (b'{"format": "1"}', "has no proper 'format'"),
        (b'{"format": 1}', "has no proper 'arguments.data'"),
        (b'{"format": 1, "arguments": 7}', "has no proper 'arguments.data'"),
        (b'{"format": 1, "arguments": {"data": null}}', "has no proper 'arguments.data'"),
    ],
)
def test_a_damaged_record_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(StorageError) as caught:
        read_record(path, NEEDED)
    (sentence,) = caught.value.faults
    assert str(path) in sentence
    assert said in sentence


def test_a_record_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="plan.json cannot be read: No such file"):
        read_record(tmp_path / "plan.json", NEEDED)


WRITE = """
import sys
from pathlib import Path
from fasttrain.whole_files import write_json
number = 0
while True:
    write_json(Path(sys.argv[1]), {"number": number, "again": [number] * 50_000})
    number += 1
    if number == 1:
        print("written", flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file_and_the_rest_is_tidied(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for attempt in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITE, str(folder.summary)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        time.sleep(0.013 * attempt)
        writer.kill()
        writer.communicate()
        record = json.loads(folder.summary.read_text())
        assert record["again"] == [record["number"]] * 50_000
    folder.tidy()
    assert os.listdir(tmp_path) == ["summary.json"]
