"""The DynUNet differs from MONAI's in the form of its heads alone."""

from __future__ import annotations

import math

import pytest
import torch
from monai.networks.nets import DynUNet
from torch.nn import functional as F

from fasttrain.errors import RecipeError
from fasttrain.networks import build_network
from fasttrain.recipe.network_spec import DynUNetSpec

STRIDES = ((1, 2, 2), (2, 2, 2), (2, 2, 2))
SPEC = DynUNetSpec(kind="dynunet", features=(4, 6, 8, 10), strides=STRIDES, deep_supervision=2, residual=True)
PATCH = (8, 16, 16)
IMAGE_SHAPE = (2, 1, *PATCH)


def monai_network(spec: DynUNetSpec) -> DynUNet:
    return DynUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=3,
        kernel_size=[(3, 3, 3)] * len(spec.features),
        strides=[(1, 1, 1), *spec.strides],
        upsample_kernel_size=list(spec.strides),
        filters=spec.features,
        norm_name=("INSTANCE", {"affine": True}),
        deep_supervision=spec.deep_supervision > 0,
        deep_supr_num=max(spec.deep_supervision, 1),
        res_block=spec.residual,
    )


def test_heads_keep_the_resolution_of_their_stage() -> None:
    network = build_network(SPEC, PATCH, 1, 3).train()
    heads = network(torch.randn(IMAGE_SHAPE))
    assert isinstance(heads, tuple)
    assert [tuple(head.shape) for head in heads] == [(2, 3, 8, 16, 16), (2, 3, 8, 8, 8), (2, 3, 4, 4, 4)]
    logits = network.eval()(torch.randn(IMAGE_SHAPE))
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (2, 3, 8, 16, 16)


def test_2d_heads() -> None:
    spec = DynUNetSpec(kind="dynunet", features=(4, 6, 8), strides=(2, 2), deep_supervision=1)
    heads = build_network(spec, (16, 8), 1, 3).train()(torch.randn(2, 1, 16, 8))
    assert [tuple(head.shape) for head in heads] == [(2, 3, 16, 8), (2, 3, 8, 4)]


@pytest.mark.parametrize("supervision", [0, 1, 2])
def test_weights_of_monai_load_and_give_its_outputs(supervision: int) -> None:
    spec = SPEC.model_copy(update={"deep_supervision": supervision})
    theirs, ours = monai_network(spec), build_network(spec, PATCH, 1, 3)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(IMAGE_SHAPE)
    assert torch.equal(ours.eval()(image), theirs.eval()(image))
    stacked, heads = theirs.train()(image), ours.train()(image)
    if not supervision:
        assert torch.equal(heads, stacked)
        return
    assert len(heads) == supervision + 1
    for index, head in enumerate(heads):
        assert torch.equal(F.interpolate(head, image.shape[2:]), stacked[:, index])


def test_gradients_are_those_of_monai() -> None:
    theirs, ours = monai_network(SPEC), build_network(SPEC, PATCH, 1, 3)
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(IMAGE_SHAPE)
    theirs.train()(image).square().mean().backward()
    full = [F.interpolate(head, image.shape[2:]) for head in ours.train()(image)]
    torch.stack(full, dim=1).square().mean().backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, other.grad, msg=name)


def test_initial_weights_are_hes_with_zero_biases() -> None:
    torch.manual_seed(0)
    spec = DynUNetSpec(kind="dynunet", features=(32, 32, 32), strides=(2, 2))
    network = build_network(spec, PATCH, 1, 3)
    weight = network.get_parameter("bottleneck.conv2.conv.weight")
    expected = math.sqrt(2.0 / (1 + 0.01**2)) / math.sqrt(32 * 27)
    assert weight.std().item() == pytest.approx(expected, rel=0.02)
    assert not network.get_parameter("output_block.conv.conv.bias").any()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kernels": 4}, "network.kernels"),
        ({"kernels": (3, 3, 2)}, "network.kernels"),
        ({"kernels": 1, "strides": (4, 2)}, "network.strides[0]"),
    ],
)
def test_kernels_that_change_the_size_are_refused(change: dict[str, object], key: str) -> None:
    values = {"kind": "dynunet", "features": (4, 8, 16), "strides": (2, 2), **change}
    with pytest.raises(RecipeError, match=key.replace("[", r"\[")):
        build_network(DynUNetSpec.model_validate(values), PATCH, 1, 3)
