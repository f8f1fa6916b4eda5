"""Owns Novograd in a form that leaves a step out on a flag on the device and never waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from monai.optimizers import Novograd
from torch import Tensor


class DeviceNovograd(Novograd):
    """MONAI's Novograd (Ginsburg et al. 2019) with the contract of torch's fused optimisers.

    `found_inf`, a float on the device, above 0: weights and state stay as they are. `grad_scale`: gradients are divided by it.
    Both are set from outside, by the step or by GradScaler. MONAI's own step knows neither, and it reads each layer's running
    norm on the host. The state is MONAI's without its count of steps, which nothing uses. Gradients are not changed.
    """

    _step_supports_amp_scaling = True
    """Tells GradScaler to hand over the two tensors and not to read them itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One step; a closure is not supported and raises ValueError."""
        if closure is not None:
            raise ValueError("this Novograd takes no closure")
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                skip = None if found_inf is None else found_inf > 0
                self._step_group(group, parameters, skip, scale)

    def _step_group(
        self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor | None, scale: Tensor | None
    ) -> None:
        beta1, beta2 = group["betas"]
        gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if scale is not None:
            gradients = [gradient / scale for gradient in gradients]
        states = [self._state_of(parameter) for parameter in parameters]
        before = torch.stack([state["exp_avg_sq"] for state in states])
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        # A running norm of 0 has not begun; its first value is the gradient's own
        after = torch.where(before == 0, squares, beta2 * before + (1 - beta2) * squares)
        if skip is not None:
            after = torch.where(skip, before, after)
        divisors = after.sqrt() + group["eps"]
        for index, (parameter, gradient, state) in enumerate(zip(parameters, gradients, states, strict=True)):
            update = gradient / divisors[index]
            if group["weight_decay"] != 0:
                update.add_(parameter, alpha=group["weight_decay"])
            if group["grad_averaging"]:
                update.mul_(1 - beta1)
            average = update.add_(state["exp_avg"], alpha=beta1)
            moved = parameter - group["lr"] * average
            state["exp_avg"].copy_(average if skip is None else torch.where(skip, state["exp_avg"], average))
            parameter.copy_(moved if skip is None else torch.where(skip, parameter, moved))
            state["exp_avg_sq"].copy_(after[index])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros((), device=parameter.device)
        return state
