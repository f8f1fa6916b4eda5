"""The cases of both parts opened: faults of both in one error, a stop ends it, and volumes that were begun ahead are the same."""

import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from fasttrain.data.made_ahead import MadeAhead, can_make_ahead
from fasttrain.data.preprocess import Preprocess
from fasttrain.engine import preparing
from fasttrain.engine.opening import open_all
from fasttrain.engine.preparing import Looked, Prepared, look, prepare
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import DataError
from fasttrain.samples import CaseSource


@pytest.fixture
def prepared(tiny, phantoms: Path) -> Prepared:
    return prepare(tiny(data__cache={"kind": "memory"}).recipe, data=phantoms, device="cpu")


def opened(prepared: Prepared, threads: int = 2, progress=lambda *_: None, ahead: MadeAhead | None = None):
    plan = replace(prepared.plan, fill_threads=threads)
    told = lambda text, level: None  # noqa: E731
    return open_all(prepared.recipe, plan, prepared.split, prepared.hardware, progress, told, 0, ahead)


def images(source: CaseSource) -> list[torch.Tensor]:
    return [source[index].image for index in range(len(source))]


def begun(prepared: Prepared) -> MadeAhead:
    work = []
    for part, training in ((prepared.split.train, True), (prepared.split.validation, False)):
        work += [(case, Preprocess(prepared.recipe, training=training)) for case in part]
    return MadeAhead(work, 2)


@pytest.mark.skipif(not can_make_ahead(), reason="this system does not fork, or has no memfd")
def test_the_same_volumes_with_some_begun_ahead(prepared: Prepared) -> None:
    found = []
    for ahead in (None, begun(prepared)):
        parts = opened(prepared, ahead=ahead)
        found.append([images(part) for part in parts])
        for part in parts:
            part.close()
    for one, other in zip(*found, strict=True):
        assert one
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert not psutil.Process().children()


def broken(prepared: Prepared, part: str) -> Prepared:
    cases = list(getattr(prepared.split, part))
    gone = Path("/nowhere") / f"{part}.nii.gz"
    cases[0] = replace(cases[0], images=(gone,))
    return replace(prepared, split=replace(prepared.split, **{part: tuple(cases)}))


@pytest.mark.parametrize("beside", [False, can_make_ahead()])
def test_faults_of_both_parts_come_in_one_error(beside: bool, prepared: Prepared) -> None:
    both = broken(broken(prepared, "train"), "validation")
    with pytest.raises(DataError) as caught:
        opened(both, ahead=begun(both) if beside else None)
    faults = caught.value.faults
    assert len(faults) == 2
    assert "train.nii.gz" in faults[0]
    assert "validation.nii.gz" in faults[1]
    assert not psutil.Process().children()


@pytest.mark.parametrize("beside", [False, can_make_ahead()])
def test_a_stop_ends_it_with_all_that_was_begun(beside: bool, prepared: Prepared) -> None:
    stop = StopRequest()

    def progress(*_: object) -> None:
        stop.ask("told so", 143)
        stop.check()

    with pytest.raises(Stopped):
        opened(prepared, progress=progress, ahead=begun(prepared) if beside else None)
    assert not [one.name for one in threading.enumerate() if one.name.startswith(("filling", "taking"))]
    assert not psutil.Process().children()


@pytest.mark.skipif(not can_make_ahead(), reason="this system does not fork, or has no memfd")
def test_volumes_are_begun_for_a_gpu_that_has_cpus_and_memory_for_it(tiny, phantoms: Path) -> None:
    looked = look(tiny(data__cache={"kind": "auto"}).recipe, phantoms, "cpu")
    gpu = replace(looked.hardware, device="cuda:0", cpus=16, memory_free_gib=64.0)
    large = replace(looked.sizes, cache_bytes=1 << 30, build_bytes=1 << 30)

    def makers(hardware=gpu, sizes=large, recipe=looked.recipe) -> int:
        made = preparing._made_ahead(
            Looked(recipe, hardware, looked.root, looked.split, looked.outline, sizes, {}, {}), looked.split
        )
        if made is None:
            return 0
        count = len(psutil.Process().children())
        made.close()
        return count

    cases = len(looked.split.train) + len(looked.split.validation)
    assert makers() == min(14, cases)
    # Half of the memory, less the volumes themselves, at a GiB each
    assert makers(replace(gpu, memory_free_gib=9.0)) == 3
    assert makers(replace(gpu, memory_free_gib=4.0)) == 0
    assert makers(replace(gpu, cpus=3)) == 0
    assert makers(looked.hardware) == 0, "on a CPU"
    assert makers(sizes=replace(large, cache_bytes=1 << 20)) == 0
    assert makers(recipe=tiny(data__cache={"kind": "disk"}).recipe) == 0
    assert not psutil.Process().children()
