"""Owns norm layers with what follows them as one module."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fasttrain.kernels.norm import After, Over, finished, normalise, plain, usable

NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm)


class FusedNorm(nn.Module):
    """A norm layer of torch's with what follows it; holds the layer's own parameters and buffers under their own names."""

    def __init__(self, norm: nn.Module, after: After) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in norm.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.after = after
        self.batch = isinstance(norm, _BatchNorm)
        shared = norm.num_channels // norm.num_groups if isinstance(norm, nn.GroupNorm) else 1
        # None means a mean over all batches so far, which no network here asks for
        momentum = getattr(norm, "momentum", None)
        self.over = Over(not self.batch, shared, float(norm.eps), 0.1 if momentum is None else float(momentum))  # type: ignore[arg-type]

    @property
    def running(self) -> tuple[Tensor, Tensor] | None:
        """Running mean and variance, where the layer keeps them."""
        mean, var = getattr(self, "running_mean", None), getattr(self, "running_var", None)
        return (mean, var) if self.batch and mean is not None and var is not None else None

    @property
    def sees_the_batch(self) -> bool:
        """Whether statistics are those of what comes in, so that a bias before it changes nothing."""
        return self.training or self.running is None

    def forward(
        self, x: Tensor, added: Tensor | None = None, slope: Tensor | None = None, left_out: Tensor | None = None
    ) -> Tensor:
        """Of x [batch, channel, *spatial]: norm, dropout while training, and the addition and activation of `after`.

        left_out: the bias [channel] that the convolution before it left out, of which the running mean alone takes notice.
        """
        weight, bias, running = getattr(self, "weight", None), getattr(self, "bias", None), self.running
        if not self.sees_the_batch and running is not None:
            y = functional.batch_norm(x, *running, weight, bias, False, 0.0, self.over.epsilon)
            return finished(y, self.after, added, slope)
        momentum = self.over.momentum
        if running is not None:
            self.num_batches_tracked.add_(1)  # type: ignore[operator]
            if left_out is not None:
                # Before, since autograd may keep the mean: (1 − m) · (mean + m / (1 − m) · bias) is (1 − m) · mean + m · bias
                running[0].add_(left_out.detach(), alpha=momentum / (1 - momentum))
        after = self.after if self.training else After(self.after.slope, 0.0, self.after.added)
        compute = normalise if usable(x, self.over) else plain
        return compute(x, weight, bias, self.over, after, added, slope, running)


class FusedAdn(nn.Module):
    """MONAI's norm, dropout and activation in that order, under MONAI's names; dropout and activation may be absent."""

    def __init__(self, norm: nn.Module, chance: float, activation: nn.Module | None) -> None:
        super().__init__()
        slope = None if activation is None else slope_of(activation)
        self.N = FusedNorm(norm, After(slope, chance))
        if isinstance(activation, nn.PReLU):
            self.A = activation

    def add_after(self) -> None:
        """From now on `forward` is given something to add to the activation's result."""
        self.N.after = After(self.N.after.slope, self.N.after.chance, "after")

    def forward(self, x: Tensor, added: Tensor | None = None, left_out: Tensor | None = None) -> Tensor:
        """See `FusedNorm.forward`."""
        result: Tensor = self.N(x, added, self.A.weight if hasattr(self, "A") else None, left_out)
        return result


def fuse_adn(module: nn.Module) -> FusedAdn | None:
    """Of a MONAI ADN whose norm comes first."""
    from monai.networks.blocks import ADN

    if not isinstance(module, ADN):
        return None
    parts = dict(module.named_children())
    norm, dropout, activation = parts.get("N"), parts.get("D"), parts.get("A")
    if not isinstance(norm, NORMS) or list(parts) != [name for name in "NDA" if name in parts]:
        return None
    if dropout is not None and type(dropout) is not nn.Dropout:
        return None
    one_slope = isinstance(activation, nn.PReLU) and activation.num_parameters == 1
    if activation is not None and not one_slope and slope_of(activation) is None:
        return None
    return FusedAdn(norm, dropout.p if isinstance(dropout, nn.Dropout) else 0.0, activation)


def slope_of(activation: nn.Module) -> float | None:
    """The constant slope below 0 of a (leaky) ReLU; None for any other activation."""
    if isinstance(activation, nn.LeakyReLU):
        return float(activation.negative_slope)
    return 0.0 if isinstance(activation, nn.ReLU) else None
