"""Owns the switches of an ablation: the setting of each, what is off and on, and why one cannot be tried on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fasttrain.errors import RecipeError

Facts = Mapping[str, Any]
"""The plan of the run as it is decided, with `on_gpu`, `reasons` by decision and `would_compile`."""


@dataclass(frozen=True)
class Switch:
    """One acceleration. off: its value without. on: what switches it on in the plain run. fast: whether the decided run has it.
    hindered: why it cannot be on here, None where it can. idle: why it does nothing in the decided run although it is on.
    in_plain: whether the plain run has it too, so that it is not switched on from there. needs: {key: value} of what it
    cannot be on without.
    """

    name: str
    key: str
    off: Any
    on: Callable[[Facts], Any]
    fast: Callable[[Facts], bool]
    hindered: Callable[[Facts], str | None] = lambda facts: None
    idle: Callable[[Facts], str | None] = lambda facts: None
    in_plain: bool = False
    needs: Mapping[str, Any] = field(default_factory=dict)

    def on_in(self, facts: Facts) -> str | None:
        """Why it is not switched on alone from the plain run; None where it can be."""
        return "the plain run has it too" if self.in_plain else self.hindered(facts)

    def off_in(self, facts: Facts) -> str | None:
        """Why it is not switched off alone; None where it can be."""
        if self.fast(facts):
            return self.idle(facts)
        return self.hindered(facts) or f"off as it is decided here{_because(facts, self.name)}"


def _because(facts: Facts, name: str) -> str:
    reason = (facts.get("reasons") or {}).get(name)
    return f": {reason}" if reason else ""


def _flag(
    name: str,
    key: str,
    gpu_only: bool,
    idle: Callable[[Facts], str | None] = lambda facts: None,
    needs: Mapping[str, Any] | None = None,
) -> Switch:
    def hindered(facts: Facts) -> str | None:
        return "there is no GPU" if gpu_only and not facts["on_gpu"] else None

    return Switch(
        name, key, "off", lambda facts: "on", lambda facts: bool(facts.get(name)), hindered, idle, needs=needs or {}
    )


def _amp(facts: Facts) -> str:
    decided = str(facts["amp"])
    return decided if decided != "off" else "bf16"


def _cut_on_gpu(facts: Facts) -> str | None:
    return "volumes lie on the GPU, which cuts its patches itself" if facts["cache"] == "gpu" else None


SWITCHES: tuple[Switch, ...] = (
    Switch("amp", "acceleration.amp", "off", _amp, lambda facts: facts["amp"] != "off"),
    _flag("channels_last", "acceleration.channels_last", gpu_only=False),
    _flag("fused_layers", "acceleration.fused_layers", gpu_only=True, needs={"acceleration.channels_last": "on"}),
    _flag("cuda_graphs", "acceleration.cuda_graphs", gpu_only=True, needs={"acceleration.fused_optimizer": "on"}),
    Switch(
        "cache",
        "data.cache.kind",
        "none",
        lambda facts: facts["cache"],
        lambda facts: facts["cache"] != "none",
        lambda facts: "nothing is kept as it is decided" if facts["cache"] == "none" else None,
    ),
    Switch(
        "workers",
        "data.workers",
        0,
        lambda facts: facts["workers"] or 1,
        lambda facts: bool(facts["workers"]),
        idle=_cut_on_gpu,
        in_plain=True,
    ),
    _flag("tf32", "acceleration.tf32", gpu_only=True),
    _flag("fused_optimizer", "acceleration.fused_optimizer", gpu_only=False),
    _flag("pin_memory", "data.pin_memory", gpu_only=True, idle=_cut_on_gpu),
    _flag("copy_stream", "data.copy_stream", gpu_only=True, idle=_cut_on_gpu),
    _flag("compile", "acceleration.compile", gpu_only=True),
)
"""The likely ones first, so that a short budget has them; `compile`, which takes longest, last."""

PLAIN: dict[str, Any] = {
    **{switch.key: switch.off for switch in SWITCHES if not switch.in_plain},
    "acceleration.activation_checkpointing": "off",
}
"""The baseline: a plain loop of PyTorch's, fed by as many workers as a run would have."""


def read_only(texts: list[str] | None) -> tuple[str, ...] | None:
    """`--only amp,compile` → names of switches; raises RecipeError for one that there is not."""
    from fasttrain.recipe.names import did_you_mean

    if not texts:
        return None
    names = tuple(switch.name for switch in SWITCHES)
    asked = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    wrong = [word for word in asked if word not in names]
    if wrong:
        raise RecipeError([f"--only {word}: there is no such switch{did_you_mean(word, names)}" for word in wrong])
    if not asked:
        raise RecipeError(f"--only: should name switches, such as amp,compile; there are {', '.join(names)}")
    return tuple(asked)
