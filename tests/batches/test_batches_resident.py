"""Batches cut from volumes that lie on the device are those that a loader makes."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain.batches import LoaderSource, Loading, Order, ResidentSource, device_room, fill, resident_volumes
from fasttrain.errors import DataError
from fasttrain.kernels.patches import Parts, Volumes, cut, plain
from fasttrain.kernels.rows import INTERPRETED
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


def bytes_of(shapes: list[tuple[int, ...]], channels: int = 2, item_bytes: int = 4) -> int:
    """What volumes take."""
    return sum(int(np.prod(shape)) for shape in shapes) * (channels * item_bytes + 1)


def pair(
    tiny: Any, device: str, shapes: list[tuple[int, ...]] = SHAPES, on_device: int | None = None, **settings: Any
) -> tuple[Any, Any]:
    """The first four batches of both sources; `on_device`: so many of the cases have room there, the others stay on the host."""
    off: dict[str, Any] = {"augment__flip": None, "augment__rotate": None, "augment__noise": None}
    recipe = tiny(
        training__batch_size=5, data__source={"kind": "nnunet"}, data__channels=["a", "b"], **{**off, **settings}
    ).recipe
    order = Order(len(shapes), 1, 3)
    loader = LoaderSource(recipe, Cases(shapes), order, torch.device("cpu"), Loading())
    there = torch.device(device)
    filled = fill(Cases(shapes), recipe, there, bytes_of(shapes[:on_device]))
    assert len(filled.rest) == (0 if on_device is None else len(shapes) - on_device)
    resident = ResidentSource(recipe, filled, order, there)
    made = list(islice(loader.batches(7), 4)), list(islice(resident.batches(7), 4))
    resident.close()
    return made


def same(one: Any, other: Any, tolerance: float) -> None:
    assert one.names == other.names
    assert one.positions == other.positions
    assert (one.image - other.image.cpu()).abs().max() <= tolerance
    # Half-way between two voxels the nearest one hangs on the last bit
    assert (one.label != other.label.cpu()).float().mean() <= (1e-3 if tolerance else 0)
    assert other.label.dtype == torch.uint8


@pytest.mark.parametrize("on_device", [None, 2, 1, 0])
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_crops_for_the_same_draws(tiny: Any, device: str, on_device: int | None) -> None:
    for one, other in zip(*pair(tiny, device, on_device=on_device), strict=True):
        same(one, other, 0.0)


@pytest.mark.parametrize("on_device", [None, 1])
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
def test_the_same_augmentation(tiny: Any, device: str, augment: dict[str, float], on_device: int | None) -> None:
    settings = {f"augment__{name}": {"probability": probability} for name, probability in augment.items()}
    for one, other in zip(*pair(tiny, device, on_device=on_device, **settings), strict=True):
        same(one, other, 2e-3)


@pytest.mark.parametrize("on_device", [None, 1])
def test_planes(tiny: Any, on_device: int | None) -> None:
    settings = {
        "patch__size": [16, 16],
        "data__spacing": None,
        "augment__flip": {"probability": 0.5, "axes": [0, 1]},
        "augment__rotate": {"probability": 0.5},
        "augment__elastic": {"probability": 0.5},
    }
    for one, other in zip(*pair(tiny, "cpu", [(20, 24), (16, 31)], on_device, **settings), strict=True):
        assert other.image.shape == (5, 2, 16, 16)
        same(one, other, 2e-3)


def stored(tiny: Any, dtype: str = "float32", **more: Any) -> Any:
    return tiny(data__source={"kind": "nnunet"}, data__channels=["a", "b"], data__storage_dtype=dtype, **more).recipe


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_cases_are_given_up_once_they_are_copied(tiny: Any, device: str, threads: int) -> None:
    cases = Cases(SHAPES, torch.float16)
    progress: list[tuple[int, int]] = []
    told: list[tuple[str, str]] = []
    room = bytes_of(SHAPES, item_bytes=2)
    filled = fill(
        cases, stored(tiny, "float16"), torch.device(device), room, threads, lambda *one: progress.append(one),
        lambda *one: told.append(one),
    )  # fmt: skip
    assert cases.closed
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert told == [("gpu cache: 3 cases, 134 KiB on the GPU", "info")]
    assert filled.volumes.images.dtype == torch.float16
    assert filled.volumes.labels.dtype == torch.uint8
    assert filled.tables._voxels.dtype in (np.int32, np.uint16)
    assert (len(filled), filled.used_bytes, filled.rest) == (3, room, {})
    for number, sample in enumerate(cases.samples):
        image, label = filled.volumes.volume(number)
        assert torch.equal(image.cpu(), sample.image)
        assert torch.equal(label.cpu(), sample.label)


def limited(monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    """The device gives no piece of memory larger than that."""

    def given(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if count * dtype.itemsize > most_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return torch.empty(count, dtype=dtype, device=device)

    monkeypatch.setattr(device_room, "memory_of", given)


def test_a_device_without_room_keeps_what_fits_and_says_so(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = stored(tiny, training__batch_size=5)
    boxes = resident_volumes.slot_bytes(recipe)
    # Room for images of the boxes and of the first two cases
    limited(monkeypatch, (boxes + bytes_of(SHAPES[:2])) // 9 * 8)
    told: list[tuple[str, str]] = []
    filled = fill(Cases(SHAPES), recipe, torch.device("cpu"), bytes_of(SHAPES), told=lambda *one: told.append(one))
    assert 0 < len(filled.rest) < 3
    (warning,) = [text for text, level in told if level == "warning"]
    assert "had no room for 241 KiB of volumes when they came" in warning
    assert "the rest streams from pinned memory" in warning
    assert "of 3 cases (36 KiB) on the GPU, the rest from pinned memory" in told[-1][0]
    source = ResidentSource(recipe, filled, Order(3, 1, 3), torch.device("cpu"))
    loader = LoaderSource(recipe, Cases(SHAPES), Order(3, 1, 3), torch.device("cpu"), Loading())
    for one, other in islice(zip(loader.batches(0), source.batches(0), strict=False), 4):
        assert torch.equal(one.label, other.label)
    source.close()


def test_a_device_without_room_for_two_batches_is_out_of_memory(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1000)
    with pytest.raises(torch.OutOfMemoryError):
        fill(Cases(SHAPES), stored(tiny), torch.device("cpu"), bytes_of(SHAPES))


def test_room_that_a_crop_left_over_is_given_back(tiny: Any) -> None:
    filled = fill(Cases(SHAPES), stored(tiny), torch.device("cpu"), 3 * bytes_of(SHAPES))
    assert filled.volumes.labels.numel() == sum(int(np.prod(shape)) for shape in SHAPES)
    assert torch.equal(filled.volumes.volume(1)[0], Cases(SHAPES).samples[1].image)


def test_every_faulty_case_is_told_at_once(tiny: Any) -> None:
    class Faulty(Cases):
        def __getitem__(self, index: int) -> Sample:
            if index != 1:
                raise DataError(f"case_{index} is cut short")
            return super().__getitem__(index)

    with pytest.raises(DataError) as caught:
        fill(Faulty(SHAPES), stored(tiny), torch.device("cpu"), bytes_of(SHAPES), 2)
    assert caught.value.faults == ("case_0 is cut short", "case_2 is cut short")


@pytest.mark.parametrize("device", DEVICES)
def test_boxes_from_any_position_on_and_for_longer_than_there_are_slots(tiny: Any, device: str) -> None:
    """What a resume sees is what an unbroken run saw; slots are written again while earlier batches are still held."""
    recipe = stored(tiny, training__batch_size=3, augment__flip=None, augment__rotate=None, augment__noise=None)
    there, order = torch.device(device), Order(3, 2, 1)
    whole = fill(Cases(SHAPES), recipe, there, bytes_of(SHAPES))
    part = fill(Cases(SHAPES), recipe, there, bytes_of(SHAPES[:1]))
    one = list(islice(ResidentSource(recipe, whole, order, there).batches(0), 24))
    for first in (0, 10):
        source = ResidentSource(recipe, part, order, there, threads=3)
        other = list(islice(source.batches(3 * first), 24 - first))
        source.close()
        for before, after in zip(one[first:], other, strict=True):
            assert before.names == after.names
            assert torch.equal(before.image, after.image)
            assert torch.equal(before.label, after.label)


def test_a_batch_that_had_to_be_waited_for_is_known(tiny: Any) -> None:
    recipe = stored(tiny)
    filled = fill(Cases(SHAPES), recipe, torch.device("cpu"), 0)
    source = ResidentSource(recipe, filled, Order(3, 1, 1), torch.device("cpu"), threads=1)
    opened, draw = threading.Event(), source.maker.draw

    def slow(position: int, tables: Any) -> Any:
        if position >= 2 * recipe.training.batch_size:
            opened.wait(20)
        return draw(position, tables)

    source.maker.draw = slow  # type: ignore[method-assign]
    stream = source.batches(0)
    next(stream)
    timer = threading.Timer(0.3, opened.set)
    timer.start()
    next(stream)
    assert source.waited_for
    for _ in range(200):
        time.sleep(0.01)
        next(stream)
        if not source.waited_for:
            break
    assert not source.waited_for
    timer.join()
    source.close()


@pytest.mark.gpu
def test_a_step_in_a_cuda_graph_learns_from_streamed_boxes_what_it_learns_from_resident_volumes(tiny: Any) -> None:
    from fasttrain.engine.optimisation.optim import build_optimizer
    from fasttrain.engine.step import Precision, Step
    from fasttrain.losses import build_loss
    from fasttrain.recipe.training_spec import CrossEntropyLossSpec, SGDSpec

    recipe = stored(tiny, training__batch_size=4)
    there, order, found = torch.device("cuda"), Order(3, 1, 1), []
    for room in (bytes_of(SHAPES), bytes_of(SHAPES[:1])):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Conv3d(2, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(8, 3, 1))
        network.to(there)
        loss = build_loss(CrossEntropyLossSpec(kind="cross_entropy"))
        optimizer = build_optimizer(SGDSpec(kind="sgd"), network.parameters())
        step = Step(network, loss, optimizer, Precision("cuda", None, None), 1, captured=True)
        source = ResidentSource(recipe, fill(Cases(SHAPES), recipe, there, room), order, there)
        batches = source.batches(0)
        found.append([float(step(batches, 1e-2, number)) for number in range(30)])
        assert step.warning is None
        source.close()
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("label_type", "most"), [(torch.uint8, 5), (torch.int16, 2048)])
def test_the_kernel_reads_what_slices_and_grid_sample_read(
    channels: int, dtype: torch.dtype, label_type: torch.dtype, most: int
) -> None:
    torch.manual_seed(0)
    lengths = [(19, 10, 41), (12, 28, 9)]
    voxels = [int(np.prod(one)) for one in lengths]
    volumes = Volumes(
        torch.randn(sum(voxels) * channels, device="cuda").to(dtype),
        torch.randint(0, most, (sum(voxels),), device="cuda", dtype=label_type),
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


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("device", [DEVICES[1]] if not INTERPRETED else ["cpu"])
def test_the_kernel_reads_cases_of_other_memory(device: str, channels: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [(9, 10, 21), (12, 8, 9), (8, 8, 8)]
    voxels = [int(np.prod(one)) for one in lengths]
    image = torch.randn(sum(voxels) * channels, device=device).to(dtype)
    label = torch.randint(0, 5, (sum(voxels),), device=device, dtype=torch.uint8)
    starts = [0, voxels[0], voxels[0] + voxels[1]]
    table = torch.tensor(lengths, device=device, dtype=torch.int32)
    whole = Volumes(image, label, torch.tensor(starts, device=device), table, channels)
    # The case in the middle lies in memory of its own, behind one voxel
    other = (
        torch.cat([image[:channels], image[voxels[0] * channels : starts[2] * channels]]),
        torch.cat([label[:1], label[voxels[0] : starts[2]]]),
    )
    own = (
        torch.cat([image[: voxels[0] * channels], image[starts[2] * channels :]]),
        torch.cat([label[: voxels[0]], label[starts[2] :]]),
    )
    away = [
        torch.tensor([0, (far.data_ptr() - near.data_ptr()) // near.element_size(), 0], device=device)
        for far, near in zip(other, own, strict=True)
    ]
    parts = Parts((0, 1, 0), (own, other), *away)
    parted = Volumes(*own, torch.tensor([0, 1, voxels[0]], device=device), table, channels, parts)
    cases = torch.tensor([0, 1, 2, 1], device=device, dtype=torch.int32)
    corners = torch.tensor([[1, 2, 3], [2, 0, 1], [0, 0, 0], [6, 1, 2]], device=device, dtype=torch.int32)
    matrices = torch.eye(3, device=device) + torch.randn(4, 3, 3, device=device) * 0.2
    for one, two in zip(*(cut(some, cases, corners, matrices, (6, 7, 7)) for some in (whole, parted)), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(parted.volume(1)[0], whole.volume(1)[0])
    with pytest.raises(LookupError):
        replace(parted, parts=replace(parts, memories=(own, None))).volume(1)
