"""The counted work of a patch against sums by hand, and the measured ceilings of a CPU."""

import pytest
import torch

from fasttrain.recipe import resolve
from fasttrain.studies import ceilings
from fasttrain.studies.ceilings import ceilings_of, work_of


def conv(patch: int, channels: int, features: int, kernel: int = 3) -> int:
    """Multiplications and additions of a convolution that keeps its grid."""
    return 2 * patch**3 * channels * features * kernel**3


def test_the_work_of_a_network_is_that_of_its_convolutions() -> None:
    sets = {
        "network": {"kind": "unet", "features": [8, 8], "strides": [2], "residual_units": 0, "dropout": 0.0},
        "patch.size": [16, 16, 16],
    }
    found = work_of(resolve("demo", sets).recipe, "off")
    with torch.device("meta"):
        from fasttrain.networks import build_network

        recipe = resolve("demo", sets).recipe
        network = build_network(recipe.network, recipe.patch.size, 1, recipe.output_channels)
    image, expected = torch.empty(1, 1, 16, 16, 16, device="meta", requires_grad=True), 0

    def counted(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        nonlocal expected
        # By voxels of the smaller grid for a transposed convolution, of the output else
        grid = inputs[0] if isinstance(module, torch.nn.ConvTranspose3d) else output
        expected += 2 * grid[0, 0].numel() * module.weight.numel()

    first = None
    for module in network.modules():
        if isinstance(module, torch.nn.Conv3d | torch.nn.ConvTranspose3d):
            module.register_forward_hook(counted)
            first = first or module
    network(image)
    # Backwards each convolution is computed twice, for its input and its weight; the first one's input needs none
    assert found["patch_flops"] == 3 * expected - 2 * 8**3 * first.weight.numel()


def test_half_the_precision_moves_half_the_bytes() -> None:
    recipe = resolve("demo").recipe
    assert work_of(recipe, "bf16")["patch_bytes"] == pytest.approx(work_of(recipe, "off")["patch_bytes"] / 2, rel=0.01)


@pytest.mark.parametrize("kind", ["unet", "dynunet", "segresnet", "swinunetr"])
def test_every_network_can_be_counted(kind: str) -> None:
    recipe = resolve("demo", {"network": {"kind": kind}, "patch.size": [64, 64, 64]}).recipe
    state = torch.random.get_rng_state()
    assert all(value > 0 for value in work_of(recipe, "bf16").values())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_ceilings_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolve("demo").recipe
    found = ceilings_of(recipe, "off", torch.device("cpu"))
    work, peaks = {"patch_flops", "patch_bytes"}, {"peak_flops", "peak_bandwidth"}
    assert set(found) == work | peaks | {f"{name}_spread" for name in peaks}
    assert all(0 <= found[f"{name}_spread"] < 100 for name in peaks)
    assert 1e8 < found["peak_flops"] < 1e15
    assert 1e8 < found["peak_bandwidth"] < 1e13

    def unable(*_: object) -> None:
        raise NotImplementedError("no such operation for meta tensors")

    monkeypatch.setattr(ceilings, "_passes", unable)
    assert ceilings_of(recipe, "off", torch.device("cpu")) == {}
    monkeypatch.setattr(ceilings, "_passes", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ceilings_of(recipe, "off", torch.device("cpu"))
