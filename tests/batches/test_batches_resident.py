"""Batches cut from volumes that lie on the device are those that a loader makes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain.batches import LoaderSource, Loading, Order, ResidentSource
from fasttrain.kernels.patches import Volumes, cut, plain
from fasttrain.samples import Grid, Sample

SHAPES = [(16, 16, 16), (22, 17, 30), (40, 16, 19)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Cases:
    """Noise of different shapes, in two channels."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        self.samples = [self._made(number, shape, dtype) for number, shape in enumerate(shapes)]
        self.closed = False

    def _made(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Sample:
        generator = torch.Generator().manual_seed(number)
        # Smooth along no axis: an image that is one voxel off is another image
        image = torch.randn(2, *shape, generator=generator).to(dtype)
        label = torch.randint(0, 3, (1, *shape), generator=generator, dtype=torch.uint8)
        centres = tuple((label.flatten() == value).nonzero().flatten().int() for value in (1, 2))
        grid = Grid(shape, np.eye(4))
        return Sample(f"case_{number}", image, label, centres, None, grid, grid)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def close(self) -> None:
        self.closed = True


def pair(tiny: Any, device: str, shapes: list[tuple[int, ...]] = SHAPES, **settings: Any) -> tuple[Any, Any]:
    """The first four batches of both sources."""
    off: dict[str, Any] = {"augment__flip": None, "augment__rotate": None, "augment__noise": None}
    recipe = tiny(
        training__batch_size=5, data__source={"kind": "nnunet"}, data__channels=["a", "b"], **{**off, **settings}
    ).recipe
    order = Order(len(shapes), 1, 3)
    loader = LoaderSource(recipe, Cases(shapes), order, torch.device("cpu"), Loading())
    resident = ResidentSource(recipe, Cases(shapes), order, torch.device(device))
    return list(islice(loader.batches(7), 4)), list(islice(resident.batches(7), 4))


def same(one: Any, other: Any, tolerance: float) -> None:
    assert one.names == other.names
    assert one.positions == other.positions
    assert (one.image - other.image.cpu()).abs().max() <= tolerance
    # Half-way between two voxels the nearest one hangs on the last bit
    assert (one.label != other.label.cpu()).float().mean() <= (1e-3 if tolerance else 0)
    assert other.label.dtype == torch.uint8


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_crops_for_the_same_draws(tiny: Any, device: str) -> None:
    for one, other in zip(*pair(tiny, device), strict=True):
        same(one, other, 0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "augment",
    [
        {"flip": 1.0},
        {"rotate": 0.7, "scale": 0.7},
        {"flip": 0.5, "rotate": 1.0},
        {"elastic": 0.7, "flip": 0.5, "rotate": 0.5},
        {"gamma": 0.5, "blur": 0.5, "contrast": 0.5},
    ],
)
def test_the_same_augmentation(tiny: Any, device: str, augment: dict[str, float]) -> None:
    settings = {f"augment__{name}": {"probability": probability} for name, probability in augment.items()}
    for one, other in zip(*pair(tiny, device, **settings), strict=True):
        same(one, other, 2e-3)


def test_planes(tiny: Any) -> None:
    settings = {
        "patch__size": [16, 16],
        "data__spacing": None,
        "augment__flip": {"probability": 0.5, "axes": [0, 1]},
        "augment__rotate": {"probability": 0.5},
        "augment__elastic": {"probability": 0.5},
    }
    for one, other in zip(*pair(tiny, "cpu", [(20, 24), (16, 31)], **settings), strict=True):
        assert other.image.shape == (5, 2, 16, 16)
        same(one, other, 2e-3)


def test_the_cases_are_given_up_once_they_are_copied(tiny: Any) -> None:
    recipe = tiny(data__source={"kind": "nnunet"}, data__channels=["a", "b"]).recipe
    cases = Cases(SHAPES, torch.float16)
    told: list[tuple[int, int]] = []
    source = ResidentSource(
        recipe, cases, Order(3, 1, 0), torch.device("cpu"), lambda done, all_: told.append((done, all_))
    )
    assert cases.closed
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert source.volumes is not None
    assert source.volumes.images.dtype == torch.float16
    image, label = source.volumes.volume(2)
    assert torch.equal(image, cases.samples[2].image)
    assert torch.equal(label, cases.samples[2].label)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernel_reads_what_slices_and_grid_sample_read(channels: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [(19, 10, 41), (12, 28, 9)]
    voxels = [int(np.prod(one)) for one in lengths]
    volumes = Volumes(
        torch.randn(sum(voxels) * channels, device="cuda").to(dtype),
        torch.randint(0, 5, (sum(voxels),), device="cuda", dtype=torch.uint8),
        torch.tensor([0, voxels[0]], device="cuda"),
        torch.tensor(lengths, device="cuda", dtype=torch.int32),
        channels,
    )
    cases = torch.tensor([0, 1, 1, 0], device="cuda", dtype=torch.int32)
    corners = torch.tensor([[1, 2, 3], [2, 0, 1], [0, 0, 0], [13, 3, 33]], device="cuda", dtype=torch.int32)
    matrices = torch.eye(3, device="cuda") + torch.randn(4, 3, 3, device="cuda") * 0.2
    size = (6, 7, 8)
    for field in (None, torch.randn(4, 3, *size, device="cuda")):
        ours, theirs = (one(volumes, cases, corners, matrices, size, field) for one in (cut, plain))
        assert (ours[0] - theirs[0]).abs().max() < 1e-4
        assert (ours[1] != theirs[1]).float().mean() < 1e-3
