"""Downloads over a real connection that breaks, stalls, forgets or lies end with the archive's bytes or with none."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from fetch_server import CASES, answer, contents, drop_after, md5, serving, set_archive, set_files

from fasttrain.data.fetch import Fetched, Patience, fetch, size_text
from fasttrain.errors import DataError, MachineError, StorageError

QUICK = Patience(retries=3, first_wait_seconds=0.01, timeout_seconds=5)
FILES = set_files()
ARCHIVE = set_archive(FILES)


class Told:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.moved: list[tuple[str, int, int]] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def advance(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.moved.append((what, done, total))

    @property
    def text(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def get(server, folder: Path, told: Told, blob: bytes = ARCHIVE, patience: Patience = QUICK) -> Fetched:
    return fetch("spleen", folder, told, server.address, md5(blob), patience)


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()} - {folder.name}


def test_a_sound_server(tmp_path: Path, told: Told) -> None:
    folder = tmp_path / "new" / "spleen"
    with serving(ARCHIVE) as server:
        fetched = get(server, folder, told)
        assert contents(folder) == FILES
        assert leftovers(folder) == set()
        assert (fetched.already_there, fetched.present.cases, fetched.present.unlabelled) == (False, CASES, 1)
        assert fetched.archive_bytes == len(ARCHIVE)
        assert len(server.asked) == 1
        assert "Range" not in server.asked[0]
        again = get(server, folder, told)
        assert again.already_there
        assert len(server.asked) == 1
    assert {what for what, _, _ in told.moved} == {"downloading spleen.tar.part", "checking", "unpacking"}
    assert json.loads((folder / ".fasttrain-fetched.json").read_text())["md5"] == md5(ARCHIVE)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"etag": None, "last_modified": "Wed, 01 Jan 2020 00:00:00 GMT"},
        {"etag": 'W/"weak"', "last_modified": "Wed, 01 Jan 2020 00:00:00 GMT"},
        {"etag": None},
    ],
    ids=["etag", "last-modified", "weak-etag", "size-alone"],
)
def test_a_dropped_connection_is_taken_up_where_it_was(tmp_path: Path, told: Told, how: dict) -> None:
    with serving(ARCHIVE, faults=[drop_after(100_000), drop_after(50_000)], **how) as server:
        get(server, tmp_path / "s", told)
        assert contents(tmp_path / "s") == FILES
        assert [asked.get("Range") for asked in server.asked] == [None, "bytes=100000-", "bytes=150000-"]
        condition = server.asked[1].get("If-Range")
        assert condition == (how.get("last_modified") if "etag" in how else '"one"')
        assert server.sent == len(ARCHIVE)
    assert "the connection ended after 97.7 KiB of" in told.text


def test_a_server_without_ranges_starts_over(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, ranges=False, faults=[drop_after(100_000)]) as server:
        get(server, tmp_path / "s", told)
        assert server.sent == len(ARCHIVE) + 100_000
    assert contents(tmp_path / "s") == FILES
    assert "starting over" in told.text


def test_a_server_that_never_tells_the_length(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, length=False) as server:
        get(server, tmp_path / "s", told)
    assert contents(tmp_path / "s") == FILES


@pytest.mark.parametrize("validator", [True, False])
def test_another_file_on_the_server_starts_over(tmp_path: Path, told: Told, validator: bool) -> None:
    other = set_archive(set_files(0.3))
    with serving(other, faults=[drop_after(100_000)], etag='"old"' if validator else None) as server:
        with pytest.raises(MachineError):
            get(server, tmp_path / "s", told, patience=Patience(0, 0.01, 5))
        assert (tmp_path / "s.tar.part").stat().st_size == 100_000
        # The file that is asked for has come to lie there, of another size
        server.blob, server.etag = ARCHIVE, '"new"' if validator else None
        note = tmp_path / "s.tar.part.json"
        note.write_text(json.dumps({**json.loads(note.read_text()), "md5": md5(ARCHIVE)}))
        get(server, tmp_path / "s", told)
    assert contents(tmp_path / "s") == FILES
    assert "starting over" in told.text


def test_a_part_of_another_checksum_is_begun_anew(tmp_path: Path, told: Told) -> None:
    (tmp_path / "s.tar.part").write_bytes(b"x" * 5000)
    with serving(ARCHIVE) as server:
        get(server, tmp_path / "s", told)
        assert "Range" not in server.asked[0]
    assert contents(tmp_path / "s") == FILES
    assert "is of another download" in told.text


def test_a_part_longer_than_the_file_is_begun_anew(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, faults=[drop_after(100_000)]) as server:
        with pytest.raises(MachineError):
            get(server, tmp_path / "s", told, patience=Patience(0, 0.01, 5))
        with open(tmp_path / "s.tar.part", "ab") as stream:
            stream.write(b"x" * len(ARCHIVE))
        get(server, tmp_path / "s", told)
    assert contents(tmp_path / "s") == FILES


def test_the_server_answers_416_when_its_file_has_shrunk(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, etag=None, faults=[drop_after(150_000)]) as server:
        with pytest.raises(MachineError):
            get(server, tmp_path / "s", told, patience=Patience(0, 0.01, 5))
        small = set_files(0.05)
        server.blob = set_archive(small)
        note = tmp_path / "s.tar.part.json"
        note.write_text(json.dumps({**json.loads(note.read_text()), "md5": md5(server.blob)}))
        get(server, tmp_path / "s", told, server.blob)
        assert [asked.get("Range") for asked in server.asked] == [None, "bytes=150000-", None]
    assert contents(tmp_path / "s") == small


def test_a_whole_part_needs_no_server(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, faults=[drop_after(len(ARCHIVE) - 1)]) as server:
        with pytest.raises(MachineError):
            get(server, tmp_path / "s", told, patience=Patience(0, 0.01, 5))
        with open(tmp_path / "s.tar.part", "ab") as stream:
            stream.write(ARCHIVE[-1:])
        address = server.address
    fetch("spleen", tmp_path / "s", told, address, md5(ARCHIVE), QUICK)
    assert contents(tmp_path / "s") == FILES


def test_wrong_content_fails_at_once_with_both_sums(tmp_path: Path, told: Told) -> None:
    with serving(b"not the archive" * 100) as server:
        with pytest.raises(DataError) as caught:
            get(server, tmp_path / "s", told)
        assert len(server.asked) == 1
        assert md5(server.blob) in str(caught.value)
    assert md5(ARCHIVE) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_seam_that_does_not_fit_is_tried_once_afresh(tmp_path: Path, told: Told) -> None:
    """The file changes under the same ETag, so that only the checksum can tell."""
    with serving(set_archive(set_files()), faults=[drop_after(100_000)]) as server:
        with pytest.raises(MachineError):
            get(server, tmp_path / "s", told, patience=Patience(0, 0.01, 5))
        server.blob = ARCHIVE
        get(server, tmp_path / "s", told)
        assert [asked.get("Range") for asked in server.asked] == [None, "bytes=100000-", None]
        assert contents(tmp_path / "s") == FILES
        shutil.rmtree(tmp_path / "s")

        server.faults, server.asked = [drop_after(100_000)], []
        server.blob = bytes(len(ARCHIVE))
        with pytest.raises(DataError, match=md5(server.blob)):
            get(server, tmp_path / "s", told)
        assert len(server.asked) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [500, 503, 429])
def test_answers_that_may_pass_are_tried_again(tmp_path: Path, told: Told, code: int) -> None:
    with serving(ARCHIVE, faults=[answer(code), answer(code)]) as server:
        get(server, tmp_path / "s", told)
        assert len(server.asked) == 3
    assert f"the server answers {code}" in told.text


@pytest.mark.parametrize("code", [404, 403, 410])
def test_answers_that_will_not_pass_end_it(tmp_path: Path, told: Told, code: int) -> None:
    with serving(ARCHIVE, faults=[answer(code)]) as server:
        with pytest.raises(MachineError, match=f"the server answers {code}"):
            get(server, tmp_path / "s", told)
        assert len(server.asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_redirects_are_followed_with_the_range(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, faults=[drop_after(100_000)]) as behind, serving(b"") as front:
        front.faults = [answer(302, Location=behind.address) for _ in range(2)]
        get(front, tmp_path / "s", told)
        assert behind.asked[1]["Range"] == "bytes=100000-"
    assert contents(tmp_path / "s") == FILES


def test_a_redirect_to_a_file_of_this_machine_is_not_followed(tmp_path: Path, told: Told) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(ARCHIVE)
    faults = [answer(302, Location=secret.as_uri())]
    with serving(b"", faults=faults) as server, pytest.raises(MachineError, match="302"):
        get(server, tmp_path / "s", told)


def test_a_login_page_does_not_cost_what_is_here(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, faults=[drop_after(100_000)]) as server:
        with pytest.raises(MachineError):
            get(server, tmp_path / "s", told, patience=Patience(0, 0.01, 5))
        server.content_type, server.ranges = "text/html; charset=utf-8", False
        with pytest.raises(MachineError, match="web page"):
            get(server, tmp_path / "s", told)
    assert (tmp_path / "s.tar.part").read_bytes() == ARCHIVE[:100_000]


def test_a_connection_that_is_always_lost_ends_in_one_sentence(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, ranges=False, faults=[drop_after(1000 * n) for n in range(1, 9)]) as server:
        with pytest.raises(MachineError) as caught:
            get(server, tmp_path / "s", told)
        assert len(server.asked) == 4
    assert "4 times in a row" in str(caught.value)
    assert "run it again to go on" in str(caught.value)
    assert str(tmp_path / "s.tar.part") in str(caught.value)
    assert leftovers(tmp_path / "s") == {"s.tar.part", "s.tar.part.json"}
    assert [line.rsplit("(", 1)[1] for line in told.said if "trying again" in line] == [
        "1 of 3)", "2 of 3)", "3 of 3)",
    ]  # fmt: skip


def test_progress_renews_patience(tmp_path: Path, told: Told) -> None:
    files = set_files(8.0)
    blob = set_archive(files)
    with serving(blob, block=1 << 18, faults=[drop_after(1_300_000) for _ in range(5)]) as server:
        get(server, tmp_path / "s", told, blob, Patience(1, 0.01, 5))
        assert server.sent == len(blob)
    assert contents(tmp_path / "s") == files


def test_silence_is_a_loss(tmp_path: Path, told: Told) -> None:
    told_so = pytest.raises(MachineError, match="nothing came within the time limit")
    with serving(ARCHIVE, seconds_a_block=2.0, block=100_000) as server, told_so:
        get(server, tmp_path / "s", told, patience=Patience(0, 0.01, 0.3))


def test_nobody_listens(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE) as server:
        address = server.address
    with pytest.raises(MachineError, match="cannot be reached"):
        fetch("spleen", tmp_path / "s", told, address, md5(ARCHIVE), Patience(1, 0.01, 1))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((2 * len(ARCHIVE) - 1, False), (2 * len(ARCHIVE) + 50_000, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        with serving(ARCHIVE) as server:
            if fits:
                get(server, tmp_path / "s", told)
                continue
            with pytest.raises(StorageError, match="free, and .* are needed"):
                get(server, tmp_path / "s", told)
        assert list(tmp_path.iterdir()) == []
    assert contents(tmp_path / "s") == FILES


def test_the_rest_of_an_archive_needs_only_room_for_the_rest(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with serving(ARCHIVE, faults=[drop_after(150_000)]) as server:
        with pytest.raises(MachineError):
            get(server, tmp_path / "s", told, patience=Patience(0, 0.01, 5))
        free = 2 * len(ARCHIVE) - 150_000
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        get(server, tmp_path / "s", told)
    assert contents(tmp_path / "s") == FILES


def test_room_for_the_contents_is_checked_exactly_before_unpacking(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files smaller than a block of the disk take more room than in the archive."""
    usage = shutil.disk_usage(tmp_path)
    files = set_files(0.01, cases=60)
    blob = set_archive(files)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * len(blob)))
    with serving(blob) as server, pytest.raises(StorageError, match="are needed"):
        get(server, tmp_path / "s", told, blob)
    # What was downloaded is worth keeping
    assert leftovers(tmp_path / "s") == {"s.tar.part", "s.tar.part.json"}
    monkeypatch.undo()
    fetch("spleen", tmp_path / "s", told, server.address, md5(blob), QUICK)
    assert contents(tmp_path / "s") == files


def test_two_fetches_do_not_collide(tmp_path: Path, told: Told) -> None:
    with serving(ARCHIVE, seconds_a_block=0.1) as server:
        first = threading.Thread(target=get, args=(server, tmp_path / "s", Told()))
        first.start()
        while not (tmp_path / "s.tar.part").exists():
            pass
        with pytest.raises(StorageError, match="another `fasttrain data fetch` is at work"):
            get(server, tmp_path / "s", told)
        get(server, tmp_path / "other", told)
        first.join()
    assert contents(tmp_path / "s") == contents(tmp_path / "other") == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"s", "other"}


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (7_100_000_000, "6.6 GiB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert size_text(size) == text
