"""The challenge's scores against a count by hand, and the losses and the network of doses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fasttrain.engine.checkpointing import checkpoint_blocks
from fasttrain.engine.folds import _pooled
from fasttrain.engine.outline import outline_of
from fasttrain.engine.validating.validation import Scores
from fasttrain.kernels.structure_bits import as_dose
from fasttrain.losses import build_loss
from fasttrain.networks import build_network
from fasttrain.recipe import resolve
from fasttrain.recipe.network_spec import DoseUNetSpec
from fasttrain.scoring import score_dose, summarise_doses
from fasttrain.scoring.dose import dose_metrics, dose_volume_curve

NAMES = ("Brainstem", "PTV70")
MASK = 1 << 2


def test_a_score_counted_by_hand() -> None:
    """Ten voxels in the mask, of which a brainstem has four and a target five; one voxel of the target lies outside the mask."""
    bits = np.zeros((3, 4, 1), dtype=np.int16)
    flat = bits.reshape(-1)
    flat[:10] = MASK
    flat[:4] |= 1
    flat[[5, 6, 7, 8, 11]] |= 2
    reference, prediction = np.zeros((2, 3, 4, 1))
    reference.reshape(-1)[:10] = [1, 2, 3, 4, 10, 60, 62, 64, 66, 5]
    prediction.reshape(-1)[:10] = [2, 2, 3, 8, 10, 61, 62, 60, 66, 5]
    # Outside of the mask anything may be predicted
    prediction.reshape(-1)[10:] = 1000
    score = score_dose("pt", prediction, reference, bits, NAMES, (4.0, 4.0, 4.0))
    assert score.dose_score == pytest.approx((1 + 4 + 1 + 4) / 10)
    # 100 mm³ of 64 mm³ voxels are 2 voxels, half of the brainstem: its median. The target has 0 where the mask ends
    expected = {
        "Brainstem": {"D0.1cc": (2.5, 2.5), "mean": (2.5, 3.75)},
        "PTV70": {"D99": (2.4, 2.4), "D95": (12.0, 12.0), "D1": (65.92, 65.84)},
    }
    for structure, metrics in expected.items():
        for metric, pair in metrics.items():
            assert score.metrics[structure][metric] == pytest.approx(pair), (structure, metric)
    assert score.dvh_score == pytest.approx((0 + 1.25 + 0 + 0 + 0.08) / 5)
    inside = np.where((bits & MASK) > 0, prediction, -5.0)
    assert score_dose("pt", inside, reference, bits, NAMES, (4.0, 4.0, 4.0)) == score


def test_the_voxel_size_decides_the_tenth_of_a_cubic_centimetre() -> None:
    doses = np.arange(1.0, 101.0)
    assert dose_metrics(doses, False, (2.0, 2.0, 2.5))["D0.1cc"] == pytest.approx(np.percentile(doses, 90))
    assert dose_metrics(doses, False, (10.0, 10.0, 10.0))["D0.1cc"] == pytest.approx(np.percentile(doses, 99)), (
        "one at least"
    )
    assert dose_metrics(np.array([3.0, 5.0]), False, (2.0, 2.0, 2.5))["D0.1cc"] == 3.0, (
        "smaller than a tenth: the least"
    )


def test_the_dvh_score_in_all_is_over_metrics_and_not_over_cases() -> None:
    bits = np.full((2, 2, 1), MASK | 1, dtype=np.int16)
    both = bits | 2
    zero = np.zeros((2, 2, 1))
    one = score_dose("a", zero + 1, zero, bits, NAMES, (4.0, 4.0, 4.0))
    two = score_dose("b", zero + 3, zero, both, NAMES, (4.0, 4.0, 4.0))
    summary = summarise_doses([one, two], NAMES)
    assert summary.dose_score == 2.0
    assert summary.dvh_score == pytest.approx((2 * 1 + 5 * 3) / 7)
    assert summary.dvh_by_structure == {"Brainstem": 2.0, "PTV70": 3.0}
    assert summary.counts == {"Brainstem": 2, "PTV70": 1}
    with pytest.raises(ValueError, match="no voxel in its possible dose mask"):
        score_dose("c", zero, zero, bits & 1, NAMES, (4.0, 4.0, 4.0))


def test_the_scores_of_folds_are_pooled_as_those_of_a_run() -> None:
    recipe = resolve("openkbp").recipe
    bits = np.full((2, 2, 1), 1 << 10 | 1, dtype=np.int16)
    zero, names = np.zeros((2, 2, 1)), recipe.data.class_names
    scores = [
        score_dose("a", zero + 1, zero, bits, names, (4.0, 4.0, 4.0)),
        score_dose("b", zero + 3, zero, bits | 1 << 9, names, (4.0, 4.0, 4.0)),
    ]
    whole = Scores(summarise_doses(scores, names), tuple(scores), 0.0)
    score, pooled = _pooled(whole.by_case(names), recipe)
    assert score == whole.summary.dose_score
    assert pooled["dvh_score"] == pytest.approx(whole.summary.dvh_score)
    assert pooled["dvh_by_structure"] == whole.summary.dvh_by_structure


def test_a_curve_of_four_voxels() -> None:
    assert dose_volume_curve(np.array([1.0, 2.0, 2.0, 4.0]), np.array([0.0, 1.0, 2.0, 2.1, 5.0])).tolist() == [
        100,
        100,
        75,
        25,
        0,
    ]


@pytest.mark.parametrize("kind", ["masked_mae", "masked_mse"])
def test_losses_are_means_inside_the_mask_in_float32(kind: str) -> None:
    spec = resolve("openkbp", [f"loss.kind={kind}"]).recipe.loss
    answer = torch.randn(2, 1, 4, 4, 4, dtype=torch.bfloat16).requires_grad_()
    target = torch.rand(2, 2, 4, 4, 4)
    target[:, 1] = (target[:, 1] > 0.5).float()
    loss = build_loss(spec)(answer, target)
    inside = target[:, 1] > 0
    apart = as_dose(answer)[:, 0][inside] - target[:, 0][inside]
    wanted = apart.abs().mean() if kind == "masked_mae" else apart.square().mean()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    loss.backward()
    assert not answer.grad[:, 0][~inside].any()
    assert answer.grad[:, 0][inside].any()
    target[:, 0][~inside] = 1e6
    assert float(build_loss(spec)(answer, target).detach()) == float(loss.detach())
    target[:, 1] = 0
    assert float(build_loss(spec)(answer, target).detach()) == 0.0


def test_a_dose_is_never_negative_and_can_always_learn() -> None:
    answer = torch.linspace(-1, 2, 50).requires_grad_()
    dose = as_dose(answer)
    assert (dose >= 0).all()
    assert float(as_dose(torch.tensor(-1000.0))) == 0.0
    assert float(as_dose(torch.tensor(1.0))) == pytest.approx(1.0, abs=1e-4)
    dose.sum().backward()
    assert (answer.grad > 0).all()


def test_the_published_network_and_its_weights() -> None:
    assert outline_of(resolve("openkbp").recipe).parameters == 116_975_361


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_the_network_keeps_the_patch_and_answers_in_float32(norm: str) -> None:
    spec = DoseUNetSpec(kind="dose_unet", features=(4, 8, 8), norm=norm)
    network = build_network(spec, (16, 8, 24), 11, 1).train()
    image = torch.randn(2, 11, 16, 8, 24).to(memory_format=torch.channels_last_3d)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = network(image)
    assert (answer.shape, answer.dtype) == ((2, 1, 16, 8, 24), torch.float32)
    answer.mean().backward()
    assert all(weight.grad is not None for weight in network.parameters())


def test_blocks_computed_again_give_the_same_gradients() -> None:
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        network = build_network(DoseUNetSpec(kind="dose_unet", features=(4, 8, 8)), (16, 16, 16), 11, 1).train()
        if again:
            assert checkpoint_blocks(network) == 6
        torch.manual_seed(1)
        network(torch.ones(2, 11, 16, 16, 16)).square().mean().backward()
        gradients.append([weight.grad for weight in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
