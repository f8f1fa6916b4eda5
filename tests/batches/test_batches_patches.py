"""Patches as a loader's worker makes them: cut from their case, image and label together; and the life of the workers."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from fasttrain.augment import Chances
from fasttrain.batches import LoaderSource, Loading, Order, ended_worker
from fasttrain.batches.crop import CaseCentres, CentreTables, cut
from fasttrain.batches.patch_maker import PatchMaker
from fasttrain.errors import MachineError
from fasttrain.samples import Grid, Sample

SHAPES = [(16, 16, 16), (22, 17, 30), (40, 16, 19)]


def made_case(number: int, shape: tuple[int, ...]) -> Sample:
    """Each voxel's value tells its case and place, and the label follows from the value."""
    voxels = int(np.prod(shape))
    image = (torch.arange(voxels, dtype=torch.float32) + number * 100_000).reshape(1, *shape)
    label = (image.long() % 3).to(torch.uint8)
    centres = tuple((label.flatten() == value).nonzero().flatten().int() for value in (1, 2))
    grid = Grid(shape, np.eye(4))
    return Sample(f"case_{number}", image, label, centres, None, grid, grid)


class Made:
    """Cases of different shapes."""

    def __init__(self) -> None:
        self.samples = [made_case(number, shape) for number, shape in enumerate(SHAPES)]
        self.looked_up: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        self.looked_up.append(index)
        return self.samples[index]

    def close(self) -> None: ...


def maker(tiny, batch_size: int, samples_per_case: int = 1, **more: object) -> tuple[PatchMaker, Made]:
    off = {"augment__flip": None, "augment__rotate": None, "augment__noise": None}
    recipe = tiny(training__batch_size=batch_size, data__samples_per_case=samples_per_case, **{**off, **more}).recipe
    cases = Made()
    return PatchMaker(recipe, cases, Order(len(cases), samples_per_case, 0)), cases


def test_cases_of_different_shapes_make_one_batch_of_their_own_voxels(tiny) -> None:
    made, cases = maker(tiny, 6)
    raw = made.make(0)
    assert raw.image.shape == (6, 1, 16, 16, 16)
    assert Counter(raw.names) == {"case_0": 2, "case_1": 2, "case_2": 2}  # two passes
    for image, label, name in zip(raw.image, raw.label, raw.names, strict=True):
        number = int(name[-1])
        sample = cases.samples[number]
        corner = np.unravel_index(int(image.min()) - number * 100_000, SHAPES[number])
        box = tuple(slice(first, first + 16) for first in corner)
        assert torch.equal(image[0], sample.image[0][box])
        assert sample.label is not None
        assert torch.equal(label[0], sample.label[0][box])


def test_a_case_that_is_the_patch_is_given_whole(tiny) -> None:
    made, cases = maker(tiny, 9)
    raw = made.make(0)
    whole = [image for image, name in zip(raw.image, raw.names, strict=True) if name == "case_0"]
    assert len(whole) == 3
    assert all(torch.equal(image, cases.samples[0].image) for image in whole)


def test_the_stream_of_patches_does_not_depend_on_the_batch_size(tiny) -> None:
    augment = {
        "augment__flip": {"probability": 0.5},
        "augment__rotate": {"probability": 0.5},
        "augment__noise": {"probability": 0.5},
    }
    whole, _ = maker(tiny, 12, **augment)
    image, label = whole.augment(whole.make(6))
    for size in (1, 2, 3, 4):
        pieces, _ = maker(tiny, size, **augment)
        parts = [pieces.augment(pieces.make(first)) for first in range(6, 18, size)]
        assert torch.equal(torch.cat([part[0] for part in parts]), image)
        assert torch.equal(torch.cat([part[1] for part in parts]), label)


def test_what_is_drawn_from_the_tables_of_all_cases_is_what_is_made(tiny) -> None:
    """What a source needs that has all volumes at hand and cuts by itself."""
    more = {"augment__rotate": {"probability": 0.5}, "augment__noise": {"probability": 0.5}, "patch__foreground": 0.5}
    made, cases = maker(tiny, 12, samples_per_case=2, **more)
    tables = CentreTables(CaseCentres.of(sample) for sample in cases.samples)
    for first in (0, 12, 7):
        raw, drawn = made.make(first), made.draw(first, tables)
        assert drawn.positions == raw.positions == tuple(range(first, first + 12))
        assert [f"case_{case}" for case in drawn.cases] == list(raw.names)
        for row, (case, corner) in enumerate(zip(drawn.cases, drawn.corners.tolist(), strict=True)):
            assert torch.equal(cut(cases.samples[case].image, corner, (16, 16, 16)), raw.image[row])
        assert raw.draws.keys() == drawn.draws.keys() == {"rotate", "noise"}
        for name, draw in raw.draws.items():
            assert all(torch.equal(draw[key], drawn.draws[name][key]) for key in draw)
    assert cases.looked_up  # by `make` alone
    looked_up = len(cases.looked_up)
    made.draw(0, tables)
    assert len(cases.looked_up) == looked_up


def test_patches_of_one_case_look_it_up_once(tiny) -> None:
    made, cases = maker(tiny, 12, samples_per_case=4)
    raw = made.make(0)
    assert len(cases.looked_up) == 3
    assert all(count == 4 for count in Counter(raw.names).values())
    corners = {tuple(image.flatten()[:1].tolist()) for image in raw.image}
    assert len(corners) > 6  # and yet each patch has a place of its own


def test_making_a_batch_leaves_the_cases_as_they_were(tiny) -> None:
    made, cases = maker(tiny, 3, augment__noise={"probability": 1.0, "std": 1.0}, augment__flip={"probability": 1.0})
    made.augment(made.make(0))
    for number, sample in enumerate(cases.samples):
        assert torch.equal(sample.image, made_case(number, SHAPES[number]).image)


def test_a_foreground_voxel_is_at_the_centre_for_its_share_of_patches(tiny) -> None:
    """Seen in the patch itself, with a label so rare that other patches hardly ever have it at their centre."""
    shape = (60, 60, 60)
    label = torch.zeros(1, *shape, dtype=torch.uint8)
    inner = torch.zeros(40, 40, 40, dtype=torch.uint8)
    inner.view(-1)[torch.randperm(40**3, generator=torch.Generator().manual_seed(0))[:200]] = 1
    label[0, 10:50, 10:50, 10:50] = inner  # a whole patch fits around each
    centres = label.flatten().nonzero().flatten().int()
    grid = Grid(shape, np.eye(4))
    sample = Sample("case", torch.zeros(1, *shape), label, (centres,), None, grid, grid)
    patch = tiny(patch__foreground=0.4).recipe.patch
    count = 2000
    tables = CentreTables((CaseCentres.of(sample),))
    found = tables.corners([0] * count, patch, Chances(0, torch.arange(count))).tolist()
    share = sum(int(cut(label, corner, patch.size)[0, 8, 8, 8]) for corner in found) / count
    assert share == pytest.approx(0.4, abs=0.03)


def workers_of(source: LoaderSource) -> list[psutil.Process]:
    return [psutil.Process(process.pid) for process in source._loader.processes]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def loader(tiny, workers: int) -> LoaderSource:
    recipe = tiny(training__batch_size=2).recipe
    cases = Made()
    return LoaderSource(recipe, cases, Order(len(cases), 1, 0), torch.device("cpu"), Loading(workers))


def test_workers_end_with_the_source_and_with_the_next_stream(tiny) -> None:
    source = loader(tiny, 2)
    next(source.batches(0))
    first = workers_of(source)
    assert len(alive(first)) == 2
    next(source.batches(4))
    second = workers_of(source)
    assert not alive(first)
    source.close()
    assert not alive(second)
    source.close()  # twice is no fault


def test_signals_to_the_group_do_not_end_workers(tiny) -> None:
    source = loader(tiny, 2)
    stream = source.batches(0)
    next(stream)
    processes = workers_of(source)
    for process in processes:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(process.pid, number)
    for _ in range(12):
        next(stream)
    assert len(alive(processes)) == 2
    source.close()


def test_only_a_workers_death_becomes_a_sentence_about_workers() -> None:
    known = ended_worker(RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. "), 4)
    assert isinstance(known, MachineError)
    assert "data.workers (now 4)" in str(known)
    assert ended_worker(RuntimeError("shapes differ"), 4) is None
    assert ended_worker(ValueError("DataLoader worker"), 4) is None


PARENT = """
    import sys, time
    sys.path.insert(0, {tests!r})
    import torch
    from fasttrain import load_recipe
    from fasttrain.batches import Loading, LoaderSource, Order
    from tiny_recipe import TINY
    sys.path.insert(0, {here!r})
    from test_batches_patches import Made
    recipe = load_recipe("demo", TINY).recipe
    source = LoaderSource(recipe, Made(), Order(3, 1, 0), torch.device("cpu"), Loading(2))
    next(source.batches(0))
    print(*[process.pid for process in source._loader.processes], flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are bound to their trainer by Linux's prctl")
def test_no_worker_outlives_a_trainer_that_was_killed(tmp_path: Path) -> None:
    here = Path(__file__).parent
    text = textwrap.dedent(PARENT).format(tests=str(here.parent), here=str(here))
    trainer = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=here.parent.parent)
    try:
        assert trainer.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(alive(workers)) == 2
    finally:
        trainer.kill()
        trainer.wait()
    deadline = time.monotonic() + 2  # torch's own watchdog would need five seconds
    while alive(workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(workers)
