"""Every network, loss, optimiser and schedule takes steps and learns one case by heart; one channel goes the whole way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.networks import nets
from torch import nn

from fasttrain import train
from fasttrain.delivery.trained import open_run
from fasttrain.engine.optimisation.optim import build_optimizer, learning_rate
from fasttrain.engine.step import Precision, Step
from fasttrain.engine.validating.inference import Predictor, two_class_logits
from fasttrain.losses import build_loss
from fasttrain.networks import build_network
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch

NETWORKS: dict[str, dict[str, Any]] = {
    "unet": {"features": [8, 16], "strides": [2]},
    "dynunet": {"features": [8, 16, 16], "strides": [2, 2], "deep_supervision": 1},
    "segresnet": {"init_filters": 16, "blocks_down": [1, 1, 1], "blocks_up": [1, 1]},
    "swinunetr": {"feature_size": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4]},
    "monai": {"name": "BasicUNetPlusPlus", "arguments": {"features": [8, 8, 8, 8, 8, 8], "deep_supervision": True}},
}
LOSSES: list[dict[str, Any]] = [
    {"kind": "dice"},
    {"kind": "dice_ce"},
    {"kind": "cross_entropy"},
    {"kind": "dice_focal"},
    {"kind": "generalised_dice"},
    {"kind": "tversky"},
    {"kind": "bce_dice"},
]
OPTIMIZERS: list[dict[str, Any]] = [
    {"kind": "adamw", "learning_rate": 1e-2},
    {"kind": "adam", "learning_rate": 1e-2},
    {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    {"kind": "novograd", "learning_rate": 2e-2},
    {"kind": "muon", "learning_rate": 1e-2},
]
FLAT = (16, 24)
SCHEDULES: list[dict[str, Any]] = [{"kind": kind} for kind in ("constant", "poly", "cosine", "one_cycle")]


@pytest.fixture(autouse=True)
def one_thread():
    """Such small networks wait for one another's threads more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recipe_of(tiny, classes: int, patch: tuple[int, ...], **sections: dict[str, Any]) -> Recipe:
    resolved: Recipe = tiny(
        data__source={"kind": "folders"},
        data__classes={1: "a", 2: "b"} if classes == 2 else {1: "a"},
        data__spacing=[5.0] * len(patch),
        patch__size=patch,
        augment={},
        loss=sections.pop("loss", {"kind": "dice_ce"}),
        schedule=sections.pop("schedule", {"kind": "constant"}),
        optimizer=sections.pop("optimizer", OPTIMIZERS[0]),
        network=sections.pop("network", {"kind": "unet", "features": [4, 8], "strides": [2]}),
    ).recipe
    return resolved


def one_case(recipe: Recipe) -> Batch:
    """A disc or ball, and a bar where there is a second class, brighter than the noise about them."""
    size = recipe.patch.size
    generator = torch.Generator().manual_seed(0)
    places = torch.stack(torch.meshgrid(*(torch.arange(n) for n in size), indexing="ij")).float()
    middle = torch.tensor([n / 2 - 1 for n in size]).view(-1, *(1,) * len(size))
    label = ((places - middle).square().sum(0).sqrt() < min(size) / 3).to(torch.uint8)
    if recipe.data.class_count > 2:
        label[..., :3] = 2
    image = label.float() + 0.3 * torch.randn(size, generator=generator)
    return Batch(image[None, None], label[None, None], (0,), ("case",))


def learn(recipe: Recipe, steps: int) -> tuple[list[float], float]:
    """The losses of `steps` steps on one case, and the Dice of the foreground, worst class, of the answer after them."""
    torch.manual_seed(0)
    network = build_network(recipe.network, recipe.patch.size, 1, recipe.output_channels)
    optimizer = build_optimizer(recipe.optimizer, network.parameters(), True)
    precision = Precision("cpu", None, None)
    step = Step(network, build_loss(recipe.loss), optimizer, precision, 1)
    rate = learning_rate(recipe.schedule, recipe.optimizer.learning_rate, steps)
    case = one_case(recipe)
    network.train()
    losses = [float(step(iter([case]), rate(number))) for number in range(steps)]
    network.eval()
    with torch.no_grad():
        logits = network(case.image)
    answer = (two_class_logits(logits) if recipe.output_channels == 1 else logits).argmax(1, keepdim=True)
    scores = []
    for index in range(1, recipe.data.class_count):
        found, true = answer == index, case.label == index
        scores.append(2 * float((found & true).sum()) / float(found.sum() + true.sum()))
    return losses, min(scores)


def assert_learns(recipe: Recipe, steps: int) -> None:
    losses, dice = learn(recipe, steps)
    assert all(np.isfinite(losses))
    assert losses[2] != losses[1] != losses[0]
    assert losses[-1] < 0.6 * losses[0]
    assert dice > 0.9


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_network_learns_a_case_by_heart(tiny, kind: str) -> None:
    if kind == "swinunetr":
        pytest.importorskip("einops", reason="MONAI's Swin UNETR calls einops")
    assert_learns(recipe_of(tiny, 2, (32, 64), network={"kind": kind, **NETWORKS[kind]}), 30)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["kind"])
@pytest.mark.parametrize("patch", [FLAT, (12, 12, 12)], ids=["2d", "3d"])
def test_every_loss_teaches_a_case_by_heart(tiny, loss: dict[str, Any], patch: tuple[int, ...]) -> None:
    assert_learns(recipe_of(tiny, 1 if loss["kind"] == "bce_dice" else 2, patch, loss=loss), 40)


PAIRS = [*((one, SCHEDULES[0]) for one in OPTIMIZERS), *((OPTIMIZERS[0], one) for one in SCHEDULES[1:])]


@pytest.mark.parametrize(("optimizer", "schedule"), PAIRS, ids=lambda spec: spec["kind"])
def test_every_optimiser_and_schedule_learns_a_case_by_heart(
    tiny, optimizer: dict[str, Any], schedule: dict[str, Any]
) -> None:
    assert_learns(recipe_of(tiny, 2, FLAT, optimizer=optimizer, schedule=schedule), 50)


def test_a_rate_of_almost_nothing_learns_nothing(tiny) -> None:
    """The control: what the tests above ask for is not met by standing still."""
    losses, dice = learn(recipe_of(tiny, 2, FLAT, optimizer={"kind": "adamw", "learning_rate": 1e-9}), 10)
    assert losses[-1] > 0.95 * losses[0]
    assert dice < 0.9


class Grey(nn.Module):
    """One channel: the logit of the voxel itself."""

    def __init__(self, spatial_dims: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        assert (in_channels, out_channels) == (1, 1)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.gain * image


def test_one_channel_is_a_sigmoid_and_a_threshold_at_a_half(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([-50.0, -1.0, 0.0, 1e-3, 2.0, 50.0]).view(1, 1, 1, 1, 6)
    two = torch.softmax(two_class_logits(logits), dim=1)
    torch.testing.assert_close(two[:, 1:], torch.sigmoid(logits))
    assert two.argmax(1).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    monkeypatch.setattr(nets, "Grey", Grey, raising=False)
    recipe = recipe_of(tiny, 1, (16, 16, 16), loss={"kind": "bce_dice"}, network={"kind": "monai", "name": "Grey"})
    network = build_network(recipe.network, recipe.patch.size, 1, recipe.output_channels)
    predictor = Predictor(network, recipe, Precision("cpu", torch.bfloat16, None), torch.device("cpu"))

    class Sample:
        image = torch.randn(1, 20, 16, 18, generator=torch.Generator().manual_seed(0))

    probabilities = predictor.probabilities(Sample())  # type: ignore[arg-type]
    assert probabilities.shape == (2, 20, 16, 18)
    torch.testing.assert_close(probabilities[1], torch.sigmoid(Sample.image[0]), rtol=0, atol=1e-5)
    assert torch.equal(predictor.class_map(Sample(), in_source_grid=False), (Sample.image[0] > 0).to(torch.uint8))  # type: ignore[arg-type]


def test_a_run_with_one_channel_trains_validates_and_predicts(tiny, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(3):
        places = np.stack(np.meshgrid(*(np.arange(18),) * 3, indexing="ij"), -1)
        label = (np.linalg.norm(places - [8 + number, 9, 9], axis=-1) < 6).astype(np.uint8)
        image = (label + rng.normal(0, 0.2, label.shape)).astype(np.float32)
        for folder, values in (("images", image), ("labels", label)):
            (tmp_path / "set" / folder).mkdir(exist_ok=True, parents=True)
            nib.save(nib.Nifti1Image(values, np.diag([5.0, 5, 5, 1])), tmp_path / "set" / folder / f"{number}.nii.gz")
    recipe = tiny(
        data__source={"kind": "folders"},
        data__classes={1: "ball"},
        data__split={"kind": "last", "validation": 1},
        data__intensity={"kind": "none"},
        augment={},
        loss={"kind": "bce_dice"},
        optimizer={"kind": "novograd", "learning_rate": 0.02},
        schedule={"kind": "one_cycle"},
        training__epochs=3,
        training__iterations_per_epoch=8,
    )
    result = train(recipe, data=tmp_path / "set", run=tmp_path / "run", device="cpu")
    assert result.exit_code == 0
    assert result.summary["best"]["value"] > 0.8
    network = open_run(tmp_path / "run", "cpu").predictor.network
    assert network(torch.zeros(1, 1, 16, 16, 16)).shape == (1, 1, 16, 16, 16)
