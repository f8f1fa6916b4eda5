"""Loader workers: the same batches as without them, errors as they were, no orphans."""

import itertools
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from fasttrain.batches import LoaderSource, Loading, Order
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.errors import DataError, MachineError
from fasttrain.samples import CaseSource, Sample


class Lent:
    """Cases that outlive the loaders of single tests."""

    def __init__(self, cases: CaseSource) -> None:
        self.cases = cases

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> Sample:
        return self.cases[index]

    def close(self) -> None: ...


class Faulty(Lent):
    """One unreadable case among them."""

    def __getitem__(self, index: int) -> Sample:
        if index == 1:
            raise DataError("/data/case_001.nii.gz is damaged")
        return self.cases[index]


class Slow(Lent):
    """Cases that take their time."""

    def __getitem__(self, index: int) -> Sample:
        time.sleep(0.3)
        return self.cases[index]


@pytest.fixture(scope="module")
def cases(tiny, phantoms: Path) -> CaseSource:
    recipe = tiny().recipe
    found = find_cases(recipe.data, phantoms).cases
    return Lent(open_case_source("memory", found, Preprocess(recipe), 2))


def loader(tiny, cases: CaseSource, workers: int) -> LoaderSource:
    recipe = tiny(training__batch_size=3, augment__noise={"probability": 0.5, "std": 0.2}).recipe
    return LoaderSource(recipe, cases, Order(len(cases), 1, 0), torch.device("cpu"), Loading(workers))


def first_batches(source: LoaderSource, position: int, count: int) -> list:
    stream = source.batches(position)
    made = [next(stream) for _ in range(count)]
    source.close()
    return made


@pytest.mark.parametrize("position", [0, 3, 10])
def test_workers_make_the_same_batches(tiny, cases: CaseSource, position: int) -> None:
    alone = first_batches(loader(tiny, cases, 0), position, 4)
    helped = first_batches(loader(tiny, cases, 2), position, 4)
    for one, other in zip(alone, helped, strict=True):
        assert one.positions == other.positions
        assert one.names == other.names
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.label, other.label)
    assert alone[0].positions == tuple(range(position, position + 3))
    assert alone[0].image.shape == (3, 1, 16, 16, 16)
    assert alone[0].label.dtype == torch.uint8


def test_a_stream_goes_on_where_another_ended(tiny, cases: CaseSource) -> None:
    whole = first_batches(loader(tiny, cases, 0), 0, 5)
    rest = first_batches(loader(tiny, cases, 0), 6, 3)
    assert all(torch.equal(a.image, b.image) for a, b in zip(whole[2:], rest, strict=True))


def test_a_loader_leaves_torchs_generator_alone(tiny, cases: CaseSource) -> None:
    """Else a resume, which makes a new loader, would shift every dropout mask after it."""
    before = torch.get_rng_state()
    for workers in (0, 2):
        first_batches(loader(tiny, cases, workers), 0, 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_in_a_worker_arrives_as_its_one_sentence(tiny, cases: CaseSource, workers: int) -> None:
    source = loader(tiny, Faulty(cases), workers)
    with pytest.raises(DataError) as caught:
        first_batches(source, 0, 10)
    source.close()
    assert caught.value.faults == ("/data/case_001.nii.gz is damaged",)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_worker_ends_the_stream_with_a_sentence_and_no_orphans(tiny, cases: CaseSource) -> None:
    before = {child.pid for child in children()}
    source = loader(tiny, Slow(cases), 2)
    stream = source.batches(0)
    next(stream)
    workers = [child for child in children() if child.pid not in before]
    assert workers
    os.kill(workers[0].pid, signal.SIGINT)  # a Ctrl-C at the terminal is the trainer's to answer
    next(stream)
    os.kill(workers[0].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(MachineError, match="worker ended"):
        list(itertools.islice(stream, 50))
    assert time.monotonic() - began < 60
    source.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(one.is_running() and one.status() != "zombie" for one in workers[1:]):
        time.sleep(0.1)
    assert not [one for one in workers if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
