"""A set that several ranks hold in parts gives each of them the batches, to the bit, that one rank cuts from a set of its own."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain import load_recipe, train
from fasttrain.batches import Order, Resident, ResidentSource, fill, shards
from fasttrain.batches.device_room import voxel_bytes
from fasttrain.batches.order import turns
from fasttrain.batches.patch_maker import LABEL_TYPES
from fasttrain.batches.shards import Rooms
from fasttrain.data.caches import MadeTogether, made_together
from fasttrain.data.made_ahead import can_make_ahead
from fasttrain.data.preprocess import Preprocess
from fasttrain.engine import preparing
from fasttrain.engine.following import follow
from fasttrain.engine.orders import Over
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError
from fasttrain.machine.place import Place
from fasttrain.machine.ranks import Joined
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch, Case, Sample
from tests.ranks_running import in_ranks

pytestmark = pytest.mark.skipif(not can_make_ahead(), reason="this system does not fork, or has no memfd")
CPU = torch.device("cpu")
SHAPES = [(20, 24, 18), (30, 17, 22), (17, 16, 40), (25, 25, 25), (16, 16, 16), (19, 33, 18), (28, 20, 20)]
SMALL = {"training.batch_size": 3, "data.workers": 0}
AUGMENTED = {
    "augment.rotate": {"probability": 0.7},
    "augment.scale": {"probability": 0.5},
    "augment.flip": {"probability": 0.5},
    "augment.elastic": {"probability": 0.5},
    "augment.noise": {"probability": 0.5},
    "augment.gamma": {"probability": 0.5},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "volumes": ("demo", {"patch.size": [16, 16, 16], "network.features": [4, 8, 8], "network.strides": [2, 2], **AUGMENTED}),
    "regions": (
        "demo",
        {
            "patch.size": [16, 16, 16], "network.features": [4, 8, 8], "network.strides": [2, 2],
            "data.storage_dtype": "float16", "data.regions": {"both": [1, 2], "second": [2]},
            "loss": {"kind": "bce_dice"}, **AUGMENTED,
        },
    ),
    "dose": ("openkbp", {"patch.size": [16, 16, 16], "network.features": [4, 8], **AUGMENTED}),
    "slices": (
        "demo",
        {
            "data.slices": {"axis": "axial", "neighbours": 1}, "patch.size": [16, 16],
            "network.features": [4, 8, 8], "network.strides": [2, 2], **AUGMENTED,
            "augment.flip": {"probability": 0.5, "axes": [0, 1]}, "data.spacing": None,
        },
    ),
}  # fmt: skip


def recipe_of(variant: str) -> Recipe:
    name, settings = VARIANTS[variant]
    return load_recipe(name, {**SMALL, **settings}).recipe


def record(recipe: Recipe, number: int) -> dict[str, Any]:
    """Noise: an image that is one voxel off is another one."""
    generator = torch.Generator().manual_seed(number)
    shape = SHAPES[number]
    image = torch.randn(recipe.stored_channels, *shape, generator=generator)
    dtype = LABEL_TYPES[recipe.task_facts.label_bytes]
    label = torch.randint(0, 3, (1, *shape), generator=generator).to(dtype)
    label[:, : 2 + number % 3] = 0
    centres = [(label.flatten() == value).nonzero().flatten().int() for value in (1, 2)]
    grid = {
        "shape": list(shape),
        "affine": torch.eye(4).double(),
        "source_shape": list(shape),
        "source_affine": torch.eye(4).double(),
    }
    storage = torch.float16 if recipe.data.storage_dtype == "float16" else torch.float32
    filled = (label > 0).flatten(2).any(2)[0].to(torch.uint8) if recipe.data.slices is not None else None
    return {
        "name": f"case_{number}", "image": image.to(storage), "label": label, "centres": centres, "background_centres": None,
        "filled": filled, **grid,
    }  # fmt: skip


class Made(Preprocess):
    """Makes those records."""

    def __init__(self, recipe: Recipe, faulty: str = "") -> None:
        super().__init__(recipe)
        self._recipe = recipe
        self._faulty = faulty

    def __call__(self, case: Case) -> dict[str, Any]:
        if case.name == self._faulty:
            raise DataError(f"{case.name} is cut short")
        return record(self._recipe, int(case.name))


class Samples:
    """The same as one rank's own."""

    def __init__(self, recipe: Recipe) -> None:
        make = Made(recipe)
        self._samples = [make.as_sample(record(recipe, number)) for number in range(len(SHAPES))]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def close(self) -> None:
        """Nothing is held."""


CASES = [Case(str(number), (), None) for number in range(len(SHAPES))]
WHOLE = sum(int(np.prod(shape)) for shape in SHAPES)


def filled(
    joined: Joined, recipe: Recipe, voxels: int, make: Callable[..., Any] = Made, device: torch.device = CPU
) -> tuple[Resident, list[str]]:
    told: list[str] = []
    source = made_together(CASES, make(recipe), joined)
    assert isinstance(source, MadeTogether)
    room = voxels * voxel_bytes(recipe)
    resident = fill(source, recipe, device, room, 2, None, lambda text, level: told.append(text), joined)
    # Nobody reads before all have written, for which the engine sees
    joined.gather(None)
    return resident, told


def told_of(batch: Batch) -> tuple[Any, ...]:
    """As arrays: tensors would go by descriptors, for which the sender must still be there."""
    return batch.image.numpy(), batch.label.numpy(), batch.positions, batch.names


def batches(joined: Joined, variant: str, voxels: int) -> dict[str, Any]:
    """Those of a rank, and what it keeps."""
    recipe = recipe_of(variant)
    resident, told = filled(joined, recipe, voxels)
    order = Order(len(SHAPES), recipe.data.samples_per_case, 3)
    source = ResidentSource(recipe, resident, order, CPU, 1, joined.place)
    own = [told_of(one) for one in islice(source.batches(7), 4)]
    alike = [told_of(one) for one in islice(source.batches(40, alike=True), 2)]
    owners = [] if resident.volumes.parts is None else list(resident.volumes.parts.owners[: len(SHAPES)])
    used, rest = resident.used_bytes, sorted(resident.rest)
    source.close()
    return {"own": [*own, *alike], "owners": owners, "used": used, "rest": rest, "told": told}


def expected(recipe: Recipe, place: Place) -> list[tuple[Any, ...]]:
    """What one rank that has everything cuts at the positions of `place`."""
    order = Order(len(SHAPES), recipe.data.samples_per_case, 3)
    resident = fill(Samples(recipe), recipe, CPU, WHOLE * voxel_bytes(recipe))
    assert not resident.rest
    source = ResidentSource(recipe, resident, order, CPU)
    firsts = [*islice(turns(7, recipe.training.batch_size, place), 4), 40, 40 + recipe.training.batch_size]
    made = [next(source.batches(first)) for first in firsts]
    return [told_of(one) for one in made]


def same(given: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> None:
    for one, other in zip(given, wanted, strict=True):
        assert one[2:] == other[2:]
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_two_ranks_cut_what_one_cuts(variant: str) -> None:
    recipe = recipe_of(variant)
    ranks = in_ranks(2, batches, variant, int(WHOLE * 0.6))
    for number, rank in enumerate(ranks):
        assert rank["rest"] == []
        assert rank["owners"] == ranks[0]["owners"]
        assert set(rank["owners"]) == {0, 1}
        same(rank["own"], expected(recipe, Place(number, 2)))
        assert rank["told"][0].startswith("gpu cache: 7 cases on 2 GPUs, ")
    assert sum(rank["used"] for rank in ranks) == WHOLE * voxel_bytes(recipe)


def test_what_fits_nowhere_comes_from_the_host() -> None:
    recipe = recipe_of("volumes")
    ranks = in_ranks(3, batches, "volumes", int(WHOLE * 0.2))
    for number, rank in enumerate(ranks):
        assert rank["rest"] == ranks[0]["rest"] != []
        assert set(rank["owners"]) == {0, 1, 2}
        same(rank["own"], expected(recipe, Place(number, 3)))


def trained(ranks: Any, values: dict[str, Any], data: Path, run: Path, share: float) -> list[float]:
    """The losses of a run, with volumes where those of GPUs would lie, here in the CPU's memory; of the first rank alone."""
    if not ranks.place.leads:
        follow(ranks, None, "cpu", StopRequest())
        return []
    plan_of = preparing.make_plan

    def planned(*given: Any) -> Any:
        made = plan_of(*given)
        return (
            replace(made, cache="gpu", resident_bytes=int(made.sizes.training_bytes * share), cards=2)
            if share
            else made
        )

    preparing.make_plan = planned
    train(load_recipe("demo", values), data=data, run=run, device="cpu", ranks=ranks)
    preparing.make_plan = plan_of
    ranks.share(Over(0))
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [one["loss"] for one in events if one["event"] == "StepLogged"]


def test_a_run_learns_the_same_from_a_set_in_parts(tiny_values: dict[str, Any], phantoms: Path, tmp_path: Path) -> None:
    values = {**tiny_values, "augment": {}, "network.dropout": 0.0, "training.epochs": 1, "data.cache.kind": "memory"}
    expected, _ = in_ranks(2, trained, values, phantoms, tmp_path / "memory", 0.0)
    assert len(expected) >= 3
    # A part on each of both, and some of it on none
    losses, _ = in_ranks(2, trained, values, phantoms, tmp_path / "run", 0.3)
    assert losses == pytest.approx(expected, rel=1e-6)
    told = (tmp_path / "run" / "events.jsonl").read_text()
    assert "cases on 2 GPUs" in told
    assert "more from pinned memory" in told


def apart(joined: Joined, variant: str) -> dict[str, Any]:
    if joined.place.rank == 1:

        def unseen(*_: Any) -> Any:
            raise OSError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)")

        shards._see = unseen  # type: ignore[assignment]
    return batches(joined, variant, int(WHOLE * 0.6))


def test_ranks_that_cannot_reach_each_other_keep_what_fits_them() -> None:
    recipe = recipe_of("volumes")
    for number, rank in enumerate(in_ranks(2, apart, "volumes")):
        assert rank["told"][0] == (
            "the GPUs cannot read each other's memory (cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)): "
            "each keeps what it has room for"
        )
        assert rank["owners"] == []
        assert rank["rest"]
        same(rank["own"], expected(recipe, Place(number, 2)))


def left_behind(joined: Joined) -> tuple[list[str], int]:
    recipe = recipe_of("volumes")
    resident, _ = filled(joined, recipe, WHOLE)
    resident.close()
    del resident
    with contextlib.suppress(DataError):
        filled(joined, recipe, WHOLE, lambda one: Made(one, "3"))
        raise AssertionError("a fault was passed over")
    links = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(one.readlink()))
    maps = re.findall(r"memfd:fasttrain", Path("/proc/self/maps").read_text())
    return [link for link in links if "memfd" in link], len(maps)


def test_nothing_is_left_behind() -> None:
    assert in_ranks(2, left_behind) == [([], 0), ([], 0)]


def test_the_emptiest_takes_the_next_case() -> None:
    rooms = Rooms([10, 8, 10], own=1)
    assert [rooms.place(voxels) for voxels in (4, 5, 3, 6, 5, 2, 1)] == [
        (0, 0),
        (2, 0),
        (1, 0),
        (0, 4),
        (1, 3),
        (2, 5),
        (2, 7),
    ]
    assert rooms.used == 8
    assert rooms.place(3) is None
    assert rooms.place(2) == (2, 8)


def on_gpus(joined: Joined, variant: str) -> tuple[list[bool], set[int], str]:
    """Whether each batch is the one that the same GPU cuts from a set of its own."""
    device = torch.device("cuda", joined.place.local_rank % torch.cuda.device_count())
    recipe = recipe_of(variant)
    resident, told = filled(joined, recipe, int(WHOLE * 0.6), device=device)
    own = fill(Samples(recipe), recipe, device, WHOLE * voxel_bytes(recipe))
    order = Order(len(SHAPES), recipe.data.samples_per_case, 3)
    sources = [ResidentSource(recipe, one, order, device, 1, joined.place) for one in (resident, own)]
    pairs = zip(*(islice(source.batches(7), 12) for source in sources), strict=True)
    same_bits = [torch.equal(one.image, two.image) and torch.equal(one.label, two.label) for one, two in pairs]
    owners = set() if resident.volumes.parts is None else set(resident.volumes.parts.owners)
    joined.gather(None)
    for source in sources:
        source.close()
    return same_bits, owners, told[0]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_two_processes_cut_out_of_each_others_gpu_memory(variant: str) -> None:
    """On two GPUs, or where there is one, both on that."""
    for bits, owners, told in in_ranks(2, on_gpus, variant):
        assert owners == {0, 1}, told
        assert bits == [True] * 12
