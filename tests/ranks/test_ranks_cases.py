"""Ranks of one machine make each case once, map one copy, have the same errors, and leave nothing behind."""

import contextlib
import gc
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from fasttrain import load_recipe
from fasttrain.batches import WindowOrder, fill
from fasttrain.batches.order import turns
from fasttrain.data import handed_over
from fasttrain.data.caches import Window, made_together, open_case_source
from fasttrain.data.made_ahead import MadeAhead, can_make_ahead
from fasttrain.data.outcomes import one_outcome
from fasttrain.data.preprocess import Preprocess
from fasttrain.engine.planning.sizes import sizes_of
from fasttrain.engine.resuming.going_on import GoingOn
from fasttrain.errors import DataError, MachineError, RecipeError
from fasttrain.machine.place import Place
from fasttrain.machine.ranks import Joined
from fasttrain.recipe.data_spec import CacheSpec
from fasttrain.samples import Case, CaseSource
from tests.ranks_running import in_ranks

pytestmark = pytest.mark.skipif(not can_make_ahead(), reason="this system does not fork, or has no memfd")
RECIPE = load_recipe("demo", {"data.spacing": [1, 1, 2], "data.storage_dtype": "float16"}).recipe
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder, made, draw = tmp_path_factory.mktemp("cases"), [], np.random.default_rng(0)
    for number in range(7):
        paths = folder / f"image{number}.nii.gz", folder / f"label{number}.nii.gz"
        shape = (30 + 4 * number, 20, 24)
        nib.save(nib.Nifti1Image(draw.normal(size=shape).astype(np.float32), np.eye(4)), paths[0])
        nib.save(nib.Nifti1Image((draw.random(shape) < 0.01).astype(np.uint8), np.eye(4)), paths[1])
        made.append(Case(str(number), (paths[0],), paths[1]))
    return made


def counting(preprocess: Preprocess, made: list[str]) -> Preprocess:
    """The same, which notes the names of what it makes."""

    class Counting(Preprocess):
        def __call__(self, case: Case) -> dict[str, Any]:
            made.append(case.name)
            return super().__call__(case)

    counted = Counting.__new__(Counting)
    counted.__dict__ = preprocess.__dict__
    return counted


def memory_without_a_name() -> set[str]:
    """The inodes of it that this process maps."""
    maps = Path("/proc/self/maps").read_text()
    return set(re.findall(r" (\d+) +/memfd:fasttrain", maps))


def descriptors() -> int:
    """How many of it are open."""
    links = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(one.readlink()))
    return sum(link.startswith("/memfd:fasttrain") for link in links)


def sums(source: CaseSource) -> list[tuple[float, int, int]]:
    """What tells volumes apart."""
    samples = [source[index] for index in range(len(source))]
    return [(float(one.image.double().sum()), int(one.label.sum()), len(one.centres[0])) for one in samples]  # type: ignore[union-attr]


def opened(joined: Joined, kind: str, cases: list[Case], folder: Path) -> dict[str, Any]:
    made: list[str] = []
    told: list[str] = []
    progress: list[tuple[int, int]] = []
    source = open_case_source(
        kind, cases, counting(Preprocess(RECIPE), made), 2, lambda *one: progress.append(one), folder=folder,
        told=lambda text, level: told.append(text), ranks=joined,
    )  # fmt: skip
    found = {
        "made": made, "sums": sums(source), "mapped": memory_without_a_name(), "told": told, "progress": progress[-1:],
        "files": descriptors(),
    }  # fmt: skip
    source.close()
    del source
    return {**found, "left": memory_without_a_name()}


def test_one_preprocessing_and_one_copy(cases: list[Case], tmp_path: Path) -> None:
    expected = sums(open_case_source("memory", cases, Preprocess(RECIPE), 1))
    ranks = in_ranks(3, opened, "memory", cases, tmp_path)
    assert Counter(name for rank in ranks for name in rank["made"]) == Counter(case.name for case in cases)
    assert all(len(rank["made"]) in (2, 3) for rank in ranks)
    for rank in ranks:
        assert rank["sums"] == expected
        assert rank["mapped"] == ranks[0]["mapped"], "the same memory"
        assert len(rank["mapped"]) == len(cases)
        assert (rank["files"], rank["left"]) == (0, set())
        assert rank["progress"] == [(7, 7)]
        assert rank["told"][0].startswith("memory cache: 7 cases, ")


@pytest.mark.parametrize("kind", ["disk", "lmdb"])
def test_what_is_stored_is_made_by_the_first(kind: str, cases: list[Case], tmp_path: Path) -> None:
    if kind == "lmdb":
        pytest.importorskip("lmdb")
    expected = sums(open_case_source("memory", cases, Preprocess(RECIPE), 1))
    first, second = in_ranks(2, opened, kind, cases, tmp_path)
    assert (len(first["made"]), second["made"]) == (7, [])
    assert first["sums"] == second["sums"] == expected
    assert (len(first["told"]), second["told"]) == (1, [])


def test_one_case_for_two_ranks(cases: list[Case], tmp_path: Path) -> None:
    ranks = in_ranks(2, opened, "memory", cases[:1], tmp_path)
    assert sum(len(rank["made"]) for rank in ranks) == 1
    assert [len(rank["sums"]) for rank in ranks] == [1, 1]


def failing(joined: Joined, cases: list[Case], folder: Path) -> list[tuple[type, tuple[str, ...]]]:
    """What is raised where cases of several ranks have faults, and where one rank cannot go on."""
    found = []
    gone = [replace(case, images=(Path("/nowhere") / case.images[0].name,)) for case in cases]
    for kind in ("memory", "disk", "smart"):
        with pytest.raises(DataError) as caught:
            open_case_source(kind, gone, Preprocess(RECIPE), 2, folder=folder, ranks=joined)
        found.append((type(caught.value), caught.value.faults))
    for broken in (ValueError("no such thing"), MachineError("no more of it")):

        class Broken(Preprocess):
            def __call__(self, case: Case) -> dict[str, Any]:
                if joined.place.rank == 1:
                    raise broken  # noqa: B023
                return super().__call__(case)

        with pytest.raises(type(broken)) as failed:
            open_case_source("memory", cases, Broken(RECIPE), 2, ranks=joined)
        found.append((type(failed.value), (str(failed.value),)))
        del failed

    def stopped(done: int, total: int) -> None:
        if joined.place.rank == 1 and done > 2:
            raise InterruptedError("told so")

    with pytest.raises(InterruptedError):
        open_case_source("memory", cases, Preprocess(RECIPE), 2, stopped, ranks=joined)
    assert descriptors() == 0
    # Tracebacks held on to them
    gc.collect()
    assert not memory_without_a_name()
    return found


def test_all_ranks_raise_the_same(cases: list[Case], tmp_path: Path) -> None:
    first, second = in_ranks(2, failing, cases, tmp_path)
    assert first == second
    (memory, faults), (disk, stored), (smart, window), (odd, text), (ours, sentence) = first
    assert (memory, disk, smart) == (DataError, DataError, DataError)
    assert [re.findall(r"image\d", fault)[0] for fault in faults] == [f"image{number}" for number in range(7)]
    assert stored == faults
    # Each rank holds a part of its own: of four cases two, of three one
    assert len(window) == 3
    assert set(window) < set(faults)
    assert (odd, text) == (ValueError, ("no such thing",))
    assert (ours, sentence) == (MachineError, ("no more of it",))


def apart(joined: Joined, cases: list[Case], folder: Path) -> dict[str, Any]:
    if joined.place.rank == 1:

        def refused(self: handed_over.Offer) -> dict[str, Any]:
            raise PermissionError(13, "Permission denied")

        handed_over.Offer.taken = refused  # type: ignore[method-assign]
    found = opened(joined, "memory", cases, folder)
    made = made_together(cases, Preprocess(RECIPE), joined)
    return {**found, "together": made is not None}


def test_ranks_that_cannot_reach_each_other_make_their_own(cases: list[Case], tmp_path: Path) -> None:
    for rank in in_ranks(2, apart, cases, tmp_path):
        assert len(rank["made"]) == 7
        assert rank["told"][0] == (
            "each of the 2 ranks of this machine makes and keeps all volumes by itself, for they cannot hand them over "
            "([Errno 13] Permission denied)"
        )
        assert not rank["together"]


def begun_ahead(joined: Joined, cases: list[Case], most_open: int) -> tuple[list[str], list[Any], int]:
    made: list[str] = []
    preprocess = Preprocess(RECIPE)
    ahead = MadeAhead([(case, preprocess) for case in cases[:5]], 2, most_open) if joined.place.leads else None
    source = open_case_source("memory", cases, counting(preprocess, made), 2, ahead=ahead, ranks=joined)
    if ahead is not None:
        ahead.close()
    return made, sums(source), descriptors()


@pytest.mark.parametrize("most_open", [3, 0])
def test_what_the_first_began_is_handed_on(cases: list[Case], most_open: int) -> None:
    expected = sums(open_case_source("memory", cases, Preprocess(RECIPE), 1))
    first, second = in_ranks(2, begun_ahead, cases, most_open)
    assert {*first[0], *second[0]} == {"5", "6"}
    assert len(second[0]) == 1
    assert first[1] == second[1] == expected
    assert (first[2], second[2]) == (0, 0)


def residents(joined: Joined, cases: list[Case], room_bytes: int) -> dict[str, Any]:
    preprocess = Preprocess(RECIPE)
    source = made_together(cases, preprocess, joined)
    assert source is not None
    told: list[str] = []
    filled = fill(source, RECIPE, CPU, room_bytes, 2, told=lambda text, level: told.append(text))
    here = [index for index in range(len(cases)) if index not in filled.rest]
    digest = {index: float(filled.volumes.volume(index)[0].double().sum()) for index in here}
    digest |= {index: float(sample.image.double().sum()) for index, sample in filled.rest.items()}
    return {"digest": digest, "rest": sorted(filled.rest), "mapped": memory_without_a_name(), "names": filled.names}


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_every_rank_is_filled_from_one_making(cases: list[Case], share: float) -> None:
    source = open_case_source("memory", cases, Preprocess(RECIPE), 1)
    expected = [one[0] for one in sums(source)]
    voxels = sum(source[index].label.numel() for index in range(7))  # type: ignore[union-attr]
    for rank in in_ranks(2, residents, cases, int(3 * voxels * share)):
        assert [rank["digest"][index] for index in range(7)] == pytest.approx(expected, rel=1e-12)
        assert rank["names"] == tuple("0123456")
        assert len(rank["mapped"]) == len(rank["rest"])
        assert bool(rank["rest"]) == (share < 1)


def outcome(joined: Joined) -> list[str]:
    found = []
    for raisers in ((), (0,), (1,), (0, 1)):
        given_up: list[int] = []

        def work() -> int:
            if joined.place.rank in raisers:  # noqa: B023
                raise DataError([f"fault of rank {joined.place.rank}", "fault of both"])
            return joined.place.rank

        try:
            found.append(str(one_outcome(joined.gather, work, given_up.append)))
        except DataError as error:
            found.append(f"{error.faults} {given_up}")
    return found


def test_one_outcome_for_all() -> None:
    first, second = in_ranks(2, outcome)
    assert (first[0], second[0]) == ("0", "1")
    assert first[1] == "('fault of rank 0', 'fault of both') []"
    assert second[1] == "('fault of rank 0', 'fault of both') [1]"
    assert first[2] == "('fault of rank 1', 'fault of both') [0]"
    assert first[3] == second[3] == "('fault of rank 0', 'fault of both', 'fault of rank 1') []"


@pytest.mark.parametrize(("count", "ranks", "batch_size"), [(11, 2, 3), (9, 4, 2), (4, 4, 1), (12, 3, 5)])
def test_windows_of_all_ranks_come_round_to_every_case_and_no_case_is_two_ranks(
    count: int, ranks: int, batch_size: int
) -> None:
    spec = CacheSpec(kind="smart", cache_share=0.5, replace_rate=0.3)
    windows = Window.of_all(spec, count, ranks)
    steps = -(-max(window.held for window in windows) // batch_size)
    per_epoch = steps * batch_size * ranks
    seen: list[set[int]] = []
    for rank, window in enumerate(windows):
        order = WindowOrder(window.of, 1, 7, per_epoch, ranks, batch_size)
        place, own = Place(rank, ranks), set()
        for first, _ in zip(turns(0, batch_size, place), range(steps * 60), strict=False):
            given = order.cases_at(np.arange(first, first + batch_size)).tolist()
            epoch = first // per_epoch
            own |= set(given)
            assert set(given) <= set(window.of(epoch))
        for epoch in range(3):
            # A rank's own samples of an epoch have every case of its window, as evenly as can be
            firsts = [
                first for first, _ in zip(turns(epoch * per_epoch, batch_size, place), range(steps), strict=False)
            ]
            whole = Counter(
                case for first in firsts for case in order.cases_at(np.arange(first, first + batch_size)).tolist()
            )
            assert set(whole) == set(window.of(epoch))
            assert max(whole.values()) - min(whole.values()) <= 1
        seen.append(own)
    assert sum(len(own) for own in seen) == count
    assert set().union(*seen) == set(range(count))


def test_a_set_number_of_cases_is_what_all_hold_together() -> None:
    spec = CacheSpec(kind="smart", cache_cases=5)
    assert [window.held for window in Window.of_all(spec, 12, 3)] == [2, 2, 1]
    assert [window.held for window in Window.of_all(spec, 12, 1)] == [5]


@pytest.mark.parametrize(("then", "now", "refused"), [(2, 4, True), (4, 2, True), (2, 2, False)])
def test_a_run_with_windows_goes_on_with_as_many_ranks(then: int, now: int, refused: bool) -> None:
    """The steps are the same by training.batch_policy: keep_effective, but each rank had cases of its own."""
    sizes = sizes_of(RECIPE, (16, 2, 0), 1 << 20, ranks=now)
    began = {**asdict(sizes), "ranks": then}
    going = SimpleNamespace(saved=object(), plan={"sizes": began})
    prepared = SimpleNamespace(plan=SimpleNamespace(cache="smart", sizes=sizes))
    with pytest.raises(RecipeError, match=f"go on with {then} ranks") if refused else contextlib.nullcontext():
        GoingOn.check_order(going, prepared)  # type: ignore[arg-type]
