"""Checkpoints come back bit for bit or not at all: round trips, damage of every kind, a writer that is killed."""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain.checkpoints import newest_good, read_checkpoint, write_checkpoint
from fasttrain.errors import StorageError


def state(step: int = 7) -> dict[str, Any]:
    torch.manual_seed(step)
    return {
        "network": OrderedDict(
            weight=torch.randn(3, 2, 3, 3, 3),
            half=torch.randn(5).to(torch.bfloat16),
            count=torch.tensor(2**40 + 1),
            mask=torch.tensor([True, False]),
            nothing=torch.empty(0, 4),
            turned=torch.randn(4, 3).t(),
            part=torch.randn(10, 10)[2:5, ::2],
            last=torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
            special=torch.tensor([float("nan"), float("inf"), -0.0]),
        ),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}]},
        "progress": {"step": step, "epoch": 2, "best": None, "zero": -0.0, "nan": float("nan"), "big": 10**30},
        "flags": [True, False, "text – ü", ""],
    }


def same(one: Any, other: Any) -> bool:
    """Bit equality, types included."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.contiguous().reshape(-1).view(torch.uint8).equal(other.contiguous().reshape(-1).view(torch.uint8))
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def without_frame(read: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in read.items() if key not in ("format", "checksum")}


def refusal(path: Path) -> str:
    with pytest.raises(StorageError) as caught:
        read_checkpoint(path)
    (sentence,) = caught.value.faults
    assert str(path) in sentence
    assert "\n" not in sentence
    return sentence


def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    written = write_checkpoint(path, state())
    assert written == path.stat().st_size
    assert os.listdir(tmp_path) == ["last.pt"]
    read = read_checkpoint(path)
    assert same(without_frame(read), state())
    assert read["network"]["last"].is_contiguous(memory_format=torch.channels_last_3d)
    assert same(torch.load(path, weights_only=True), read)


def test_the_state_that_was_given_is_not_changed(tmp_path: Path) -> None:
    given = state()
    write_checkpoint(tmp_path / "last.pt", given)
    assert same(given, state())


def test_what_the_optimiser_and_network_give_can_be_written(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3), torch.nn.BatchNorm3d(4))
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(2, 1, 4, 4, 4)).sum().backward()
    optimizer.step()
    whole = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    write_checkpoint(tmp_path / "last.pt", whole)
    read = read_checkpoint(tmp_path / "last.pt")
    assert same(read["network"], whole["network"])
    network.load_state_dict(read["network"])
    optimizer.load_state_dict(read["optimizer"])


@pytest.mark.parametrize(
    "value",
    [object(), Path("x"), {1, 2}, np.float64(0.5), np.float32(0.5), np.zeros(2), torch.float32, torch.device("cpu"),
     torch.__version__, b"bytes", 1j, {1.5: 2}, {(1, 2): 3}, [[object()]], {"a": {"b": print}}],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_need_pickle_is_refused_and_the_old_file_stays(tmp_path: Path, value: object) -> None:
    path = tmp_path / "last.pt"
    write_checkpoint(path, state(1))
    with pytest.raises(TypeError, match="a checkpoint"):
        write_checkpoint(path, {**state(2), "value": value})
    assert read_checkpoint(path)["progress"]["step"] == 1
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", [0xFF, 0x01, 0x80])
def test_a_flipped_byte_is_found_or_changes_nothing(tmp_path: Path, mask: int) -> None:
    path, damaged = tmp_path / "last.pt", tmp_path / "damaged.pt"
    small = state()
    write_checkpoint(path, small)
    content = path.read_bytes()
    draw = random.Random(mask)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        pickled = content.index(archive.read(next(m for m in members if m.filename.endswith("data.pkl"))))
        pickled_size = next(m.file_size for m in members if m.filename.endswith("data.pkl"))
    # Headers, the pickle that names the tensors, the end with the directory, and anywhere
    positions = {*range(0, 40, 4), *draw.sample(range(pickled, pickled + pickled_size), 60)}
    positions |= {*range(len(content) - 80, len(content), 5), *draw.sample(range(len(content)), 30)}
    for member in members:
        positions |= {member.header_offset, member.header_offset + 20}
    found = 0
    for position in sorted(positions):
        flipped = bytearray(content)
        flipped[position] ^= mask
        damaged.write_bytes(flipped)
        try:
            read = read_checkpoint(damaged)
        except StorageError:
            found += 1
        else:
            assert same(without_frame(read), small), f"byte {position} changed the state unnoticed"
    assert found > 30


def test_flipped_weights_are_always_found(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    weights = torch.arange(100, dtype=torch.float32) + 0.123
    write_checkpoint(path, {"weights": weights})
    content = path.read_bytes()
    start = content.index(weights.numpy().tobytes())
    for position in range(start, start + 400, 13):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert "damaged" in refusal(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_found(tmp_path: Path, share: float) -> None:
    path = tmp_path / "last.pt"
    write_checkpoint(path, state())
    content = path.read_bytes()
    size = int(len(content) * share)
    path.write_bytes(content[:size])
    assert f"is damaged: it is {size:,} bytes" in refusal(path)


@pytest.mark.parametrize("content", [b"just text\n", b"PK\x03\x04", b"\x80\x02.", bytes(1000), b"{}"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.pt").write_bytes(content)
    assert "damaged" in refusal(tmp_path / "last.pt")


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.target,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch", "torch legacy", "pickle"])
def test_code_in_a_file_is_never_run(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "last.pt", tmp_path / "executed"
    value = {"format": 1, "checksum": "0", "progress": Runs(str(target))}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=kind == "torch")
    assert "damaged" in refusal(path)
    assert not target.exists()
    torch.load(path, weights_only=False) if kind != "pickle" else pickle.loads(path.read_bytes())
    assert target.exists(), "the file would have run code: the test is a test"


def test_other_programs_and_formats_are_told_apart_from_damage(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, path)
    assert refusal(path) == f"{path} is no checkpoint of fasttrain"
    torch.save(torch.ones(3), path)
    assert refusal(path) == f"{path} is no checkpoint of fasttrain"
    write_checkpoint(path, state())
    torch.save({**torch.load(path, weights_only=True), "format": 99}, path)
    assert refusal(path) == f"checkpoint {path} has format 99; this fasttrain reads format 1"
    torch.save({**state(), "format": 1, "checksum": torch.ones(3)}, path)
    assert "checksum" in refusal(path)
    assert refusal(tmp_path / "none.pt").startswith("there is no checkpoint")
    assert refusal(tmp_path).startswith("there is no checkpoint")


def test_a_swapped_value_is_found(tmp_path: Path) -> None:
    """Sound zip, sound pickle, and still not what was written."""
    path = tmp_path / "last.pt"
    write_checkpoint(path, state())
    whole = torch.load(path, weights_only=True)
    whole["progress"]["zero"] = 0.0
    torch.save(whole, path)
    assert "checksum" in refusal(path)


def test_the_newest_good_one_is_by_its_step_not_its_time(tmp_path: Path) -> None:
    last, others = tmp_path / "last.pt", [tmp_path / f"{name}.pt" for name in "abcd"]
    for path, step in zip(others, (30, 50, 40), strict=False):
        write_checkpoint(path, state(step))
    write_checkpoint(last, state(60))
    os.utime(others[1], (1, 1))
    assert newest_good(last, others).path == last
    assert newest_good(last, others).damaged == ()

    last.write_bytes(last.read_bytes()[:1000])
    chosen = newest_good(last, others)
    assert (chosen.path, chosen.state["progress"]["step"]) == (others[1], 50)
    assert len(chosen.damaged) == 1
    assert str(last) in chosen.damaged[0]

    others[1].write_bytes(b"")
    chosen = newest_good(last, iter(others))
    assert chosen.state["progress"]["step"] == 40
    assert [str(path) in told for path, told in zip((last, others[1]), chosen.damaged, strict=True)] == [True, True]

    last.unlink()
    assert newest_good(last, others).damaged == chosen.damaged[1:]


def test_no_good_one_names_all(tmp_path: Path) -> None:
    last, other = tmp_path / "last.pt", tmp_path / "best.pt"
    with pytest.raises(StorageError, match="there is no checkpoint to go on from"):
        newest_good(last, [other])
    last.write_bytes(b"")
    other.write_bytes(b"x")
    with pytest.raises(StorageError) as caught:
        newest_good(last, [other])
    assert len(caught.value.faults) == 2


FILL = """
import re, sys, torch
from pathlib import Path
from fasttrain.checkpoints import write
from fasttrain.checkpoints import read_checkpoint, write_checkpoint
from fasttrain.errors import StorageError
path = Path(sys.argv[1]) / "last.pt"
write_checkpoint(path, {"weights": torch.ones(1000), "progress": {"step": 1}})
def refused(reason):
    try:
        write_checkpoint(path, {"weights": torch.ones(1_000_000), "progress": {"step": 2}})
    except StorageError as error:
        told = re.fullmatch(f"{path} cannot be written: {reason}; ([0-9,]+) bytes are needed, ([0-9,]+) are free", str(error))
        assert told, error
        needed, free = (int(one.replace(",", "")) for one in told.groups()[-2:])
        assert 4_000_000 < needed < 4_100_000 and 900_000 < free < 1 << 20, error
    else:
        raise SystemExit("four megabytes went into one")
refused("too little room")
asked, write.free_bytes = write.free_bytes, lambda folder, reserved=True: 1 << 40 if not hit else asked(folder)
hit = []
torch.save, save = lambda *given: (hit.append(1), save(*given)), torch.save
refused("(No space left on device|the disk took only a part of it)")
assert hit
assert read_checkpoint(path)["progress"]["step"] == 1
assert [each.name for each in path.parent.iterdir()] == ["last.pt"]
"""


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=1m none "$1" || exit 99; exec "$2" -c "$3" "$1"'
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", str(disk), sys.executable, FILL],
            capture_output=True,
            text=True,
            timeout=120,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


WRITE = """
import os, sys, torch
from pathlib import Path
from fasttrain.checkpoints import write_checkpoint
while sys.stdin.readline():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        out = os.fdopen(writing, "w")
        step = 0
        while True:
            write_checkpoint(Path(sys.argv[1]), {"weights": torch.full((500_000,), float(step)), "progress": {"step": step}})
            print(step, file=out, flush=True)
            step += 1
    os.close(writing)
    told = os.fdopen(reading)
    told.readline()
    print(child, flush=True)
    sys.stdin.readline()
    os.waitpid(child, 0)
    print((told.read().split() or [0])[-1], flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_sound_file(tmp_path: Path) -> None:
    """Twelve writers, each killed at another moment of a write; forked, so that torch is loaded once."""
    path = tmp_path / "last.pt"
    program = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    draw = random.Random(0)
    interrupted = 0
    try:
        for _ in range(12):
            program.stdin.write("begin\n")
            program.stdin.flush()
            child = int(program.stdout.readline())
            time.sleep(draw.uniform(0.0, 0.05))
            os.kill(child, signal.SIGKILL)
            program.stdin.write("killed\n")
            program.stdin.flush()
            told = int(program.stdout.readline().strip())
            read = read_checkpoint(path)
            assert read["progress"]["step"] in (told, told + 1)
            assert (read["weights"] == read["progress"]["step"]).all()
            interrupted += len(list(tmp_path.glob(".last.pt.*.part")))
            for left in tmp_path.glob(".*.part"):
                left.unlink()
    finally:
        program.kill()
        program.communicate()
    assert interrupted > 0, "no writer was killed within a write: the test proved nothing"
