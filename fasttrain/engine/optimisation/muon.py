"""Owns Muon for the filters of convolutions and AdamW for all other weights, with the contract of torch's fused optimisers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_RMS = 0.2
"""The size of AdamW's usual update, so that both halves share a learning rate (Liu et al. 2025)."""
_LEAST_RANK = 8
"""Filters of fewer inputs or outputs, such as a network's head, have nothing to orthogonalise."""
_TINY = 1e-7


class _Pairs(NamedTuple):
    weights: list[Tensor]
    gradients: list[Tensor]


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) as Liu et al. (Muon is Scalable for LLM Training, 2025) scale it.

    A filter [output, input, *kernel] is taken as a matrix [output, input · kernel] (that of a transposed convolution, [input,
    output, *kernel], likewise). Its momentum is brought close to the nearest matrix with orthonormal rows or columns by five
    Newton-Schulz iterations in bfloat16, and multiplied by 0.2 √max(rows, columns). Weights of fewer than eight rows or columns,
    norms and biases go by AdamW (`betas`, `eps`). Weight decay is decoupled in both.

    `found_inf`, a float on the device, above 0: weights and state stay as they are. `grad_scale`: gradients are divided by it.
    Nothing is read on the host, so that steps can be recorded as a CUDA graph, with a learning rate that lies on the device.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(list(parameters), settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if is_filter(parameter):
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                else:
                    # Not "step", which torch would leave on the CPU where a checkpoint is taken up
                    state["updates"] = torch.zeros((), device=parameter.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        self._alike = self._of_as_many_updates()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what `load_state_dict` ends with."""
        super().__setstate__(state)
        self._alike = self._of_as_many_updates()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; a closure is not supported and raises ValueError."""
        if closure is not None:
            raise ValueError("this Muon takes no closure")
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [_sound(parameter.grad, found_inf, scale) for parameter in given]
            if not given:
                continue
            taken = given[0].new_ones(()) if found_inf is None else (found_inf <= 0).to(given[0].dtype).squeeze()
            filters, others = _Pairs([], []), _Pairs([], [])
            for weight, gradient in zip(given, gradients, strict=True):
                pairs = filters if is_filter(weight) else others
                pairs.weights.append(weight)
                pairs.gradients.append(gradient)
            rate = group["lr"] * taken
            if group["weight_decay"] != 0:
                torch._foreach_mul_(given, 1 - rate * group["weight_decay"])
            if filters.weights:
                self._turn(filters, group, rate, taken)
            for alike in self._by_updates(others):
                self._adapt(alike, group, rate, taken)

    def _turn(self, filters: _Pairs, group: dict[str, Any], rate: Tensor, taken: Tensor) -> None:
        """Muon, with Nesterov's momentum."""
        weights, gradients = filters
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        _approach(buffers, gradients, (1 - group["momentum"]) * taken)
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, weight in enumerate(weights):
            by_shape[weight.shape[0], weight[0].numel()].append(index)
        for (rows, columns), places in by_shape.items():
            matrices = torch.stack([ahead[index].flatten(1) for index in places])
            turned = orthogonalised(matrices).to(weights[0].dtype) * (rate * (_RMS * math.sqrt(max(rows, columns))))
            for index, update in zip(places, turned, strict=True):
                weights[index].sub_(update.view(weights[index].shape))

    def _of_as_many_updates(self) -> dict[Tensor, object]:
        """A mark for each weight that goes by AdamW, the same for those of a group that have had as many updates."""
        marks: dict[tuple[int, float], object] = defaultdict(object)
        alike = {}
        for number, group in enumerate(self.param_groups):
            others = [weight for weight in group["params"] if not is_filter(weight)]
            updates = torch.stack([self.state[weight]["updates"] for weight in others]).tolist() if others else []
            alike.update({weight: marks[number, count] for weight, count in zip(others, updates, strict=True)})
        return alike

    def _by_updates(self, others: _Pairs) -> list[_Pairs]:
        """`others` in parts of as many updates each, which all correct their averages alike; nearly always one part.

        How many steps were left out is known on the device alone, but what took part in the same steps has as many updates:
        weights that had as many part for good where some of them have a gradient and others have none.
        """
        parts: dict[object, _Pairs] = defaultdict(lambda: _Pairs([], []))
        for weight, gradient in zip(*others, strict=True):
            part = parts[self._alike[weight]]
            part.weights.append(weight)
            part.gradients.append(gradient)
        sizes = Counter(self._alike.values())
        for mark, part in parts.items():
            if len(part.weights) < sizes[mark]:
                self._alike.update(dict.fromkeys(part.weights, object()))
        return list(parts.values())

    def _adapt(self, alike: _Pairs, group: dict[str, Any], rate: Tensor, taken: Tensor) -> None:
        """AdamW, of weights that have had as many updates."""
        weights, gradients = alike
        beta1, beta2 = group["betas"]
        states = [self.state[weight] for weight in weights]
        # A list, since a single tensor to add is read on the host
        torch._foreach_add_([state["updates"] for state in states], [taken] * len(states))
        averages, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        _approach(averages, gradients, (1 - beta1) * taken)
        _approach(squares, list(torch._foreach_mul(gradients, gradients)), (1 - beta2) * taken)
        # Of the first step that is taken; where none was, nothing is divided and nothing moves
        past = states[0]["updates"].clamp_min(1)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_div_(divisors, (1 - beta2**past).sqrt())
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(averages, divisors)
        torch._foreach_mul_(updates, rate / (1 - beta1**past))
        torch._foreach_sub_(weights, updates)


def is_filter(parameter: Tensor) -> bool:
    """Whether a weight goes by Muon."""
    return parameter.ndim > 2 and min(parameter.shape[0], parameter[0].numel()) >= _LEAST_RANK


def orthogonalised(matrices: Tensor) -> Tensor:
    """bfloat16 [matrix, row, column] whose singular values are near 1 (about 0.7 to 1.2), with the singular vectors of
    `matrices`; a matrix of zeros stays one.
    """
    first, second, third = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp_min(_TINY)).to(torch.bfloat16)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return x.mT if tall else x


def _sound(gradient: Tensor | None, found_inf: Tensor | None, scale: Tensor | None) -> Tensor:
    """The gradient unscaled, and 0 in a step that is left out, so that no sum takes up what is not finite."""
    assert gradient is not None
    whole = gradient if scale is None else gradient / scale
    return whole if found_inf is None else torch.where(found_inf > 0, 0.0, whole)


def _approach(averages: list[Tensor], values: list[Tensor], share: Tensor) -> None:
    """Moves averages by a share, a number on their device, of the way to `values`."""
    away = torch._foreach_sub(values, averages)
    torch._foreach_mul_(away, share)
    torch._foreach_add_(averages, away)
