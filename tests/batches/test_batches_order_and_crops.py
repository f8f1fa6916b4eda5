"""The stream of samples and where patches are cut."""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.augment import Chances
from fasttrain.batches.crop import CaseCentres, CentreTables, cut
from fasttrain.batches.order import Order, WindowOrder
from fasttrain.recipe.patch_spec import PatchSpec
from fasttrain.samples import Grid, Sample


def sample(shape: tuple[int, ...], voxels: dict[int, list[tuple[int, ...]]], background: bool = False) -> Sample:
    label = torch.zeros((1, *shape), dtype=torch.uint8)
    for value, places in voxels.items():
        for place in places:
            label[(0, *place)] = value
    centres = tuple((label.flatten() == value).nonzero().flatten().int() for value in voxels)
    grid = Grid(shape, np.eye(4))
    around = torch.tensor([0], dtype=torch.int32) if background else None
    return Sample("case", torch.zeros((1, *shape)), label, centres, around, grid, grid)


def corners(volume: Sample, patch: PatchSpec, count: int = 400) -> list[tuple[int, ...]]:
    tables = CentreTables((CaseCentres.of(volume),))
    return [tuple(corner) for corner in tables.corners([0] * count, patch, Chances(3, torch.arange(count))).tolist()]


def stream(order: Order, first: int, count: int) -> list[int]:
    return order.cases_at(np.arange(first, first + count)).tolist()


@settings(max_examples=60, deadline=None)
@given(cases=st.integers(1, 30), per_case=st.integers(1, 4), seed=st.integers(0, 99), start=st.integers(0, 5))
def test_every_case_comes_once_a_pass(cases: int, per_case: int, seed: int, start: int) -> None:
    order = Order(cases, per_case, seed)
    first = start * order.pass_length
    seen = stream(order, first, order.pass_length)
    assert sorted(seen) == sorted(list(range(cases)) * per_case)
    # A case's samples stand together, so that it is read once
    assert all(len(set(seen[i : i + per_case])) == 1 for i in range(0, len(seen), per_case))


def test_passes_and_seeds_differ() -> None:
    passes = [stream(Order(20, 1, 7), number * 20, 20) for number in range(3)]
    assert passes[0] != passes[1] != passes[2]
    assert stream(Order(20, 1, 7), 0, 60) == [case for one in passes for case in one]
    assert stream(Order(20, 1, 8), 0, 20) != passes[0]


@settings(max_examples=60, deadline=None)
@given(
    cases=st.integers(1, 9), per_case=st.integers(1, 3), positions=st.lists(st.integers(0, 10**12), max_size=12),
    epoch=st.integers(1, 50),
)  # fmt: skip
def test_cases_of_many_positions_are_those_of_each(cases: int, per_case: int, positions: list[int], epoch: int) -> None:
    def window(number: int) -> tuple[int, ...]:
        return tuple((number + place) % (cases + 3) for place in range(cases))

    windowed = WindowOrder(window, per_case, 5, epoch)
    for order in (Order(cases, per_case, 5), windowed):
        together = order.cases_at(np.array(positions, dtype=np.int64))
        assert together.dtype == np.int64
        assert together.tolist() == [int(order.cases_at(np.array([one]))[0]) for one in positions]
    for position, case in zip(positions, windowed.cases_at(np.array(positions, dtype=np.int64)), strict=True):
        assert case in window(position // epoch)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*[st.integers(8, 20)] * 3),
    size=st.tuples(*[st.integers(1, 8)] * 3),
    place=st.tuples(*[st.integers(0, 7)] * 3),
    seed=st.integers(0, 1000),
)
def test_a_patch_lies_inside_and_holds_its_centre(
    shape: tuple[int, ...], size: tuple[int, ...], place: tuple[int, ...], seed: int
) -> None:
    volume = sample(shape, {1: [place]})
    tables = CentreTables((CaseCentres.of(volume),))
    spec = PatchSpec(size=size, foreground=1.0)
    corner = tables.corners([0], spec, Chances(seed, torch.tensor([0])))[0].tolist()
    assert volume.label is not None
    patch = cut(volume.label, corner, size)
    assert tuple(patch.shape) == (1, *size)
    assert int((patch == 1).sum()) == 1
    for axis in range(3):
        middle = corner[axis] + size[axis] // 2
        at_edge = corner[axis] in (0, shape[axis] - size[axis])
        assert middle == place[axis] or at_edge


def test_the_share_of_foreground_patches_is_the_recipes() -> None:
    volume = sample((40, 40, 40), {1: [(20, 20, 20)]})
    found = corners(volume, PatchSpec(size=(4, 4, 4), foreground=0.3), 3000)
    share = np.mean([corner == (18, 18, 18) for corner in found])
    assert abs(share - 0.3) < 0.03


def test_classes_are_drawn_evenly_where_asked_and_by_voxels_otherwise() -> None:
    many = [(5, y, z) for y in range(4, 16) for z in range(4, 16)]
    volume = sample((20, 20, 20), {1: many, 2: [(15, 10, 10)]})

    def share_of_second(by: str) -> float:
        found = corners(volume, PatchSpec(size=(2, 2, 2), foreground=1.0, foreground_by=by), 2000)
        return float(np.mean([corner == (14, 9, 9) for corner in found]))

    assert abs(share_of_second("class") - 0.5) < 0.05
    assert share_of_second("voxel") < 0.03


def test_background_patches_go_where_the_table_says_or_anywhere() -> None:
    with_table = sample((12, 12, 12), {1: [(6, 6, 6)]}, background=True)
    assert set(corners(with_table, PatchSpec(size=(2, 2, 2), foreground=0.0, background_above=0.0))) == {(0, 0, 0)}
    anywhere = corners(sample((12, 12, 12), {1: [(6, 6, 6)]}), PatchSpec(size=(2, 2, 2), foreground=0.0), 4000)
    for axis in range(3):
        counts = np.bincount([corner[axis] for corner in anywhere], minlength=11)
        assert len(counts) == 11
        assert counts.min() > 0.6 * 4000 / 11


def test_a_sample_without_foreground_still_gives_patches() -> None:
    volume = sample((9, 9, 9), {})
    assert len(set(corners(volume, PatchSpec(size=(8, 8, 8), foreground=1.0)))) == 8


def test_a_volume_of_the_patchs_size_has_one_patch() -> None:
    volume = sample((8, 8, 8), {1: [(0, 7, 3)]})
    assert set(corners(volume, PatchSpec(size=(8, 8, 8), foreground=0.5))) == {(0, 0, 0)}


def test_the_stream_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    order = Order(7, 2, 0)
    whole = stream(order, 0, 60)
    for batch in (2, 3, 5):
        assert [case for first in range(0, 60, batch) for case in stream(order, first, batch)] == whole


def one_by_one(volume: Sample, patch: PatchSpec, draws: list[float]) -> list[int]:
    """The rules of a crop in plain Python."""
    spatial = volume.image.shape[1:]
    slack = [length - size for length, size in zip(spatial, patch.size, strict=True)]
    table = []
    if draws[0] < patch.foreground:
        present = [one.tolist() for one in volume.centres if len(one)]
        if present and patch.foreground_by == "class":
            present = [present[int(draws[1] * len(present))]]
        table, draw = [voxel for one in present for voxel in one], draws[2]
    elif volume.background_centres is not None:
        table, draw = volume.background_centres.tolist(), draws[1]
    if not table:
        return [int(one * (room + 1)) for one, room in zip(draws[3:], slack, strict=True)]
    centre = np.unravel_index(table[int(draw * len(table))], spatial)
    return [min(max(int(c) - s // 2, 0), room) for c, s, room in zip(centre, patch.size, slack, strict=True)]


@st.composite
def volumes(draw: st.DrawFn, dimensions: int) -> list[Sample]:
    """Cases of several shapes with or without foreground and background tables, in either type of index."""
    made, classes, around = [], draw(st.integers(0, 3)), draw(st.booleans())
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(6, 12), min_size=dimensions, max_size=dimensions)))
        kind = draw(st.sampled_from([torch.uint16, torch.int32]))
        voxels = st.lists(st.integers(0, int(np.prod(shape)) - 1), max_size=4)
        centres = tuple(torch.tensor(draw(voxels), dtype=torch.int32).to(kind) for _ in range(classes))
        background = torch.tensor(draw(voxels), dtype=torch.int32).to(kind) if around else None
        grid = Grid(shape, np.eye(len(shape)))
        made.append(Sample(f"{number}", torch.zeros((1, *shape)), None, centres, background, grid, grid))
    return made


@settings(max_examples=150, deadline=None)
@given(
    cases=st.integers(2, 3).flatmap(volumes),
    foreground=st.sampled_from([0.0, 0.4, 1.0]),
    by=st.sampled_from(["voxel", "class"]),
    seed=st.integers(0, 99),
)
def test_corners_of_a_batch_are_those_of_each_patch_of_its_own(
    cases: list[Sample], foreground: float, by: str, seed: int
) -> None:
    dimensions = cases[0].image.dim() - 1
    patch = PatchSpec(size=(5,) * dimensions, foreground=foreground, foreground_by=by)
    tables = CentreTables(CaseCentres.of(one) for one in cases)
    positions = torch.arange(40, 60)
    indices = np.random.default_rng(seed).integers(0, len(cases), len(positions))
    together = tables.corners(indices, patch, Chances(seed, positions))
    assert together.dtype == np.int64
    for row, (index, position) in enumerate(zip(indices, positions, strict=True)):
        chances = Chances(seed, position[None])
        alone = CentreTables((CaseCentres.of(cases[index]),)).corners([0], patch, chances)[0]
        expected = one_by_one(cases[index], patch, chances("corner", 3 + dimensions)[0].tolist())
        assert together[row].tolist() == alone.tolist() == expected
