"""The plan of a GPU run: fused layers, CUDA graphs and volumes in the GPU's memory, each where it can be had, with the reason."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.engine.planning import choices, memory_plan, trial
from fasttrain.engine.planning.gpu_memory import resident_bytes, stitching_bytes, tiers_text, volume_room
from fasttrain.engine.planning.plan import Plan, make_plan
from fasttrain.engine.planning.sizes import sizes_of
from fasttrain.engine.preparing import slow_convolutions
from fasttrain.errors import MachineError, RecipeError
from fasttrain.machine.hardware import GIB, Hardware

CPU = Hardware("cpu", "a CPU", 6, 8.0)
H100 = Hardware("cuda:0", "H100", 16, 64.0, "GPU-1", 80.0, (9, 0), 91000)
P100 = Hardware("cuda:0", "P100", 4, 16.0, "GPU-3", 16.0, (6, 0), 91000)
OPEN = {
    "acceleration__channels_last": "auto",
    "acceleration__amp": "bf16",
    "data__workers": "auto",
    "data__cache__kind": "auto",
}
SWIN = {"kind": "swinunetr", "feature_size": 12}


@pytest.fixture
def planned(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plan for a machine that has what kernels need; nothing is measured."""
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(choices, "missing_for_compile", lambda: None)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")

    def plan(hardware: Hardware, cache_gib: float = 0.01, **more: object) -> Plan:
        settled = {"acceleration__compile": "off", "acceleration__activation_checkpointing": "off"}
        recipe = tiny(**{**settled, **OPEN, **more}).recipe
        return make_plan(recipe, hardware, sizes_of(recipe, (4, 2, 0), int(cache_gib * GIB)))

    return plan


def reason(plan: Plan, name: str) -> str:
    return next(decision.reason for decision in plan.decisions if decision.name == name)


def test_all_of_it_where_it_can_be_had(planned) -> None:
    plan = planned(H100)
    assert (plan.fused_layers, plan.cuda_graphs, plan.channels_last, plan.cache, plan.workers) == (
        True, True, True, "gpu", 0,
    )  # fmt: skip
    assert "10 MiB of the 80 GiB of H100" in reason(plan, "cache")
    assert plan.record()["fused_layers"] is True


def test_none_of_it_on_a_cpu(planned) -> None:
    plan = planned(CPU, acceleration__channels_last="off")
    assert (plan.fused_layers, plan.cuda_graphs, plan.cache) == (False, False, "memory")
    assert reason(plan, "fused_layers") == reason(plan, "cuda_graphs") == "there is no GPU"
    asked = planned(
        CPU, acceleration__channels_last="on", acceleration__fused_layers="on", acceleration__cuda_graphs="on"
    )
    assert reason(asked, "fused_layers") == "asked for, but there is no GPU"
    assert reason(asked, "cuda_graphs") == "asked for, but there is no GPU"


@pytest.mark.parametrize(
    ("settings", "fused", "captured"),
    [
        ({"acceleration__fused_layers": "off"}, "set in the recipe", ""),
        ({"acceleration__cuda_graphs": "off"}, "", "set in the recipe"),
        ({"acceleration__channels_last": "off"}, "channels_last is off", ""),
        ({"acceleration__compile": "on"}, "compile is on", "compile is on"),
        ({"acceleration__fused_optimizer": "off"}, "", "fused_optimizer is off"),
        ({"acceleration__activation_checkpointing": "on"}, "", "activation_checkpointing cannot be recorded"),
        ({"optimizer": {"kind": "novograd"}}, "", ""),
        ({"network": SWIN, "patch__size": [64, 64, 64]}, "network.kind: swinunetr has no fused form", ""),
    ],
)
def test_what_keeps_it_from_it(planned, settings: dict, fused: str, captured: str) -> None:
    # One way is left, so that nothing is measured where there is no GPU
    if "acceleration__channels_last" not in settings:
        settings = {**settings, "acceleration__channels_last": "on"}
    plan = planned(H100, **settings)
    assert plan.fused_layers == (not fused)
    assert plan.cuda_graphs == (not captured)
    assert fused in reason(plan, "fused_layers")
    assert captured in reason(plan, "cuda_graphs")


def test_a_card_or_a_machine_without_what_kernels_need(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    old = planned(P100, acceleration__amp="off", acceleration__channels_last="on")
    assert (old.fused_layers, old.cache) == (False, "memory")
    assert "P100 is too old for Triton" in reason(old, "fused_layers")
    monkeypatch.setattr(choices, "missing_for_compile", lambda: "there is no C compiler (install gcc)")
    bare = planned(H100, acceleration__channels_last="on")
    assert (bare.fused_layers, bare.cache, bare.cuda_graphs) == (False, "memory", True)
    assert reason(bare, "fused_layers") == "there is no C compiler (install gcc)"
    with pytest.raises(
        MachineError, match=r"data.cache.kind: gpu cannot be had here: there is no C compiler .*; use memory"
    ):
        planned(H100, acceleration__channels_last="on", data__cache__kind="gpu")
    with pytest.raises(MachineError, match="data.cache.kind: gpu cannot be had here: there is no GPU"):
        planned(CPU, acceleration__channels_last="on", data__cache__kind="gpu")


def test_volumes_that_the_gpu_has_no_room_for_come_from_the_host(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned(H100, 31.0)
    assert (whole.cache, whole.resident_bytes) == ("gpu", 31 * GIB)
    # Nothing was measured here: two fifths of 80 GiB, less the boxes of two batches
    part = planned(H100, 60.0)
    boxes = 2 * 2 * 16**3 * 5
    assert (part.cache, part.resident_bytes) == ("gpu", 32 * GIB - boxes)
    assert reason(part, "cache") == (
        "2 of 4 cases (32.0 GiB) on the GPU, the rest from pinned memory: H100 has 80.0 GiB free, and volumes may take 40% of "
        "it, since no step was measured"
    )
    assert planned(H100, 60.0, data__cache__kind="gpu").resident_bytes == part.resident_bytes
    # The host has 64 GiB, of which the rest may take 70%; a tenth of the set is the least that is worth it
    assert planned(H100, 76.0).cache == "gpu"
    monkeypatch.setattr(memory_plan, "disk_free_bytes", lambda _: 1000 * GIB)
    assert planned(H100, 77.0).cache == "disk"
    roomy = Hardware("cuda:0", "H100", 16, 640.0, "GPU-1", 80.0, (9, 0), 91000)
    assert planned(roomy, 300.0).cache == "gpu"
    assert planned(roomy, 330.0).cache == "memory"


def test_what_fits_neither_there_nor_on_the_host_goes_to_the_disk_and_says_so(
    planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "disk_free_bytes", lambda _: 1000 * GIB)
    plan = planned(H100, 120.0, data__cache__kind="gpu")
    assert (plan.cache, plan.resident_bytes) == ("disk", 0)
    assert plan.workers > 0
    why = reason(plan, "cache")
    assert why.startswith(
        "gpu was asked for, but 1 of 4 cases (32.0 GiB) on the GPU, the rest from pinned memory: H100 has 80.0 GiB free"
    )
    assert "for which the host would need about 88.0 GiB" in why
    assert "of 64.0 GiB free, bounded by the host; memory would need" in why
    assert why.endswith("has 1000.0 GiB free")


def test_a_measured_step_says_what_is_left_for_volumes(tiny) -> None:
    recipe = tiny().recipe
    free = replace(H100, gpu_free_gib=70.0)
    sizes = sizes_of(recipe, (300, 2, 0), 60 * GIB, GIB)
    step = 20 * GIB
    # 4 bytes of each of the channel and of the three classes and the weight twice, of voxels with 5 bytes
    validation = 4 * (GIB // 5) * (1 + 2 * 4)
    assert stitching_bytes(recipe, free, sizes) == validation
    boxes = 2 * 2 * 16**3 * 5
    assert volume_room(recipe, free, sizes, step) == 70 * GIB - 25 * GIB - validation - GIB - boxes
    assert tiers_text(recipe, free, sizes, step) == (
        "183 of 300 cases (36.8 GiB) on the GPU, the rest from pinned memory: H100 has 70.0 GiB free, and a step takes 20.0 GiB "
        "as measured and a validation 7.2 GiB"
    )
    # However small the step, a fifth is left; and none is less than none
    assert volume_room(recipe, free, sizes, 1) == 56 * GIB - boxes
    assert volume_room(recipe, free, sizes, 80 * GIB) == 0
    assert resident_bytes(recipe, free, replace(sizes, training_bytes=GIB), step) == GIB
    assert volume_room(recipe, CPU, sizes, step) == 0


@given(st.integers(0, 100 * GIB), st.integers(0, 500 * GIB), st.floats(0, 80), st.integers(1, 64))
def test_volumes_never_take_what_a_step_needs(tiny, step: int, volumes: int, free: float, batch: int) -> None:
    recipe = tiny(training__batch_size=batch).recipe
    hardware = replace(H100, gpu_free_gib=free)
    taken = resident_bytes(recipe, hardware, sizes_of(recipe, (9, 1, 0), volumes), step)
    assert 0 <= taken <= volumes
    assert taken == 0 or taken + step < free * GIB


def test_a_run_that_goes_on_knows_what_its_step_held(tiny) -> None:
    recipe = tiny(acceleration__channels_last="on", acceleration__amp="bf16").recipe
    kept = {
        "amp": "bf16",
        "channels_last": True,
        "cuda_graphs": True,
        "activation_checkpointing": False,
        "step_bytes": 77,
    }
    assert choices.choose_step(recipe, H100, kept).held_bytes == 77
    # With another way of computing the step it holds something else
    assert choices.choose_step(recipe, H100, {**kept, "cuda_graphs": False}).held_bytes == 0


def test_workers_that_were_asked_for_keep_the_volumes_on_the_host(planned, tiny) -> None:
    assert planned(H100, data__workers=3).cache == "memory"
    assert planned(H100, data__workers=0).cache == "gpu"
    with pytest.raises(RecipeError, match=r"data.workers: have nothing to do where data.cache.kind: gpu cuts patches"):
        tiny(data__workers=2, data__cache__kind="gpu")


def test_settings_that_exclude_each_other(tiny) -> None:
    for first, second in (
        ("fused_layers", {"compile": "on"}),
        ("fused_layers", {"channels_last": "off"}),
        ("cuda_graphs", {"activation_checkpointing": "on"}),
        ("cuda_graphs", {"fused_optimizer": "off"}),
    ):
        settings = {
            f"acceleration__{name}": value for name, value in {"channels_last": "on", first: "on", **second}.items()
        }
        with pytest.raises(RecipeError, match="acceleration"):
            tiny(**settings)


def test_a_candidate_says_what_it_is() -> None:
    assert str(trial.Candidate("bf16", True, True, True)) == "bf16 NDHWC with fused layers in a CUDA graph"


@pytest.mark.parametrize(
    ("version", "settings", "channels_last", "amp", "told"),
    [
        (91002, {}, False, "bf16", "nvidia-cudnn-cu13)"),
        (91002, {}, True, "fp16", "so that only layers which change the layout are slow"),
        (91002, {}, False, "off", None),
        (91500, {}, False, "bf16", None),
        (None, {}, False, "bf16", None),
        (91002, {"patch__size": [16, 16], "data__spacing": None, "augment": {}}, False, "bf16", None),
    ],
)
def test_a_slow_cudnn_is_told_where_it_makes_something_slow(
    tiny, version: int | None, settings: dict, channels_last: bool, amp: str, told: str | None
) -> None:
    recipe = tiny(**settings).recipe
    plan = SimpleNamespace(channels_last=channels_last, amp=amp)
    found = slow_convolutions(recipe, replace(H100, cudnn=version), plan)
    assert (found is None) == (told is None)
    assert found is None or found.endswith(told)
    assert slow_convolutions(recipe, replace(CPU, cudnn=version), plan) is None
