"""Memory that ran out on a GPU: the phase, what each held, and two settings that would fit, by made figures and on a GPU."""

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fasttrain import train
from fasttrain.engine.failures import asked_bytes, explained
from fasttrain.engine.phases import FILLING, FIRST_STEP, MEASURING, TRAINING, VALIDATION, GpuState, Phases
from fasttrain.engine.planning.remedies import does_not_fit, largest_batch, largest_patch, need_of_batch, remedies
from fasttrain.errors import OutOfMemoryError
from fasttrain.machine.hardware import GIB, Hardware

ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB"
)
H100 = Hardware("cuda:0", "H100", 16, 64.0, "GPU-1", 80.0, (9, 0), 91900, gpu_free_gib=78.0)


def state(phase: str = TRAINING, **more: object) -> GpuState:
    """16 GiB of which 2 are held by weights; the phase came to 15."""
    return replace(GpuState(phase, 16 * GIB, 2 * GIB, 15 * GIB), **more)


def test_the_sentence_of_a_training_step(tiny) -> None:
    recipe = tiny(training__batch_size=12, training__accumulate=2, patch__size=[96, 96, 96]).recipe
    found = explained(ERROR, recipe, 0, state(peaks={FILLING: GIB, FIRST_STEP: 14 * GIB}), "training step 12")
    assert isinstance(found, OutOfMemoryError)
    assert found.exit_code == 5
    # 2 + 15 × share of 17 GiB within 95% of 16: shares up to 0.88, and 8 of 12 is the largest divisor of 24 below that
    assert str(found) == (
        "the GPU ran out of memory in training step 12 when 2.00 GiB more were asked for: it held at most 1.0 GiB in filling the "
        "cache, 14.0 GiB in the first step, 15.0 GiB in training, of 16.0 GiB that may be used; by these figures either of these "
        "would fit: training.batch_size=8 with training.accumulate=3 (the same effective batch of 24), or "
        "acceleration.activation_checkpointing=on"
    )


def test_what_a_step_was_measured_to_hold_counts_where_it_was_broken_off_early(tiny) -> None:
    recipe = tiny(training__batch_size=16).recipe
    early = state(FIRST_STEP, peak=3 * GIB, step=40 * GIB)
    assert "training.batch_size=4" in str(explained(ERROR, recipe, 0, early, FIRST_STEP))


def test_volumes_that_would_make_room_are_named(tiny) -> None:
    recipe = tiny(training__batch_size=1, patch__size=[32, 32, 32]).recipe
    found = remedies(recipe, state(volumes=6 * GIB, base=8 * GIB), 17 * GIB)
    assert found == [
        "data.cache.kind=memory (the GPU holds 6.0 GiB of volumes)",
        "acceleration.activation_checkpointing=on",
    ]
    found = remedies(recipe, state(), 19 * GIB, checkpointed=True)
    assert found == ["patch.size=[28,28,32]"]


def test_a_validation_has_remedies_of_its_own(tiny) -> None:
    recipe = tiny(validation__window__batch_size=8, training__batch_size=4).recipe
    # 2 GiB of weights and 6 of sums are held whatever the number of windows: 8 + 10 × share
    found = remedies(recipe, state(VALIDATION, stitching=6 * GIB), 18 * GIB)
    assert found == ["validation.window.batch_size=5"]
    recorded = state(VALIDATION, stitching=6 * GIB, peaks={TRAINING: 10 * GIB})
    assert remedies(recipe, recorded, 18 * GIB) == [
        "validation.window.batch_size=5",
        "training.batch_size=2 with training.accumulate=2",
    ]
    told = str(explained(ERROR, recipe, 0, recorded, VALIDATION))
    assert told.startswith("the GPU ran out of memory in validation when")


def test_the_cache_has_remedies_of_its_own(tiny) -> None:
    recipe = tiny(training__batch_size=4).recipe
    assert remedies(recipe, state(FILLING, volumes=12 * GIB), 17 * GIB) == [
        "data.cache.kind=memory (the GPU holds 12.0 GiB of volumes)",
        "training.batch_size=2 with training.accumulate=2",
    ]


def test_nothing_that_would_fit_is_said_as_well(tiny) -> None:
    recipe = tiny(training__batch_size=1).recipe
    hopeless = state(base=16 * GIB)
    assert str(explained(ERROR, recipe, 0, hopeless, TRAINING)).endswith(
        "no smaller batch or patch would fit: take a smaller network, or a GPU with more memory"
    )


def test_a_step_that_was_too_large_when_it_was_measured(tiny) -> None:
    recipe = tiny(training__batch_size=48, patch__size=[128, 128, 128]).recipe
    told = does_not_fit(recipe, H100, {1: 5 * GIB, 2: 8 * GIB}, checkpointed=False)
    # 2 GiB and 3 a patch: 24 patches hold 74.0 of 74.1 GiB that may be used
    assert told == (
        "measuring a training step: 48 patches of [128, 128, 128] do not fit into the 78.0 GiB that H100 has free: 1 held 5.0 "
        "GiB, 2 held 8.0 GiB, so 48 would hold some 146.0 GiB; by these figures either of these would fit: "
        "training.batch_size=24 with training.accumulate=2 (the same effective batch of 48), or patch.size=[100,100,104]"
    )
    assert "nor would one; lower patch.size" in does_not_fit(recipe, H100, {}, checkpointed=True)
    assert "acceleration" not in does_not_fit(recipe, H100, {1: 2 * GIB, 2: 4 * GIB}, checkpointed=True)


@given(
    base=st.integers(0, 20), slope=st.integers(1, 10), batch=st.integers(2, 64), limit=st.integers(1, 90),
    accumulate=st.integers(1, 4),
)  # fmt: skip
def test_the_largest_batch_fits_and_a_larger_one_does_not(base, slope, batch, limit, accumulate) -> None:
    need = lambda patches: base + slope * patches  # noqa: E731
    assert need_of_batch({1: need(1), 2: need(2)}, batch) == (base, need(batch))
    found = largest_batch(base, need(batch), limit, batch, batch * accumulate)
    fits = [fewer for fewer in range(1, batch) if need(fewer) <= 0.95 * limit and (batch * accumulate) % fewer == 0]
    assert found == max(fits, default=None)


@given(
    st.lists(st.integers(2, 40), min_size=2, max_size=3),
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=3, max_size=3),
    st.integers(1, 100),
)
def test_the_largest_patch_is_one_that_the_network_takes(counts: list[int], factors: list[int], limit: int) -> None:
    steps = tuple(factors[: len(counts)])
    size = tuple(count * factor for count, factor in zip(counts, steps, strict=True))
    found = largest_patch(10, 100, limit, size, steps)
    if found is None:
        return
    assert found != size
    assert all(small <= large for small, large in zip(found, size, strict=True))
    assert all(small % factor == 0 and small >= 2 * factor for small, factor in zip(found, steps, strict=True))
    voxels = [torch.Size(one).numel() for one in (found, size)]
    assert 10 + 90 * voxels[0] / voxels[1] <= 0.95 * limit + 1e-9


def test_a_line_through_one_point_errs_upwards() -> None:
    assert need_of_batch({1: 3 * GIB}, 8) == (0, 24 * GIB)
    # Measurements that fall with the batch are noise, not memory that is given back
    assert need_of_batch({1: 300, 2: 200}, 8)[1] == 300


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Tried to allocate 20.00 GiB.", 20 * GIB),
        ("Tried to allocate 512.00 MiB (GPU 0", 512 << 20),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 32768000000 bytes", 32768000000),
        ("CUBLAS_STATUS_ALLOC_FAILED", 0),
    ],
)
def test_what_was_asked_for_by_the_allocators_words(text: str, count: int) -> None:
    assert asked_bytes(RuntimeError(text)) == count


def test_without_a_gpu_the_phase_alone_is_known(tiny, phantoms: Path, tmp_path: Path, monkeypatch) -> None:
    phases = Phases()
    phases.watch(torch.device("cpu"))
    phases.enter(VALIDATION)
    assert phases.now == VALIDATION
    assert phases.state(VALIDATION) is None

    from fasttrain.engine.validating.validation import Validator

    def run(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Validator, "run", run)
    with pytest.raises(OutOfMemoryError, match="this machine ran out of memory in validation; lower"):
        train(tiny(training__epochs=1), data=phantoms, run=tmp_path / "run", device="cpu")
    assert json.loads((tmp_path / "run/summary.json").read_text())["exit_code"] == 5


@pytest.mark.parametrize(("step", "told"), [(1, "in the first step"), (3, "in training step 3")])
def test_the_step_is_named(step: int, told: str, tiny, phantoms: Path, tmp_path: Path, monkeypatch) -> None:
    from fasttrain.engine.step import Step

    taken: list[int] = []
    original = Step.__call__

    def call(self: Step, *arguments: object) -> torch.Tensor:
        taken.append(1)
        if len(taken) == step:
            raise MemoryError
        return original(self, *arguments)

    monkeypatch.setattr(Step, "__call__", call)
    # Of one patch there is no smaller batch to try
    with pytest.raises(OutOfMemoryError, match=told):
        train(tiny(training__epochs=1, training__batch_size=1), data=phantoms, run=tmp_path / "run", device="cpu")


@pytest.mark.gpu
def test_memory_that_runs_out_on_a_gpu_names_phase_peaks_and_settings_that_do_fit(
    tiny, phantoms: Path, tmp_path: Path
) -> None:
    """The process may use a sixteenth of the card; the batch that the sentence names then trains."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1 / 16)
    common = {
        "network": {"kind": "unet", "features": [32, 64], "strides": [2]},
        "patch__size": [64, 64, 64],
        "training__epochs": 1,
        "training__iterations_per_epoch": 2,
        # Nothing is left to be measured: the run itself meets the end of memory
        "acceleration__amp": "bf16",
        "acceleration__channels_last": "on",
        "acceleration__compile": "off",
        "acceleration__activation_checkpointing": "off",
    }
    # So large that half of it, which the run tries by itself, does not fit either
    batch = 4 * 2 ** (total // 16 // (64**3 * 400)).bit_length()
    try:
        with pytest.raises(OutOfMemoryError) as caught:
            train(tiny(training__batch_size=batch, **common), data=phantoms, run=tmp_path / "run", device="cuda")
        told = str(caught.value)
        # The frames of the failed run hold its tensors
        del caught
        gc.collect()
        assert re.search(r"ran out of memory in the first step when .* more were asked for: it held at most", told)
        found = re.search(r"training.batch_size=(\d+) with training.accumulate=(\d+)", told)
        assert found is not None, told
        fewer, passes = int(found[1]), int(found[2])
        assert fewer * passes == batch
        torch.cuda.empty_cache()
        settings = {**common, "training__batch_size": fewer, "training__accumulate": passes}
        # What was broken off shows a lower bound: the batch may have to be lowered once more, and is then named anew
        for attempt in range(4):
            try:
                train(tiny(**settings), data=phantoms, run=tmp_path / f"fits{attempt}", device="cuda")
                break
            except OutOfMemoryError as error:
                told = str(error)
            again = re.search(r"training.batch_size=(\d+) with training.accumulate=(\d+)", told)
            assert again is not None, told
            settings |= {"training__batch_size": int(again[1]), "training__accumulate": int(again[2])}
            gc.collect()
            torch.cuda.empty_cache()
        else:
            pytest.fail("no batch that was named did fit")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_a_share_of_the_card_is_all_that_is_planned_with() -> None:
    from fasttrain.machine.hardware import survey

    torch.cuda.empty_cache()
    whole = survey("cuda").gpu_free_gib
    try:
        torch.cuda.set_per_process_memory_fraction(1 / 16)
        share = survey("cuda").gpu_free_gib
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert whole is not None
    assert share is not None
    assert 0 < share <= torch.cuda.get_device_properties(0).total_memory / 16 / GIB < whole


@pytest.mark.gpu
def test_a_measured_step_that_does_not_fit_names_a_batch_that_does(tiny) -> None:
    from fasttrain.engine.planning.choices import choose_step
    from fasttrain.machine.hardware import survey

    torch.cuda.empty_cache()
    hardware = survey("cuda")
    with pytest.raises(OutOfMemoryError) as caught:
        choose_step(
            tiny(training__batch_size=1 << 20, acceleration__activation_checkpointing="off").recipe, hardware, None
        )
    told = str(caught.value)
    del caught
    gc.collect()
    torch.cuda.empty_cache()
    assert told.startswith(f"{MEASURING}: 1,048,576 patches of [16, 16, 16] do not fit into")
    found = re.search(r"training.batch_size=(\d+) with training.accumulate", told)
    assert found is not None, told
    fits = tiny(training__batch_size=int(found[1]) // 2, acceleration__activation_checkpointing="off").recipe
    assert choose_step(fits, hardware, None).held_bytes > 0
