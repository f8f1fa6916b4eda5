"""The plan of a GPU run: fused layers, CUDA graphs and volumes in the GPU's memory, each where it can be had, with the reason."""

from pathlib import Path

import pytest

from fasttrain.engine import choices, trial
from fasttrain.engine.plan import Plan, make_plan
from fasttrain.engine.sizes import sizes_of
from fasttrain.errors import MachineError, OutOfMemoryError, RecipeError
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
        ({"optimizer": {"kind": "novograd"}}, "", "Novograd updates weight by weight from the host"),
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


def test_volumes_that_the_gpu_has_no_room_for_stay_in_memory(planned) -> None:
    assert planned(H100, 31.0).cache == "gpu"
    assert planned(H100, 33.0).cache == "memory"
    assert planned(H100, 33.0, data__cache__kind="gpu").cache == "gpu"
    roomy = Hardware("cuda:0", "H100", 16, 640.0, "GPU-1", 80.0, (9, 0), 91000)
    with pytest.raises(
        OutOfMemoryError, match=r"gpu needs about 90.0 GiB and H100 has 80 GiB; set data.cache.kind: memory"
    ):
        planned(roomy, 90.0, data__cache__kind="gpu")


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
