"""Both parts' cases opened beside one another, by as many threads as a large machine has, and one after the other."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fasttrain.engine.opening import open_all
from fasttrain.engine.preparing import Prepared, prepare
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import DataError
from fasttrain.samples import CaseSource


@pytest.fixture
def prepared(tiny, phantoms: Path) -> Prepared:
    return prepare(tiny(data__cache={"kind": "memory"}).recipe, data=phantoms, device="cpu")


def opened(prepared: Prepared, threads: int, progress=lambda *_: None, said: list | None = None):
    plan = replace(prepared.plan, fill_threads=threads)
    told = lambda text, level: said.append(text) if said is not None else None  # noqa: E731
    return open_all(prepared.recipe, plan, prepared.split, prepared.hardware, progress, told, 0)


def images(source: CaseSource) -> list[torch.Tensor]:
    return [source[index].image for index in range(len(source))]


def test_the_same_volumes_whether_beside_or_after(prepared: Prepared) -> None:
    found, said = [], []
    for threads in (1, 8):
        lines: list[str] = []
        readers = set()
        parts = opened(prepared, threads, lambda *_: readers.add(threading.current_thread().name), lines)  # noqa: B023
        found.append([images(part) for part in parts])
        said.append(lines)
        for part in parts:
            part.close()
    for one, other in zip(*found, strict=True):
        assert one
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    # Told in the same order, too
    assert said[0] == said[1]
    assert len(said[0]) == 2


def broken(prepared: Prepared, part: str) -> Prepared:
    cases = list(getattr(prepared.split, part))
    gone = Path("/nowhere") / f"{part}.nii.gz"
    cases[0] = replace(cases[0], images=(gone,))
    return replace(prepared, split=replace(prepared.split, **{part: tuple(cases)}))


@pytest.mark.parametrize("threads", [1, 8])
def test_faults_of_both_parts_come_in_one_error(threads: int, prepared: Prepared) -> None:
    both = broken(broken(prepared, "train"), "validation")
    with pytest.raises(DataError) as caught:
        opened(both, threads)
    faults = caught.value.faults
    assert len(faults) == 2
    assert "train.nii.gz" in faults[0]
    assert "validation.nii.gz" in faults[1]


@pytest.mark.parametrize("threads", [1, 8])
def test_a_stop_ends_both(threads: int, prepared: Prepared) -> None:
    stop = StopRequest()

    def progress(*_: object) -> None:
        stop.ask("told so", 143)
        stop.check()

    with pytest.raises(Stopped):
        opened(prepared, threads, progress)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("filling", "reading"))]
