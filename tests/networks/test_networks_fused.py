"""The fused, channels-last form of a network is the same network: keys, outputs, gradients, statistics, as near to the truth."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from fasttrain.kernels.rows import channels_last
from fasttrain.networks import build_network
from fasttrain.networks.fused import fuse
from fasttrain.recipe.network_spec import NetworkSpec

TWO: dict[str, Any] = {"features": [8, 16, 32], "strides": [2, 2]}
UNET: dict[str, Any] = {"kind": "unet", **TWO}
NETWORKS: dict[str, dict[str, Any]] = {
    "dynunet": {"kind": "dynunet", **TWO, "deep_supervision": 1},
    "dynunet residual": {
        "kind": "dynunet", **TWO, "strides": [2, [2, 1, 2]], "residual": True, "norm": "batch", "deep_supervision": 0,
    },
    "unet": {**UNET, "residual_units": 2, "norm": "batch", "activation": "prelu"},
    "unet leaky": {**UNET, "residual_units": 1, "norm": "instance", "activation": "leaky_relu"},
    "unet plain": {**UNET, "residual_units": 0, "norm": "instance", "activation": "relu"},
    "segresnet": {"kind": "segresnet", "init_filters": 8},
    "segresnet batch": {"kind": "segresnet", "init_filters": 8, "norm": "batch"},
}  # fmt: skip
NO_FORM: dict[str, Any] = {"kind": "monai", "name": "AttentionUnet", "arguments": {"channels": [8, 16], "strides": [2]}}


def pair(spec: dict[str, Any], dimensions: int = 3, device: str = "cpu") -> tuple[nn.Module, nn.Module, Tensor]:
    """A network as MONAI builds it, its fused form with the same weights, and a batch."""
    torch.manual_seed(0)
    if dimensions == 2 and "strides" in spec:
        spec = {**spec, "strides": [stride[:2] if isinstance(stride, list) else stride for stride in spec["strides"]]}
    network = build_network(TypeAdapter(NetworkSpec).validate_python(spec), (16,) * dimensions, 2, 3).to(device)
    image = torch.randn(2, 2, *(16,) * dimensions, device=device)
    fused = copy.deepcopy(network)
    fuse(fused)
    fused.to(memory_format=channels_last(image))  # type: ignore[call-overload]
    return network, fused, image


def first(output: Any) -> Tensor:
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def far(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-6))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dimensions", [3, 2])
def test_the_same_network(name: str, dimensions: int) -> None:
    network, fused, image = pair(NETWORKS[name], dimensions)
    assert any("fused" in type(module).__module__ for module in fused.modules())
    plain_keys = list(network.state_dict())
    assert list(fused.state_dict()) == plain_keys
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in network.named_parameters()]
    fused.load_state_dict(network.state_dict())
    for training in (True, False):
        network.train(training), fused.train(training)
        expected, found = network(image), fused(image.contiguous(memory_format=channels_last(image)))
        assert type(found) is type(expected)
        assert far(first(found), first(expected)) < 1e-5
        if training:
            for output in (expected, found):
                heads = output if isinstance(output, tuple) else (output,)
                sum(head.cos().sum() for head in heads).backward()
    largest = max(float(p.grad.norm()) for p in network.parameters() if p.grad is not None)
    for (key, one), other in zip(network.named_parameters(), fused.parameters(), strict=True):
        if other.grad is None:
            # A bias that a norm takes away: torch finds the rounding of 0
            assert key.endswith("conv.bias")
            assert one.grad is None or float(one.grad.norm()) < 1e-4 * largest
        elif one.grad is not None:
            assert float((one.grad - other.grad).norm()) < 1e-4 * max(float(one.grad.norm()), 1e-2 * largest)
    for one, other in zip(network.buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_an_unknown_network_stays_as_it_is() -> None:
    network, fused, image = pair(NO_FORM)
    network.eval(), fused.eval()
    assert far(first(fused(image)), first(network(image))) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_farther_from_the_truth_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        network, fused, image = pair(NETWORKS[name], device="cuda")
        exact = copy.deepcopy(network).double()
        truth = first(exact(image.double()))
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            theirs = far(first(network(image)), truth)
            ours = far(first(fused(image.contiguous(memory_format=torch.channels_last_3d))), truth)
        assert ours < (1e-5 if dtype is torch.float32 else 1.5 * theirs)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
