"""Networks by name: MONAI's alone, with what can be filled in, and refused in one sentence where they do not segment."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from monai.networks import nets
from torch import nn

from fasttrain.errors import MachineError, RecipeError
from fasttrain.networks import build_network
from fasttrain.networks.by_name import MainHead
from fasttrain.recipe.network_spec import MonaiNetworkSpec

PATCH = (16, 16, 32)
UNET = {"channels": [4, 8], "strides": [2]}


def build(name: str, arguments: dict[str, Any], patch: tuple[int, ...] = PATCH) -> nn.Module:
    torch.manual_seed(0)
    return build_network(MonaiNetworkSpec(kind="monai", name=name, arguments=arguments), patch, 2, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "patch"),
    [
        ("UNet", UNET, PATCH),
        ("Unet", UNET, PATCH[:2]),  # an alias
        ("UNet", {**UNET, "norm": ["group", {"num_groups": 2}]}, PATCH),
        ("BasicUNet", {"features": [4, 4, 4, 8, 8, 4]}, (32, 32)),
        ("Quicknat", {"num_filters": 4}, (32, 32)),  # no argument for the axes; classes and channels under other names
    ],
)
def test_axes_and_channels_are_filled_in(name: str, arguments: dict[str, Any], patch: tuple[int, ...]) -> None:
    network = build(name, arguments, patch)
    assert isinstance(network, getattr(nets, name))
    assert network.eval()(torch.randn(1, 2, *patch)).shape == (1, 3, *patch)


def test_the_size_is_filled_in_from_the_patch() -> None:
    pytest.importorskip("einops", reason="MONAI's UNETR calls einops")
    small = {"feature_size": 4, "hidden_size": 8, "mlp_dim": 8, "num_heads": 2}
    assert build("UNETR", small)(torch.randn(2, 2, *PATCH)).shape == (2, 3, *PATCH)
    with pytest.raises(RecipeError, match=r"UNETR cannot take a patch \[2, 2, 16, 16, 32\]"):
        build("UNETR", {**small, "img_size": [32, 32, 32]})


def test_weights_are_never_fetched() -> None:
    """FlexibleUNet's own default is false; EfficientNet's encoders fetch unless they are told not to."""
    network = build("FlexibleUNet", {"backbone": "efficientnet-b0", "decoder_channels": [8, 8, 8, 8, 8]}, (32, 32))
    assert network.training
    with pytest.raises(RecipeError, match=r"network.arguments.pretrained: weights are never fetched from elsewhere"):
        build("FlexibleUNet", {"backbone": "efficientnet-b0", "pretrained": True}, (32, 32))


@pytest.mark.parametrize(
    ("name", "arguments", "sizes"),
    [
        ("BasicUNetPlusPlus", {"features": [4, 4, 8, 8, 8, 4], "deep_supervision": True}, [PATCH] * 4),
        ("BasicUNetPlusPlus", {"features": [4, 4, 8, 8, 8, 4]}, [PATCH]),
        ("SegResNetDS", {"init_filters": 4, "blocks_down": [1, 1, 1], "dsdepth": 2}, [PATCH, (8, 8, 16)]),
    ],
)
def test_several_outputs_become_heads(name: str, arguments: dict[str, Any], sizes: list[tuple[int, ...]]) -> None:
    network = build(name, arguments)
    assert isinstance(network, MainHead)
    image = torch.randn(2, 2, *PATCH)
    heads = network.train()(image)
    shapes = [tuple(head.shape[2:]) for head in heads] if isinstance(heads, tuple) else [tuple(heads.shape[2:])]
    assert shapes == sizes
    main = network.eval()(image)
    assert main.shape == (2, 3, *PATCH)
    raw = network.network(image)
    last = raw if isinstance(raw, torch.Tensor) else [head for head in raw if head.shape == main.shape][-1]
    assert torch.equal(main, last)


def test_the_check_changes_neither_weights_nor_statistics_nor_draws() -> None:
    arguments = {**UNET, "norm": "batch", "dropout": 0.5}
    torch.manual_seed(0)
    plain = nets.UNet(
        spatial_dims=3, in_channels=2, out_channels=3, channels=(4, 8), strides=(2,), norm="batch", dropout=0.5
    )
    after = torch.rand(1)
    checked = build("UNet", arguments)
    assert torch.equal(torch.rand(1), after)
    for (name, tensor), other in zip(plain.state_dict().items(), checked.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    assert checked.training
    copy.deepcopy(checked)


class ValueSteered(nn.Module):
    """Looks at values, so that shapes alone cannot tell, and keeps a statistic."""

    def __init__(self, spatial_dims: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv3d(in_channels, out_channels, 1)
        self.norm = nn.BatchNorm3d(out_channels)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(image)) if float(image.sum()) == 0 else self.layer(image)


def test_a_network_that_looks_at_values_is_checked_by_a_true_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nets, "ValueSteered", ValueSteered, raising=False)
    network = build("ValueSteered", {})
    assert int(network.get_buffer("norm.num_batches_tracked")) == 0


NO_VIT = {"patch_size": 8, "hidden_size": 8, "mlp_dim": 8, "num_layers": 1, "num_heads": 1}
REFUSED = [
    ("UNETT", {}, "network.name: UNETT does not exist in monai.networks.nets; did you mean UNet or UNETR or VNet?"),
    ("resnet10", {}, "network.name: resnet10 is no network in monai.networks.nets; did you mean ResNet or "),
    ("Transchex", {}, "network.name: Transchex is no network in monai.networks.nets"),
    ("__builtins__", {}, "network.name: __builtins__ is no network in monai.networks.nets"),
    ("modules", {}, "network.name: modules does not exist in monai.networks.nets"),
    (
        "UNet",
        {"channel": [4, 8], "strides": [2]},
        "network.arguments.channel: UNet has no such argument; did you mean channels?",
    ),
    ("UNet", {"channels": [4, 8]}, "network.arguments: lacks strides, which UNet needs"),
    (
        "UNet",
        {**UNET, "num_res_units": "two"},
        "network.arguments: UNet cannot be built of these: TypeError: ",
    ),
    (
        "UNet",
        {**UNET, "out_channels": 7},
        "network.arguments.out_channels: is filled in from the recipe, as 3; leave it out",
    ),
    (
        "UNet",
        {**UNET, "act": "nope"},
        "network.arguments: UNet cannot be built of these: ValueError: Unsupported option 'NOPE', ",
    ),
    (
        "UNet",
        {**UNET, "strides": [3]},
        "network.name: UNet makes [2, 3, 18, 18, 33] of a patch [2, 2, 16, 16, 32] in training, and [2, 3, 16, 16, 32] is "
        "needed; choose another class or other network.arguments",
    ),
    ("ViT", NO_VIT, "network.name: ViT makes a tuple of 2 ([2, 16, 8], a list of 1 ([2, 16, 8])) of a patch"),
    (
        "SegResNetVAE",
        {"init_filters": 8},
        "network.name: SegResNetVAE makes a tuple of 2 ([2, 3, 16, 16, 32], []) of a patch [2, 2, 16, 16, 32] in training",
    ),
    (
        "VoxelMorph",
        {},
        "network.name: VoxelMorph has no argument for the number of output channels, so it does not segment; choose another",
    ),
    (
        "FullyConnectedNet",
        {"hidden_channels": [4]},
        "network.name: FullyConnectedNet cannot take a patch [2, 2, 16, 16, 32]",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "sentence"), REFUSED)
def test_what_does_not_segment_is_one_sentence(name: str, arguments: dict[str, Any], sentence: str) -> None:
    if name == "ViT":
        pytest.importorskip("einops", reason="MONAI's ViT calls einops")
    with pytest.raises(RecipeError) as caught:
        build(name, arguments)
    assert any(fault.startswith(sentence) for fault in caught.value.faults), caught.value.faults
    assert all("\n" not in fault for fault in caught.value.faults)


def test_a_missing_package_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy(nn.Module):
        def __init__(self, in_channels: int, out_channels: int) -> None:
            super().__init__()
            raise ImportError("import sausages (No module named 'sausages'). For details read on")

    monkeypatch.setattr(nets, "Needy", Needy, raising=False)
    with pytest.raises(
        MachineError, match=r"Needy needs a package that is not installed: import sausages \(No module named"
    ):
        build("Needy", {})
