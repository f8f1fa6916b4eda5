"""Both networks keep the contract: shapes, modes, seeding, learning."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain.networks import NETWORKS, build_network
from fasttrain.recipe.network_spec import DynUNetSpec, NetworkSpec, UNetSpec
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
}


def build(spec: NetworkSpec, dimensions: int = 3, channels: int = 2, classes: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_network(spec, dimensions, channels, classes)


def test_every_network_of_the_recipe_has_a_builder() -> None:
    assert set(NETWORKS) == {"unet", "dynunet"}


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_logits_have_the_shape_of_the_patch(spec: NetworkSpec, dimensions: int) -> None:
    network = build(spec, dimensions)
    image = torch.randn(2, 2, *(16, 8, 24)[:dimensions])
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
    assert build(spec).eval()(torch.randn(1, 2, *size)).shape == (1, 3, *size)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_one_seed_gives_one_network(spec: NetworkSpec) -> None:
    first, second, other = build(spec), build(spec), build(spec, seed=1)
    pairs = list(zip(first.state_dict().values(), second.state_dict().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


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
    recipe = Recipe.model_validate(
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
            "patch": {"size": [16, 16, 18]},
            "network": {"kind": "dynunet", "features": [4, 8, 16], "strides": [2, 2]},
            "loss": {"kind": "dice"},
            "optimizer": {"kind": "adamw"},
            "schedule": {"kind": "constant"},
            "training": {"epochs": 1, "batch_size": 1},
        }
    )
    faults = list(faults_across(recipe))
    assert [path for path, _ in faults] == [("patch", "size", 2)]
    whole = recipe.model_copy(update={"patch": recipe.patch.model_copy(update={"size": (16, 16, 16)})})
    assert not list(faults_across(whole))
