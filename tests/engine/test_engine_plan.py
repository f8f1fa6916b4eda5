"""The plan: sizes, each `auto` decided with a reason, and what cannot be done is refused before anything is read."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.engine.planning import choices
from fasttrain.engine.planning.plan import Plan, make_plan
from fasttrain.engine.planning.sizes import sizes_of
from fasttrain.engine.preparing import prepare
from fasttrain.errors import MachineError, OutOfMemoryError
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.telemetry.events import Event, Message

CPU = Hardware("cpu", "a CPU", 6, 8.0)
H100 = Hardware("cuda:0", "H100", 16, 64.0, "GPU-1", 80.0, (9, 0), 91000)
T4 = Hardware("cuda:0", "T4", 4, 16.0, "GPU-2", 16.0, (7, 5), 91000)
P100 = Hardware("cuda:0", "P100", 4, 16.0, "GPU-3", 16.0, (6, 0), 91000)


@pytest.fixture
def planned(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plan for the tiny recipe with settings; what a GPU would be measured for is set, since there is none."""
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")

    def plan(hardware: Hardware, cache_gib: float = 0.01, former=None, former_device=None, **more: object) -> Plan:
        settled = {"acceleration__compile": "off", "acceleration__activation_checkpointing": "off"}
        recipe = tiny(**{**settled, **more}).recipe
        sizes = sizes_of(recipe, (4, 2, 0), int(cache_gib * GIB))
        return make_plan(recipe, hardware, sizes, former, former_device)

    return plan


def reason(plan: Plan, name: str) -> str:
    return next(decision.reason for decision in plan.decisions if decision.name == name)


@settings(max_examples=60, deadline=None)
@given(
    cases=st.integers(1, 50),
    per_case=st.integers(1, 4),
    batch=st.integers(1, 9),
    accumulate=st.integers(1, 4),
    epochs=st.integers(1, 9),
)
def test_an_epoch_sees_every_case_in_the_fewest_whole_steps(
    tiny, cases: int, per_case: int, batch: int, accumulate: int, epochs: int
) -> None:
    recipe = tiny(
        training__iterations_per_epoch=None,
        training__batch_size=batch,
        training__accumulate=accumulate,
        training__epochs=epochs,
        data__samples_per_case=per_case,
    ).recipe
    sizes = sizes_of(recipe, (cases, 1, 0), 0)
    assert sizes.effective_batch == batch * accumulate
    assert sizes.steps_per_epoch * sizes.effective_batch >= cases * per_case
    assert (sizes.steps_per_epoch - 1) * sizes.effective_batch < cases * per_case
    assert sizes.total_steps == sizes.steps_per_epoch * epochs


def test_where_phantoms_are_made_is_said_once(tiny, tmp_path: Path) -> None:
    recipe = tiny(data__source__cases=3, data__split={"kind": "last", "validation": 1}).recipe
    told: list[Event] = []
    for _ in range(2):
        prepare(recipe, tmp_path / "misspelt", "cpu", told.append)
    made = [event.text for event in told if isinstance(event, Message) and "made" in event.text]
    assert made == [f"3 volumes made and written to {tmp_path / 'misspelt'} (data.source.kind: phantom)"]


def test_every_decision_has_a_reason_and_is_kept(planned) -> None:
    plan = planned(CPU)
    assert {decision.name for decision in plan.decisions} == {
        "device",
        "threads",
        "tf32",
        "amp",
        "channels_last",
        "activation_checkpointing",
        "fused_layers",
        "loss_kernels",
        "cuda_graphs",
        "compile",
        "fused_optimizer",
        "expandable_segments",
        "cache",
        "fill_threads",
        "workers",
        "prefetch_factor",
        "worker_kind",
        "pin_memory",
        "copy_stream",
    }
    assert all(decision.reason and decision.value for decision in plan.decisions)
    assert plan.record()["sizes"]["steps_per_epoch"] == 5
    assert plan.record()["workers"] == plan.workers


def test_workers_are_decided_by_device_cache_and_cores(planned) -> None:
    auto = {"data__workers": "auto"}
    assert planned(CPU, data__cache__kind="memory", **auto).workers == 0
    assert planned(CPU, data__cache__kind="none", **auto).workers == 5
    assert planned(H100, data__cache__kind="memory", **auto).workers == 8
    assert planned(T4, data__cache__kind="none", **auto).workers == 3
    assert (
        planned(Hardware("cuda:0", "H100", 1, 8.0, None, 80.0, (9, 0)), data__cache__kind="none", **auto).workers == 1
    )
    assert planned(CPU, data__workers=3).workers == 3


def test_the_cache_goes_where_it_fits(planned) -> None:
    assert planned(CPU, 1.0, data__cache__kind="auto").cache == "memory"
    large = planned(CPU, 6.0, data__cache__kind="auto")
    assert large.cache == "disk"
    assert "6.0 GiB" in reason(large, "cache")
    assert "more than 70% of 8.0 GiB free, bounded by the host" in reason(large, "cache")
    nowhere = planned(CPU, 1e9, data__cache__kind="auto")
    assert nowhere.cache == "none"
    assert "on the disk of" in reason(nowhere, "cache")
    half = planned(CPU, 10.0, data__cache={"kind": "smart", "cache_share": 0.5, "replace_rate": 0.5})
    assert "2 of 4 cases in memory, about 7.5 GiB" in reason(half, "cache")
    with pytest.raises(
        OutOfMemoryError,
        match=r"smart needs about 9.0 GiB \(9.0 GiB of volumes, .*\) and 8.0 GiB are free.*; lower data.cache.cache_share, or",
    ):
        planned(CPU, 12.0, data__cache={"kind": "smart", "cache_share": 0.5, "replace_rate": 0.5})
    assert planned(CPU, 6.0, data__cache__kind="memory").cache == "memory"  # the user's word, and there is just room


def test_a_memory_cache_that_cannot_fit_is_refused_with_both_sizes(planned) -> None:
    with pytest.raises(
        OutOfMemoryError,
        match=r"data.cache.kind: memory needs about 9\.0 GiB .* and 8\.0 GiB are free, bounded by the host; set "
        r"data.cache.kind: disk \(or auto\), or take a machine with more",
    ):
        planned(CPU, 9.0, data__cache__kind="memory")


@pytest.mark.parametrize(("hardware", "amp"), [(H100, "bf16"), (T4, "fp16"), (P100, "off")])
def test_precision_follows_the_cards_ability(planned, hardware: Hardware, amp: str) -> None:
    assert planned(hardware, acceleration__amp="auto").amp == amp


def test_what_the_device_cannot_do_is_refused(planned) -> None:
    with pytest.raises(MachineError, match="acceleration.amp: fp16 needs a GPU"):
        planned(CPU, acceleration__amp="fp16")
    with pytest.raises(MachineError, match="T4 has no bf16"):
        planned(T4, acceleration__amp="bf16")
    assert planned(T4, acceleration__amp="fp16").amp == "fp16"
    assert planned(CPU, acceleration__amp="bf16").amp == "bf16"


def test_tf32_that_cannot_be_had_is_said(planned) -> None:
    assert planned(H100).tf32
    assert not planned(H100, acceleration__tf32="off").tf32
    asked = planned(T4, acceleration__tf32="on")
    assert not asked.tf32
    assert "T4 has no TF32" in reason(asked, "tf32")


def test_a_resume_keeps_measured_choices_on_the_same_device(planned) -> None:
    """A second measurement might choose otherwise, and the losses would no longer be those of an unbroken run."""
    auto = {"acceleration__amp": "auto", "acceleration__channels_last": "auto"}
    for former in ({"amp": "bf16", "channels_last": False}, {"amp": "off", "channels_last": True}):
        plan = planned(CPU, former=former, former_device="a CPU", **auto)
        assert (plan.amp, plan.channels_last) == (former["amp"], former["channels_last"])
        assert "choice stands" in reason(plan, "amp")
    # What the recipe now says goes before what was measured then
    plan = planned(CPU, former={"amp": "bf16", "channels_last": True}, former_device="a CPU")
    assert (plan.amp, plan.channels_last) == ("off", False)


def test_threads_are_few_beside_a_gpu(planned) -> None:
    assert planned(CPU, acceleration__threads=2).threads == 2
    assert 1 <= planned(H100, acceleration__threads="auto").threads <= 4
    assert math.isfinite(planned(CPU, acceleration__threads="auto").threads)


def test_compiling_is_done_where_it_can_be_and_pays(planned, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    off = planned(CPU, acceleration__compile="auto")
    assert not off.compile
    assert "minutes to begin" in reason(off, "compile")
    assert planned(CPU, acceleration__compile="on").compile

    def chosen(setting: str, seconds: float | None, missing: str | None = None) -> tuple[bool, str]:
        monkeypatch.setattr(choices, "missing_for_compile", lambda: missing)
        recipe = tiny(acceleration__compile=setting).recipe
        return choices.choose_compile(recipe, H100, sizes_of(recipe, (4, 2, 0), 0), seconds, None)

    assert chosen("auto", 60.0) == (True, "about 1200 s of training steps pay for some 30 s of compiling")
    assert not chosen("auto", 0.01)[0]
    assert not chosen("auto", None)[0]
    assert chosen("on", None) == (True, "set in the recipe")
    on, why = chosen("on", 60.0, "there is no C compiler (install gcc)")
    assert not on
    assert why == "asked for, but there is no C compiler (install gcc), so the network runs as it is"


def test_what_a_cpu_has_no_use_for_is_said(planned) -> None:
    plan = planned(CPU, acceleration__expandable_segments="on", data__pin_memory="on", data__copy_stream="on")
    for name in ("expandable_segments", "pin_memory", "copy_stream"):
        assert not getattr(plan, name)
        assert reason(plan, name).startswith("asked for, but there is no GPU")


def test_the_users_own_allocator_setting_stands(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    plan = planned(H100)
    assert not plan.expandable_segments
    assert "in the environment" in reason(plan, "expandable_segments")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_segments_grow_on_a_gpu(planned) -> None:
    assert planned(H100).expandable_segments
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert not planned(H100, acceleration__expandable_segments="off").expandable_segments
