"""Owns the state of a run: all that resume needs and nothing else, as values a checkpoint can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from fasttrain.engine.step import Step
from fasttrain.errors import RecipeError, StorageError

_MARKS = ("betas", "momentum", "grad_averaging", "decoupled_weight_decay")
"""What tells SGD, Adam, AdamW, Novograd and Muon apart among a group's settings; others come and go with torch's versions."""

_LAYERS_NAMED = 3


@dataclass
class Progress:
    """How far a run got. `epoch` counts closed epochs: those whose validation is done and whose row is written.

    `step` counts optimiser steps, `position` samples seen. The loss sums and the seconds of the epoch belong to
    the one that is open; the other seconds are those of the whole run, over every session of it. `rate_factor` is what a
    plateau has made of the learning rate, `learning_rate` that of the last step.

    A run that goes on with another batch has epochs of other lengths and steps of other sizes behind it: the open epoch began at
    the position `epoch_first` and has `epoch_steps` steps in all, the next step takes `short_samples` samples (0: a whole one, of
    `effective_batch`), and the schedule's step is `step` + `schedule_shift`. Where `effective_batch` and `epoch_steps` are 0,
    they are not recorded.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    position: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    epoch_seconds: float = 0.0
    epoch_wait_seconds: float = 0.0
    training_seconds: float = 0.0
    validation_seconds: float = 0.0
    total_seconds: float = 0.0
    best_value: float | None = None
    best_epoch: int | None = None
    rate_factor: float = 1.0
    plateau_best: float | None = None
    plateau_waited: int = 0
    stopping_best: float | None = None
    stopping_waited: int = 0
    effective_batch: int = 0
    epoch_first: int = 0
    epoch_steps: int = 0
    short_samples: int = 0
    schedule_shift: int = 0
    learning_rate: float = 0.0


class TrainState:
    """The weights, the optimiser, the loss scaler, the generators and the progress of one run."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.progress = Progress()

    def capture(self) -> dict[str, Any]:
        """Tensors and plain values, sharing memory with the run: write them before the next step."""
        device = self.step.last_loss.device
        return {
            "network": self.step.network.state_dict(),
            "ema": None if self.step.ema is None else self.step.ema.network.state_dict(),
            "optimizer": self.step.optimizer.state_dict(),
            "scaler": self.step.scaler.state_dict(),
            "bad_streak": self.step.bad_streak,
            "progress": asdict(self.progress),
            "random": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            },
        }

    def finite(self) -> torch.Tensor:
        """False, on the device, where a weight or a running statistic is not finite; such a state must not be kept."""
        networks = [self.step.network] if self.step.ema is None else [self.step.network, self.step.ema.network]
        tensors = [tensor for network in networks for tensor in network.state_dict().values()]
        # The largest magnitudes, which not-a-number takes part in: in one pass over all, where a test of each takes hundreds
        largest = torch._foreach_norm([one for one in tensors if one.is_floating_point() and one.numel()], math.inf)
        return torch.isfinite(torch.stack([one.float() for one in largest])).all()

    def restore(self, saved: dict[str, Any], origin: str) -> None:
        """Takes up a captured state; raises RecipeError where the network's layers or shapes are others."""
        load_weights(self.step.network, saved["network"], origin)
        if self.step.ema is not None:
            # Asked for only now, by a recipe that was changed: it begins with the weights as they are
            load_weights(self.step.ema.network, saved.get("ema") or saved["network"], origin)
        self._restore_optimizer(saved["optimizer"], origin)
        if self.step.scaler.is_enabled() and saved["scaler"]:
            self.step.scaler.load_state_dict(saved["scaler"])
        self.step.bad_streak.copy_(saved["bad_streak"])
        self.progress = progress_of(saved, origin)
        torch.set_rng_state(saved["random"]["cpu"])
        device = self.step.last_loss.device
        if device.type == "cuda" and saved["random"]["cuda"] is not None:
            torch.cuda.set_rng_state(saved["random"]["cuda"], device)

    def _restore_optimizer(self, saved: dict[str, Any], origin: str) -> None:
        """What was learnt is the checkpoint's; rates, decays and how an update is computed are the recipe's and this device's."""
        optimizer = self.step.optimizer
        self._check_optimizer(saved, origin)
        own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        groups = [{**theirs, **mine} for theirs, mine in zip(saved["param_groups"], own, strict=False)]
        try:
            optimizer.load_state_dict({**saved, "param_groups": groups or saved["param_groups"]})
        except (ValueError, KeyError) as error:
            raise RecipeError(f"{origin} holds the state of another optimizer: {error}") from error
        for group in optimizer.param_groups:
            if group.get("momentum") and "betas" not in group:
                # Of an SGD that had none until now; torch would begin with whatever lies in the memory
                for parameter in group["params"]:
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))

    def _check_optimizer(self, saved: dict[str, Any], origin: str) -> None:
        """torch takes up any state whose groups have as many weights, and fails in the first step."""
        theirs = _marks(saved["param_groups"][0])
        own = _marks(self.step.optimizer.defaults)
        if theirs != own:
            raise RecipeError(
                f"{origin} holds the state of another optimizer (one with {', '.join(sorted(theirs)) or 'no momentum'}) than "
                "optimizer.kind names; set optimizer.kind back, or begin anew with `fasttrain train`"
            )


def _marks(settings: dict[str, Any]) -> set[str]:
    """The marks of an optimiser: keys that it has, and for switches whether they are on."""
    return {key for key in _MARKS if key in settings and (key != "decoupled_weight_decay" or settings[key])}


def progress_of(saved: Mapping[str, Any], origin: str) -> Progress:
    """The progress in a checkpoint; raises StorageError where it has fields that this version does not know.

    Checkpoints of earlier versions lack some, which `resuming.carrying_on` fills in.
    """
    if set(saved["progress"]) - {field.name for field in fields(Progress)}:
        raise StorageError(f"{origin} was written by a later version of fasttrain: its progress has other fields")
    try:
        return Progress(**saved["progress"])
    except TypeError as error:
        raise StorageError(f"{origin} has no whole progress: {error}") from error


def weights_to_use(saved: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint was scored with, and predicts with: the average of the weights where it has one."""
    return saved.get("ema") or saved["network"]


def load_weights(network: torch.nn.Module, theirs: dict[str, Any], origin: str) -> None:
    """Loads a network's weights; raises RecipeError that names the layers and shapes that differ."""
    check_layers(network.state_dict(), theirs, origin)
    network.load_state_dict(theirs)


def check_layers(own: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], origin: str) -> None:
    """Raises RecipeError that names the first layers whose shapes differ, with both, and how many there are."""
    differing = [name for name in own if name in theirs and theirs[name].shape != own[name].shape]
    faults = [
        f"{origin}: layer {name} has shape {tuple(theirs[name].shape)}, the recipe's network {tuple(own[name].shape)}"
        for name in differing[:_LAYERS_NAMED]
    ]
    if len(differing) > _LAYERS_NAMED:
        faults.append(f"{origin}: {len(differing) - _LAYERS_NAMED} more of its {len(theirs)} layers have other shapes")
    lacking = [name for name in own if name not in theirs]
    surplus = [name for name in theirs if name not in own]
    if lacking or surplus:
        named = ", ".join([*(f"no {name}" for name in lacking[:2]), *(f"a surplus {name}" for name in surplus[:2])])
        faults.append(
            f"{origin} fits another network: {len(lacking)} layers lacking and {len(surplus)} surplus ({named})"
        )
    if faults:
        raise RecipeError(faults)
