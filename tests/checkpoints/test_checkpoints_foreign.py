"""Checkpoints whose frame is odd are sentences, and tensors of less usual kinds come back or are refused before a write."""

from pathlib import Path

import pytest
import torch

from fasttrain.checkpoints import read_checkpoint, write_checkpoint
from fasttrain.checkpoints.checksum import checksum
from fasttrain.errors import StorageError


@pytest.mark.parametrize("version", [torch.tensor([1, 2]), torch.tensor(1), True, 1.0, "1", None, [1], {"a": 1}])
def test_a_format_that_is_no_number_is_another_format(tmp_path: Path, version: object) -> None:
    path = tmp_path / "last.pt"
    whole = {"format": version, "progress": {"step": 1}}
    torch.save({**whole, "checksum": checksum(whole)}, path)
    with pytest.raises(StorageError, match="this fasttrain reads format 1"):
        read_checkpoint(path)
    write_checkpoint(path, {"progress": {"step": 1}})
    assert read_checkpoint(path)["format"] == 1


@pytest.mark.parametrize(
    "tensor",
    [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 2, torch.ones(1).expand(5),
     torch.ones(3, dtype=torch.float16), torch.ones(2, 2, dtype=torch.complex64), torch.tensor([255], dtype=torch.uint8)],
    ids=["parameter", "in a graph", "expanded", "half", "complex", "byte"],
)  # fmt: skip
def test_less_usual_tensors_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    write_checkpoint(tmp_path / "last.pt", {"value": tensor})
    read = read_checkpoint(tmp_path / "last.pt")["value"]
    assert read.dtype == tensor.dtype
    assert torch.equal(read, tensor)


def test_order_and_types_are_part_of_the_checksum() -> None:
    digests = [
        checksum(state)
        for state in (
            {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": True, "b": 2}, {"a": 1.0, "b": 2}, {"a": "1", "b": 2},
            {"a": [1, 2]}, {"a": [[1], 2]}, {"a": {1: 2}}, {"a": {"1": 2}}, {"a": torch.zeros(2, 3)},
            {"a": torch.zeros(3, 2)}, {"a": torch.zeros(6)}, {"a": torch.zeros(6, dtype=torch.int32)}, {"a": None}, {},
        )
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert checksum({"a": 1}) == checksum({"a": 1, "checksum": "x"})


def test_bytes_after_the_end_are_found_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"value": torch.arange(10)})
    content = path.read_bytes()
    for more in (b"x", bytes(5000), content):
        path.write_bytes(content + more)
        value, told = torch.arange(10), str(path)
        try:
            value = read_checkpoint(path)["value"]
        except StorageError as error:
            told = str(error)
        assert torch.equal(value, torch.arange(10))
        assert str(path) in told
