"""The memory plan and the workers' plan: which cache is chosen and why, what is refused, what small limits lower."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import train
from fasttrain.data.caches import estimate_bytes
from fasttrain.data.caches.keys import settings_digest
from fasttrain.data.preprocess import Preprocess
from fasttrain.engine.planning import memory_plan
from fasttrain.engine.planning.memory_plan import choose_cache, memory_need
from fasttrain.engine.planning.sizes import Sizes, sizes_of
from fasttrain.engine.planning.worker_plan import WORKER_BYTES, batch_bytes, choose_workers
from fasttrain.engine.run import prepare, resume
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import OutOfMemoryError, RecipeError, StorageError
from fasttrain.machine import hardware as hardware_module
from fasttrain.machine.hardware import GIB, Hardware, survey
from fasttrain.recipe import Recipe
from fasttrain.telemetry.events import Event, StepLogged
from fasttrain.wording import size_in_memory

CPU = Hardware("cpu", "a CPU", 6, 8.0)
LIMITED = replace(CPU, memory_bound="the cgroup's limit")
H100 = Hardware("cuda:0", "H100", 16, 64.0, "GPU-1", 80.0, (9, 0), 91000)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sets how many GiB the disk of the cache has."""
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))

    def has(gib: float) -> None:
        monkeypatch.setattr(memory_plan, "disk_free_bytes", lambda _: int(gib * GIB))

    has(1000)
    return has


def sized(recipe: Recipe, gib: float, largest_gib: float = 0.0, cases: int = 16) -> Sizes:
    return sizes_of(recipe, (cases, 2, 0), int(gib * GIB), int(largest_gib * GIB))


def test_memory_then_disk_then_smart_then_nothing(tiny, disk) -> None:
    recipe = tiny(data__cache__kind="auto", training__epochs=9).recipe
    assert choose_cache(recipe, CPU, sized(recipe, 5.0))[0] == "memory"
    kind, why = choose_cache(recipe, LIMITED, sized(recipe, 6.0))
    assert kind == "disk"
    assert why.startswith(
        "memory would need about 6.0 GiB (6.0 GiB of volumes, 40 KiB of batches), more than 70% of 8.0 GiB free"
    )
    assert "bounded by the cgroup's limit; the disk of" in why
    assert why.endswith("has 1000.0 GiB free")
    disk(2)
    kind, why = choose_cache(recipe, CPU, sized(recipe, 6.0))
    assert kind == "smart"
    assert "nor would about 6.0 GiB fit on the disk of" in why
    assert "8 of 16 cases in memory, about 3.4 GiB; 1 change after an epoch" in why
    assert choose_cache(recipe, CPU, sized(recipe, 60.0))[0] == "none"


def test_smart_is_never_chosen_where_some_cases_would_not_be_seen(tiny, disk) -> None:
    disk(2)
    for epochs, kind in ((8, "none"), (9, "smart")):  # 8 cases at first, another after each epoch, 16 in all
        recipe = tiny(data__cache__kind="auto", training__epochs=epochs).recipe
        assert choose_cache(recipe, CPU, sized(recipe, 6.0))[0] == kind


def test_an_epoch_is_as_long_under_smart_that_was_chosen_as_under_any_kind(tiny, disk) -> None:
    disk(2)
    recipe = tiny(data__cache__kind="auto", training__epochs=9, training__iterations_per_epoch=None).recipe
    sizes = sized(recipe, 6.0)
    assert choose_cache(recipe, CPU, sizes)[0] == "smart"
    assert sizes.steps_per_epoch == 16  # 16 cases with two patches each, in batches of 2


def test_a_run_that_goes_on_keeps_the_order_of_its_cases(tiny, disk) -> None:
    recipe = tiny(data__cache__kind="auto", training__epochs=9).recipe
    small, large = sized(recipe, 1.0), sized(recipe, 6.0)
    kind, why = choose_cache(recipe, CPU, small, {"cache": "smart"})
    assert kind == "smart"
    assert "as the run began" in why
    with pytest.raises(OutOfMemoryError, match="data.cache.kind: smart needs"):
        choose_cache(recipe, CPU, sized(recipe, 60.0), {"cache": "smart"})
    disk(2)
    assert choose_cache(recipe, CPU, large, {"cache": "memory"})[0] == "none"
    assert choose_cache(recipe, CPU, small, {"cache": "none"})[0] == "memory"


def test_what_a_former_run_stored_needs_no_room_again(tiny, disk, tmp_path: Path) -> None:
    recipe = tiny(data__cache__kind="auto").recipe
    disk(1)
    sizes = sized(recipe, 9.0)
    assert choose_cache(recipe, CPU, sizes)[0] == "none"
    folder = tmp_path / "volumes" / "disk" / settings_digest(Preprocess(recipe, training=True))
    folder.mkdir(parents=True)
    with open(folder / f"{'0' * 32}.volume", "wb") as stream:
        stream.write(b"fasttrain vol 1\n")
        stream.truncate(9 * GIB)  # a hole: it takes no room
    kind, why = choose_cache(recipe, CPU, sizes)
    assert kind == "disk"
    assert "holds 9.0 GiB of them already" in why


def test_a_kind_that_cannot_fit_is_refused_with_two_remedies(tiny, disk) -> None:
    recipe = tiny(data__cache__kind="memory").recipe
    with pytest.raises(OutOfMemoryError) as caught:
        choose_cache(recipe, LIMITED, sized(recipe, 9.0))
    assert caught.value.exit_code == 5
    assert str(caught.value) == (
        "data.cache.kind: memory needs about 9.0 GiB (9.0 GiB of volumes, 40 KiB of batches) and 8.0 GiB are free, bounded by "
        "the cgroup's limit; set data.cache.kind: disk (or auto), or raise the container's memory limit"
    )
    assert choose_cache(recipe, CPU, sized(recipe, 7.9))[0] == "memory"
    # What reads alike gets the decimals that tell it apart
    with pytest.raises(
        OutOfMemoryError, match=r"needs about 8\.01 GiB \(8.0 GiB of .*\) and 8\.00 GiB are free, bounded by"
    ):
        choose_cache(recipe, LIMITED, sized(recipe, 8.01))
    with pytest.raises(
        OutOfMemoryError, match=r"needs about 840 KiB \(800 KiB of volumes, 40 KiB of batches\) and 512 KiB are"
    ):
        choose_cache(recipe, replace(LIMITED, memory_free_gib=2**-11), sized(recipe, 800 / (1 << 20)))
    disk(2)
    recipe = tiny(data__cache__kind="disk").recipe
    with pytest.raises(
        StorageError, match=r"needs about 2\.01 GiB and the disk of .* has 2\.00 GiB free; free some with"
    ):
        choose_cache(recipe, CPU, sized(recipe, 2.01))
    disk(2**-12)
    with pytest.raises(StorageError, match=r"needs about 320 KiB and the disk of .* has 256 KiB free; free some with"):
        choose_cache(recipe, CPU, sized(recipe, 320 / (1 << 20)))
    disk(2)
    with pytest.raises(StorageError, match=r"needs about 3.0 GiB and the disk of .* has 2.0 GiB free; free some with"):
        choose_cache(recipe, CPU, sized(recipe, 3.0))
    assert choose_cache(recipe, CPU, sized(recipe, 1.9))[0] == "disk"
    # How much a crop leaves no header shows
    cropped = tiny(data__cache__kind="disk", data__crop_foreground={"above": 0.0}).recipe
    assert choose_cache(cropped, CPU, sized(cropped, 3.0))[0] == "disk"


def test_ranks_batches_and_validation_count(tiny, disk) -> None:
    recipe = tiny(data__workers=3, data__prefetch_factor=4, data__cache__kind="memory").recipe
    one = memory_need(recipe, CPU, sized(recipe, 1.0), "memory")
    two = memory_need(recipe, replace(CPU, ranks=4, local_ranks=2), sized(recipe, 1.0), "memory")
    assert one.batches == 13 * 2 * 16**3 * 5 + 3 * WORKER_BYTES
    assert (two.volumes, two.batches) == (one.volumes, 2 * one.batches), "one copy of the volumes for a machine"
    # A case of 1 GiB: voxels of 5 bytes; 4 bytes each for the image and twice three classes with their weights
    validation = memory_need(recipe, CPU, sized(recipe, 1.0, 1.0), "memory").validation
    assert validation == GIB // 5 * 4 * (1 + 2 * (recipe.data.class_count + 1))
    assert memory_need(recipe, H100, sized(recipe, 1.0, 1.0), "memory").validation == 0
    with pytest.raises(OutOfMemoryError, match="of validation"):
        choose_cache(recipe, CPU, sized(recipe, 7.0, 1.0))


def test_smart_is_parted_among_ranks(tiny, disk) -> None:
    recipe = tiny(data__cache={"kind": "smart", "replace_rate": 0.5}).recipe
    sizes = [sizes_of(recipe, (10, 2, 0), 10 * GIB, ranks=ranks) for ranks in (1, 4)]
    four = replace(CPU, memory_free_gib=64.0, ranks=4, local_ranks=4)
    # Parts of 3, 3, 2 and 2 cases, of which each holds one and replaces it
    whys = [choose_cache(recipe, hardware, one)[1] for hardware, one in zip((four, four), sizes, strict=True)]
    assert "5 of 10 cases in memory, about 8.0 GiB; 3 change after an epoch" in whys[0]
    assert "4 of 10 cases in memory, parted among 4 ranks, about 8.0 GiB; 4 change after an epoch" in whys[1]
    assert memory_need(recipe, replace(four, local_ranks=2), sizes[1], "smart").volumes == 4 * GIB
    few = sizes_of(recipe, (3, 2, 0), GIB, ranks=4)
    with pytest.raises(RecipeError, match="smart parts 3 training cases among 4 ranks, and each needs one"):
        choose_cache(recipe, four, few)
    assert choose_cache(tiny(data__cache__kind="memory").recipe, four, few)[0] == "memory"


def test_workers_of_all_ranks_share_what_the_machine_has(tiny, disk) -> None:
    recipe = tiny(data__workers=4, data__worker_kind="process").recipe
    one = batch_bytes(recipe)
    host = replace(CPU, shared_gib=12 * one / 0.9 / GIB)
    assert choose_workers(recipe, host, "memory", 64 * GIB).prefetch_factor == 2
    lowered = choose_workers(recipe, replace(host, local_ranks=2), "memory", 64 * GIB)
    assert lowered.prefetch_factor == 1
    assert "of /dev/shm, which has" in lowered.reasons["prefetch_factor"]
    assert "for 2 ranks" in lowered.reasons["prefetch_factor"]


def test_the_plan_counts_the_largest_case_that_is_validated(tiny, phantoms: Path, disk) -> None:
    recipe = tiny(data__cache__kind="memory").recipe
    prepared = prepare(recipe, phantoms, "cpu")
    largest = max(estimate_bytes([case], recipe) for case in prepared.split.validation)
    assert prepared.plan.sizes.largest_case_bytes == largest > 0
    (why,) = [one.reason for one in prepared.plan.decisions if one.name == "cache"]
    voxels = largest // 5
    assert f"{size_in_memory(4 * voxels * (1 + 2 * (recipe.data.class_count + 1)))} of validation" in why
    assert "0 bytes" not in why
    assert f"of {size_in_memory(prepared.hardware.memory_free_gib * GIB)} free, bounded by" in why


def test_smart_that_was_not_taken_says_why(tiny, disk) -> None:
    disk(2)
    recipe = tiny(data__cache__kind="auto", training__epochs=8).recipe
    assert "smart would not come round to every case in 8 epochs" in choose_cache(recipe, CPU, sized(recipe, 6.0))[1]
    assert "smart would need about" in choose_cache(recipe, CPU, sized(recipe, 60.0))[1]
    went_on = choose_cache(recipe, CPU, sized(recipe, 6.0), {"cache": "memory"})[1]
    assert "smart would change the order of cases that the run began with" in went_on


def test_memory_of_workers_is_called_theirs(tiny, disk) -> None:
    recipe = tiny(data__cache__kind="auto", data__workers=2).recipe
    assert "256 MiB for 2 workers with batches" in choose_cache(recipe, CPU, sized(recipe, 1.0))[1]


def shared(megabytes: float | None, hardware: Hardware = CPU, files: int | None = None) -> Hardware:
    return replace(hardware, shared_gib=None if megabytes is None else megabytes * 1e6 / GIB, open_files=files)


@pytest.mark.parametrize(
    ("megabytes", "workers", "ahead", "kind"),
    [
        (None, 4, 2, "process"),
        (300, 4, 2, "process"),
        (200, 4, 1, "process"),  # 4 × 2 + 1 batches of 21.0 MB are more than nine tenths of it
        (100, 3, 1, "process"),
        (67, 1, 1, "process"),
        (16, 4, 2, "thread"),
        (0, 4, 2, "thread"),
    ],
)
def test_little_shared_memory_lowers_batches_ahead_then_workers(tiny, megabytes, workers, ahead, kind) -> None:
    recipe = tiny(training__batch_size=2, patch__size=[128, 128, 128], data__workers=4).recipe
    assert batch_bytes(recipe) == 2 * 128**3 * 5
    choice = choose_workers(recipe, shared(megabytes), "none", math.inf)
    assert (choice.workers, choice.prefetch_factor, choice.kind) == (workers, ahead, kind)
    short = [name for name, why in choice.reasons.items() if "of /dev/shm, which has" in why]
    lowered = {"workers": workers < 4, "prefetch_factor": ahead < 2, "worker_kind": kind == "thread"}
    assert short == [name for name, is_lower in lowered.items() if is_lower]


def test_few_open_files_mean_fewer_workers_then_threads(tiny) -> None:
    recipe = tiny(data__workers=8, data__prefetch_factor=2).recipe
    found = {}
    for files in (None, 1024, 256, 100, 70, 24):
        choice = choose_workers(recipe, shared(None, files=files), "none", math.inf)
        found[files] = (choice.workers, choice.kind)
    assert found == {
        None: (8, "process"),
        1024: (8, "process"),
        256: (8, "process"),
        100: (3, "process"),
        70: (8, "thread"),
        24: (8, "thread"),
    }


def test_little_memory_lowers_workers_down_to_none(tiny) -> None:
    recipe = tiny(training__batch_size=2, patch__size=[128, 128, 128], data__workers=4).recipe
    one = batch_bytes(recipe)
    found = [
        choose_workers(recipe, CPU, "none", spare) for spare in (10 * GIB, 3 * one + 2 * WORKER_BYTES, 2 * one, one)
    ]
    assert [(choice.workers, choice.kind) for choice in found] == [
        (4, "process"),
        (2, "process"),
        (1, "thread"),
        (0, "process"),
    ]
    assert "of memory and the cache leaves" in found[-1].reasons["workers"]


@settings(max_examples=100, deadline=None)
@given(
    workers=st.integers(0, 20),
    ahead=st.integers(1, 8),
    megabytes=st.floats(0, 400),
    files=st.integers(0, 400),
    spare=st.floats(0, 3e9),
    kind=st.sampled_from(["auto", "process", "thread"]),
)
def test_what_is_chosen_fits_and_is_no_more_than_was_asked(
    tiny, workers: int, ahead: int, megabytes: float, files: int, spare: float, kind: str
) -> None:
    recipe = tiny(data__workers=workers, data__prefetch_factor=ahead, data__worker_kind=kind).recipe
    choice = choose_workers(recipe, shared(megabytes, files=files), "none", spare)
    assert 0 <= choice.workers <= workers
    assert 1 <= choice.prefetch_factor <= ahead
    assert all(choice.reasons.values())
    batches = (choice.workers * choice.prefetch_factor + 1) * batch_bytes(recipe)
    if choice.workers:
        assert batches <= spare
        assert choice.kind == "thread" or batches <= megabytes * 1e6
    if kind == "thread" and choice.workers:
        assert choice.kind == "thread"


def test_smart_that_was_chosen_trains_as_smart_that_was_asked_for_and_stands_on_a_resume(
    tiny, phantoms: Path, disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither memory nor disk has room; the resume has more memory, and goes on with the order it began with."""
    disk(0)
    chosen, asked = (tiny(data__cache__kind=kind, output__checkpoint_every="3 steps") for kind in ("auto", "smart"))
    plan = prepare(chosen.recipe, phantoms, "cpu").plan
    hardware = survey("cpu")
    needs = [memory_need(chosen.recipe, hardware, plan.sizes, kind).total for kind in ("smart", "memory")]
    assert needs[0] < needs[1]
    free = [int(sum(needs) / 2 / memory_plan.MEMORY_SHARE)]
    monkeypatch.setattr(hardware_module, "memory_free", lambda: (free[0], "the host"))
    stop = StopRequest()

    class Stopper:
        def on_event(self, event: Event) -> None:
            if isinstance(event, StepLogged) and event.step == 8:
                stop.ask("a test", 143)

        def close(self) -> None: ...

    run = train(chosen, data=phantoms, run=tmp_path / "run", device="cpu", observers=[Stopper()], stop=stop).run
    assert json.loads((run / "plan.json").read_text())["cache"] == "smart"
    free[0] = 1 << 50
    assert prepare(chosen.recipe, phantoms, "cpu").plan.cache == "memory"
    resume(run)
    whole = train(asked, data=phantoms, run=tmp_path / "whole", device="cpu").run
    found = [_losses(folder) for folder in (run, whole)]
    assert found[0] == found[1]
    assert len(found[0]) == 20


def _losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "StepLogged"}
