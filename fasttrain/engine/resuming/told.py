"""Owns the sentences about a resume: what was restored and what was not, what is trained again, and what goes on otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fasttrain.engine.planning.plan import Plan
from fasttrain.engine.resuming.carrying_on import samples_left
from fasttrain.engine.resuming.changes import Change
from fasttrain.engine.state import Progress
from fasttrain.engine.step import Step
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.recipe import Recipe

_CHOICES = ("amp", "channels_last", "fused_layers", "cuda_graphs", "compile", "activation_checkpointing")


def restored_text(saved: Mapping[str, Any], now: Progress, name: str, step: Step, recipe: Recipe) -> str:
    """What a checkpoint gave back; now: the progress as it was taken up."""
    progress, random = saved["progress"], saved["random"]
    parts = [f"the weights of {counted(len(saved['network']), 'tensor')}"]
    if step.ema is not None and saved.get("ema"):
        parts.append("their average")
    parts.append(f"the state of {recipe.optimizer.kind}")
    if step.scaler.is_enabled() and saved["scaler"]:
        parts.append("the loss scale")
    on_gpu = step.last_loss.device.type == "cuda"
    parts.append("the generators of CPU and GPU" if on_gpu and random["cuda"] is not None else "the CPU's generator")
    if now.best_value is not None:
        parts.append(f"the best score, {now.best_value:.4f} of epoch {now.best_epoch}")
    if progress["step_in_epoch"]:
        parts.append(f"the loss of the {counted(progress['step_in_epoch'], 'step')} of the open epoch")
    seen = counted(progress["position"], "patch", "patches")
    where = f"{counted(progress['epoch'], 'epoch')} done, {counted(progress['step'], 'step')}, {seen} seen"
    return f"restored from {name} ({where}): {', '.join(parts[:-1])} and {parts[-1]}"


def not_restored(saved: Mapping[str, Any], step: Step, reached: int) -> list[str]:
    """What it did not give back, and why; `reached`: the last step that the run is known to have taken."""
    missing = []
    if step.ema is not None and not saved.get("ema"):
        missing.append(
            "an average of the weights, which the checkpoint has not: it begins with the weights as they are"
        )
    if step.ema is None and saved.get("ema"):
        missing.append("the average of the weights, which the recipe asks for no more")
    if step.scaler.is_enabled() and not saved["scaler"]:
        missing.append("a loss scale, which the checkpoint has not: it begins anew")
    on_gpu, cuda = step.last_loss.device.type == "cuda", saved["random"]["cuda"] is not None
    if cuda and not on_gpu:
        missing.append("the GPU's generator: there is no GPU here, and dropout draws otherwise")
    if on_gpu and not cuda:
        missing.append("a GPU's generator, which the checkpoint has not: dropout draws otherwise")
    done = saved["progress"]["step"]
    if reached > done:
        which = f"step {reached}, which was" if reached == done + 1 else f"steps {done + 1} to {reached}, which were"
        missing.append(f"{which} taken after this checkpoint and will be taken again")
    return missing


def other_device_text(then: str, now: str, former: Mapping[str, Any], plan: Plan) -> str | None:
    """That the run goes on on another device; None where it does not."""
    if then == now:
        return None
    changed = [
        f"{name} {_switch(former[name])} → {_switch(getattr(plan, name))}"
        for name in _CHOICES
        if name in former and former[name] != getattr(plan, name)
    ]
    how = f" ({', '.join(changed)})" if changed else ""
    return (
        f"the run was on {then} and goes on on {now}{how}: its losses agree with those of an unbroken run within rounding, "
        "not bit for bit"
    )


def batch_text(before: Progress, after: Progress, recipe: Recipe, steps_per_epoch: int) -> str | None:
    """What another effective batch makes of the run; None where it is the same."""
    if before.effective_batch == after.effective_batch:
        return None
    told = f"effective batch {before.effective_batch} → {after.effective_batch}: the {after.position:,} patches seen carry on"
    if after.step_in_epoch:
        left = counted(samples_left(after), "patch", "patches")
        odd = f", of which the first takes {after.short_samples}" if after.short_samples else ""
        steps = counted(after.epoch_steps - after.step_in_epoch, "step")
        told += f"; the open epoch has {left} left, {steps}{odd}"
    told += f"; an epoch is {counted(steps_per_epoch, 'step')} of {counted(after.effective_batch, 'patch', 'patches')}"
    return f"{told}; training.batch_policy: {recipe.training.batch_policy}"


def rate_text(before: float, after: float, recipe: Recipe, steps_left: int) -> str:
    """What becomes of the learning rate."""
    same = math.isclose(before, after, rel_tol=0.02)
    goes = f"stays near {after:.3g}" if same else f"was {before:.3g} in the last step and is {after:.3g} in the next"
    return f"learning rate: {goes}; the schedule ({recipe.schedule.kind}) ends after {counted(steps_left, 'more step')}"


def changes_text(changes: Sequence[Change]) -> str:
    """What is other than when the run began."""
    return f"from here on: {'; '.join(map(str, changes))}"


def _switch(value: object) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
