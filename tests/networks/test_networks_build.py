"""All networks keep the contract: shapes, modes, seeding, learning."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain.errors import MachineError
from fasttrain.networks import NETWORKS, build_network
from fasttrain.recipe.network_spec import (
    DynUNetSpec,
    MonaiNetworkSpec,
    NetworkSpec,
    SegResNetSpec,
    SwinUNETRSpec,
    UNetSpec,
)
from fasttrain.recipe.recipe import Recipe, faults_across

UNET = UNetSpec(kind="unet", features=(4, 8, 16), strides=(2, 2), residual_units=1)
DYNUNET = DynUNetSpec(kind="dynunet", features=(4, 8, 16), strides=(2, 2))
SPECS: dict[str, NetworkSpec] = {
    "unet": UNET,
    "unet-plain-batch-relu": UNetSpec(
        kind="unet", features=(4, 8), strides=(2,), residual_units=0, norm="batch", activation="relu", dropout=0.1
    ),
    "unet-leaky": UNetSpec(kind="unet", features=(4, 8, 16), strides=(2, 2), activation="leaky_relu"),
    "dynunet": DYNUNET,
    "dynunet-residual-batch": DynUNetSpec(
        kind="dynunet", features=(4, 8, 16), strides=(2, 2), residual=True, norm="batch", dropout=0.1
    ),
    "segresnet": SegResNetSpec(kind="segresnet", init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
    "segresnet-batch": SegResNetSpec(
        kind="segresnet", init_filters=4, blocks_down=(2, 1), blocks_up=(1,), norm="batch", dropout=0.1
    ),
    "segresnet-instance": SegResNetSpec(
        kind="segresnet", init_filters=4, blocks_down=(1, 1), blocks_up=(2,), norm="instance"
    ),
    "monai": MonaiNetworkSpec(kind="monai", name="AttentionUnet", arguments={"channels": [4, 8], "strides": [2]}),
}
SWIN = SwinUNETRSpec(kind="swinunetr", feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
PATCH = (16, 8, 24)


def build(
    spec: NetworkSpec, patch: tuple[int, ...] = PATCH, channels: int = 2, outputs: int = 3, seed: int = 0
) -> nn.Module:
    torch.manual_seed(seed)
    return build_network(spec, patch, channels, outputs)


def test_every_network_of_the_recipe_has_a_builder() -> None:
    union, _ = typing.get_args(NetworkSpec)
    assert set(NETWORKS) == {
        typing.get_args(spec.model_fields["kind"].annotation)[0] for spec in typing.get_args(union)
    }


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_logits_have_the_shape_of_the_patch(spec: NetworkSpec, dimensions: int) -> None:
    network = build(spec, PATCH[:dimensions])
    image = torch.randn(2, 2, *PATCH[:dimensions])
    for mode in (True, False):
        logits = network.train(mode)(image)
        assert isinstance(logits, torch.Tensor)
        assert logits.shape == (2, 3, *image.shape[2:])


@pytest.mark.parametrize(
    "spec",
    [
        UNetSpec(kind="unet", features=(4, 8, 16), strides=((1, 2, 2), (2, 2, 4))),
        DynUNetSpec(kind="dynunet", features=(4, 8, 16), strides=((1, 2, 2), (2, 2, 4)), kernels=(1, 3, 3)),
        DynUNetSpec(kind="dynunet", features=(4, 8, 16), strides=(3, (1, 3, 2)), kernels=(3, 5, 3)),
    ],
)
def test_strides_and_kernels_may_differ_by_axis(spec: NetworkSpec) -> None:
    size = tuple(2 * factor for factor in spec.downsampling(3))
    assert build(spec, size).eval()(torch.randn(1, 2, *size)).shape == (1, 3, *size)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_one_seed_gives_one_network(spec: NetworkSpec) -> None:
    first, second, other = build(spec), build(spec), build(spec, seed=1)
    pairs = list(zip(first.state_dict().values(), second.state_dict().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("patch", [(32, 64), (32, 32, 64)], ids=["2d", "3d"])
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_swinunetr_gives_the_shape_of_the_patch_in_any_layout(patch: tuple[int, ...], norm: str) -> None:
    pytest.importorskip("einops", reason="MONAI's Swin UNETR calls einops")
    network = build(SWIN.model_copy(update={"norm": norm}), patch).eval()
    image = torch.randn(1, 2, *patch)
    with torch.no_grad():
        logits = network(image)
        assert logits.shape == (1, 3, *patch)
        layout = torch.channels_last_3d if len(patch) == 3 else torch.channels_last
        network.to(memory_format=layout)
        other = network(image.contiguous(memory_format=layout))
    torch.testing.assert_close(other, logits, rtol=1e-4, atol=1e-4)


def test_swinunetr_without_einops_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match="swinunetr needs the package einops, which is not installed; pip install"):
        build(SWIN, (32, 32, 64))


@pytest.mark.parametrize("spec", [UNET, DYNUNET, SPECS["segresnet"], SPECS["monai"]], ids=lambda spec: spec.kind)
def test_one_output_channel(spec: NetworkSpec) -> None:
    assert build(spec, outputs=1)(torch.randn(1, 2, *PATCH)).shape == (1, 1, *PATCH)


@pytest.mark.parametrize(
    "spec",
    [
        UNetSpec(kind="unet", features=(4, 8, 16), strides=(2, 2)),
        UNetSpec(kind="unet", features=(4, 8, 16), strides=(2, 2), norm="batch", residual_units=0),
        DYNUNET,
        SPECS["dynunet-residual-batch"],
        *(
            SegResNetSpec(kind="segresnet", init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1), norm=norm)
            for norm in ("batch", "instance", "group")
        ),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("patch", [(4, 4, 4), (4, 4, 8), (4, 4)])
def test_a_patch_of_one_voxel_at_the_lowest_stage_is_refused_where_torch_would(
    spec: NetworkSpec, batch_size: int, patch: tuple[int, ...]
) -> None:
    network = build(spec, patch).train()
    try:
        network(torch.randn(batch_size, 2, *patch))
        runs = True
    except ValueError:
        runs = False
    sound = recipe_with(spec, patch, batch_size)
    assert [path for path, _ in faults_across(sound)] == ([] if runs else [("patch", "size")])


@pytest.mark.parametrize("spec", [UNET, DYNUNET, DYNUNET.model_copy(update={"deep_supervision": 1})])
def test_two_steps_on_one_batch_lower_the_loss(spec: NetworkSpec) -> None:
    network = build(spec).train()
    image = torch.randn(2, 2, 8, 8, 8)
    label = (image[:, 0] > 0).long()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        logits = network(image)
        loss = F.cross_entropy(logits[0] if isinstance(logits, tuple) else logits, label)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("spec", [UNET, DYNUNET.model_copy(update={"deep_supervision": 1})])
def test_a_network_that_has_run_can_be_copied(spec: NetworkSpec) -> None:
    network = build(spec).train()
    image = torch.randn(1, 2, 8, 8, 8)
    network(image)
    twin = copy.deepcopy(network)
    assert torch.equal(twin.eval()(image), network.eval()(image))


def test_a_patch_that_does_not_divide_is_the_recipes_fault() -> None:
    spec = DynUNetSpec(kind="dynunet", features=(4, 8, 16), strides=(2, 2))
    recipe = recipe_with(spec, (16, 16, 18))
    faults = list(faults_across(recipe))
    assert [path for path, _ in faults] == [("patch", "size", 2)]
    whole = recipe.model_copy(update={"patch": recipe.patch.model_copy(update={"size": (16, 16, 16)})})
    assert not list(faults_across(whole))


def recipe_with(spec: NetworkSpec, patch: tuple[int, ...], batch_size: int = 1) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "task": "segmentation",
            "data": {
                "source": {"kind": "phantom"},
                "channels": ["CT"],
                "classes": {1: "a", 2: "b"},
                "split": {"kind": "last", "validation": 1},
                "intensity": {"kind": "none"},
            },
            "patch": {"size": patch},
            "network": spec.model_dump(),
            "loss": {"kind": "dice"},
            "optimizer": {"kind": "adamw"},
            "schedule": {"kind": "constant"},
            "training": {"epochs": 1, "batch_size": batch_size},
        }
    )
