"""The stream of samples and where patches are cut."""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.batches.crop import cut, draw_corner
from fasttrain.batches.order import Order
from fasttrain.recipe.data_spec import PatchSpec
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
    generator = torch.Generator().manual_seed(3)
    return [draw_corner(volume, patch, generator) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(cases=st.integers(1, 30), per_case=st.integers(1, 4), seed=st.integers(0, 99), start=st.integers(0, 5))
def test_every_case_comes_once_a_pass(cases: int, per_case: int, seed: int, start: int) -> None:
    order = Order(cases, per_case, seed)
    first = start * order.pass_length
    seen = [order.case_at(first + place) for place in range(order.pass_length)]
    assert sorted(seen) == sorted(list(range(cases)) * per_case)
    # A case's samples stand together, so that it is read once
    assert all(len(set(seen[i : i + per_case])) == 1 for i in range(0, len(seen), per_case))


def test_passes_differ_and_seeds_are_of_the_position_alone() -> None:
    order, again = Order(20, 1, 7), Order(20, 1, 7)
    passes = [[order.case_at(number * 20 + place) for place in range(20)] for number in range(3)]
    assert passes[0] != passes[1] != passes[2]
    assert [order.seed_at(p) for p in (9, 3, 9)] == [again.seed_at(p) for p in (9, 3, 9)]
    assert len({order.seed_at(position) for position in range(10_000)}) == 10_000
    assert order.seed_at(5) != Order(20, 1, 8).seed_at(5)


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
    corner = draw_corner(volume, PatchSpec(size=size, foreground=1.0), torch.Generator().manual_seed(seed))
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
    stream = [order.case_at(position) for position in range(60)]
    for batch in (2, 3, 5):
        assert [order.case_at(first + i) for first in range(0, 60, batch) for i in range(batch)] == stream
