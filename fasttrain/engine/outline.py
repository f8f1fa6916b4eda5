"""Owns what is trained and how, in one line: network, parameters, loss, optimiser and schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fasttrain.networks import build_network
from fasttrain.recipe import Recipe
from fasttrain.recipe.network_spec import (
    DoseUNetSpec,
    DynUNetSpec,
    MonaiNetworkSpec,
    NetworkSpec,
    SegResNetSpec,
    SwinUNETRSpec,
    UNetSpec,
)


@dataclass(frozen=True)
class Outline:
    """`text` for a person, such as `dynunet 32-64-128-256, 5.6 M parameters; loss dice_ce; adamw 0.001, cosine`."""

    text: str
    parameters: int


def outline_of(recipe: Recipe) -> Outline:
    """The outline of a recipe's training; torch's generators stay as they were.

    Raises what `build_network` raises.
    """
    parameters = _parameters(recipe)
    parts = [f"{_network_text(recipe.network)}, {_number_text(parameters)} parameters", f"loss {recipe.loss.kind}"]
    schedule = recipe.schedule
    warmup = f" after a warm-up of {schedule.warmup:.0%}" if schedule.warmup else ""
    parts.append(f"{recipe.optimizer.kind} {recipe.optimizer.learning_rate:g}, {schedule.kind}{warmup}")
    if recipe.training.ema is not None:
        parts.append(f"EMA {recipe.training.ema.decay:g}")
    return Outline("; ".join(parts), parameters)


def _parameters(recipe: Recipe) -> int:
    """Counted on the meta device, where nothing is drawn or kept.

    A network that reads its own values is built, and so is one by name, whose arguments MONAI alone can judge.
    """
    return sum(parameter.numel() for parameter in _bare(recipe).parameters())


def layers_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The network's weights and running statistics by name, for their shapes alone; torch's generators stay as they were."""
    return dict(_bare(recipe).state_dict())


def _bare(recipe: Recipe) -> nn.Module:
    given = (recipe.network, recipe.patch.size, recipe.input_channels, recipe.output_channels)
    with torch.random.fork_rng(devices=[]):
        network = _weightless(given) if not isinstance(recipe.network, MonaiNetworkSpec) else None
        return build_network(*given) if network is None else network


def _weightless(given: tuple[NetworkSpec, tuple[int, ...], int, int]) -> nn.Module | None:
    try:
        with torch.device("meta"), _NothingDrawn():
            return build_network(*given)
    except (RuntimeError, NotImplementedError):
        return None


class _NothingDrawn(TorchFunctionMode):
    """Fresh weights stay as they are: on the meta device they have no values, and a draw there loads torch's compiler, which
    takes a second or two.
    """

    _DRAWS = frozenset(
        getattr(torch.Tensor, name)
        for name in ("normal_", "uniform_", "exponential_", "bernoulli_", "erfinv_", "clamp_", "mul_", "add_")
    )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """In-place steps of an initialisation give the tensor back."""
        if func in self._DRAWS and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _network_text(spec: NetworkSpec) -> str:
    if isinstance(spec, UNetSpec | DynUNetSpec | DoseUNetSpec):
        return f"{spec.kind} {'-'.join(map(str, spec.features))}"
    if isinstance(spec, SegResNetSpec):
        features = [spec.init_filters << stage for stage in range(len(spec.blocks_down))]
        return f"{spec.kind} {'-'.join(map(str, features))}"
    if isinstance(spec, SwinUNETRSpec):
        return f"{spec.kind} {'-'.join(str(spec.feature_size << stage) for stage in range(len(spec.depths) + 1))}"
    assert isinstance(spec, MonaiNetworkSpec)
    return spec.name


def _number_text(number: int) -> str:
    """`5.6 M`, `830 k`, `412`."""
    if number >= 1_000_000:
        return f"{number / 1e6:.3g} M"
    return f"{number / 1e3:.3g} k" if number >= 1_000 else str(number)
