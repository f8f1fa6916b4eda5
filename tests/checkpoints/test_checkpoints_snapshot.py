"""Copies of a state are of one moment, in their own memory, and file like the state itself; one job at a time writes them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from test_checkpoints_files import same, state, without_frame

from fasttrain.background import Background
from fasttrain.checkpoints import Snapshots, checkpoint_bytes, free_bytes, read_checkpoint, write_checkpoint


def test_a_copy_is_of_its_moment_and_keeps_types_shapes_and_layouts() -> None:
    given = state()
    copies = Snapshots()
    copy = copies.take(given).state()
    assert same(copy, given)
    assert copy["network"]["last"].is_contiguous(memory_format=torch.channels_last_3d)
    assert copy["network"]["turned"].stride() == given["network"]["turned"].stride()
    for tensor in given["network"].values():
        tensor.zero_()
    given["progress"]["step"] = 8
    given["optimizer"]["groups"][0]["lr"] = 0.0
    assert same(copy, state())


def test_a_copy_is_written_as_the_state_is(tmp_path: Path) -> None:
    """Each tensor alone, though many share a piece of memory."""
    size = write_checkpoint(tmp_path / "copy.pt", Snapshots().take(state()).state())
    assert size == write_checkpoint(tmp_path / "state.pt", state())
    assert same(without_frame(read_checkpoint(tmp_path / "copy.pt")), state())
    assert size <= checkpoint_bytes(state()) <= size + 20_000


def test_memory_is_used_again_where_it_fits_and_never_while_it_is_held() -> None:
    copies = Snapshots()
    first = copies.take(state(1))
    second = copies.take(state(2))
    assert same(first.state(), state(1)), "a copy that is being written must not change"
    place = first.memory[0].data_ptr()
    copies.give_back(first)
    third = copies.take(state(3))
    assert third.memory[0].data_ptr() == place
    assert same(third.state(), state(3))
    assert same(second.state(), state(2))
    copies.give_back(third)
    other = {"weights": torch.ones(3)}
    assert same(copies.take(other).state(), other)


def test_a_weight_with_two_names_is_copied_and_filed_once(tmp_path: Path) -> None:
    weight = torch.randn(100_000)
    given = {"one": weight, "other": weight.detach(), "part": weight[:10], "none": [torch.empty(0), torch.empty(0)]}
    snapshot = Snapshots().take(given)
    assert len(snapshot.memory) == 4
    assert same(snapshot.state(), given)
    size = write_checkpoint(tmp_path / "last.pt", snapshot.state())
    assert size < 450_000
    assert size <= checkpoint_bytes(given) <= size + 20_000
    assert same(without_frame(read_checkpoint(tmp_path / "last.pt")), given)


def test_tensors_larger_than_a_piece_of_memory() -> None:
    given = {"large": torch.arange(20_000_000), "small": torch.ones(3), "more": torch.arange(9_000_000)}
    assert same(Snapshots().take(given).state(), given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_of_a_gpu_are_behind_the_steps_before_and_ahead_of_the_next() -> None:
    weights = torch.zeros(50_000_000, device="cuda")
    wide = torch.randn(4, 3, 8, 8, 8, device="cuda").to(memory_format=torch.channels_last_3d)
    copies = Snapshots()
    matrix = torch.randn(8192, 8192, device="cuda")
    copies.give_back(copies.take({"weights": weights, "wide": wide}))
    torch.cuda.synchronize()
    for _ in range(20):
        matrix = matrix @ matrix
        matrix /= matrix.norm()
    weights.fill_(1.0)
    began = time.perf_counter()
    copy = copies.take({"weights": weights, "wide": wide})
    assert time.perf_counter() - began < 0.05, "the host waited"
    weights.fill_(2.0)
    wide.zero_()
    held = copy.state()
    assert (held["weights"] == 1.0).all()
    assert held["wide"].abs().sum() > 0
    assert held["wide"].is_contiguous(memory_format=torch.channels_last_3d)
    assert 0 < copy.copy_seconds < 1


def test_a_job_goes_on_beside_and_its_error_comes_with_its_result() -> None:
    background: Background[int] = Background("writer")
    go_on = threading.Event()
    background.give(lambda: 7 if go_on.wait(10) else 8)
    assert background.busy
    assert background.given
    go_on.set()
    assert background.fetch() == 7
    assert not background.given

    def fails() -> int:
        raise ValueError("no")

    background.give(fails)
    with pytest.raises(ValueError, match="no"):
        background.fetch()
    background.give(lambda: 9)
    assert background.fetch() == 9


def test_room_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    assert free is not None
    assert free > 0
    there = free_bytes(tmp_path / "not" / "there")
    assert there is not None
    assert abs(there - free) < free / 2
    assert free_bytes(tmp_path, reserved=False) <= free_bytes(tmp_path) + (1 << 30)
