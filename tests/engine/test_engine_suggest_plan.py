"""Numbers of a suggested recipe: nnU-Net's published plans, coarse axes, memory, and volumes of any size."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.engine.suggest.planner import (
    CPU_GIB,
    ELEMENTS_AT_8_GIB,
    MOST_GIB,
    USED_SHARE,
    network_for,
    plan_for,
    target_spacing,
)


def plan(shape, spacing, cases=40, gpu_gib=12.0, channels=1, classes=2):
    dimensions = len(shape)
    return plan_for(
        np.full((cases, dimensions), shape),
        np.full((cases, dimensions), spacing, dtype=float),
        channels,
        classes,
        gpu_gib,
    )


def test_hippocampus_gets_nnunets_published_plan():
    # Its dataset fingerprint: 260 cases of a median 36×50×35 at 1 mm; nnU-Net v2 plans batch 9 of 40×56×40, 4 stages
    made = plan((36, 50, 35), (1, 1, 1), cases=260)
    assert made.network.patch == (40, 56, 40)
    assert made.network.strides == ((2, 2, 2),) * 3
    assert made.features == (32, 64, 128, 256)
    assert made.batch_size == 9
    assert made.deep_supervision == 1


def test_brain_tumours_get_nnunets_published_patch():
    # nnU-Net v2 plans 128×128×128, batch 2, 6 stages for Task01 (median 138×170×138 after its crop, 8 GB)
    made = plan((138, 170, 138), (1, 1, 1), cases=484, channels=4, classes=3, gpu_gib=8 / USED_SHARE)
    assert made.network.patch == (128, 128, 128)
    assert made.network.stages == 6
    assert made.features == (32, 64, 128, 256, 320, 320)
    assert made.batch_size == 2


def test_prostate_like_slices_are_not_pooled_until_the_plane_is_as_coarse():
    # nnU-Net's Task05 plan: patch 20×320×256 (z first) at 3.6×0.62×0.62 mm, strides of 1 along z first
    made = plan((320, 319, 20), (0.62, 0.62, 3.6), cases=32, channels=2, gpu_gib=8 / USED_SHARE)
    strides = made.network.strides
    assert [stride[2] for stride in strides[:2]] == [1, 1]
    assert made.network.patch[2] == 20
    assert made.network.kernels[0] == (3, 3, 1)
    assert made.network.kernels[-1] == (3, 3, 3)
    assert sum(stride[2] == 2 for stride in strides) <= 2


def test_a_coarse_axis_takes_the_tenth_percentile_and_others_the_median():
    spacings = np.array([[0.8, 0.8, z] for z in (3.0, 5.0, 5.0, 5.0, 7.0)])
    shapes = np.full((5, 3), (512, 512, 60))
    target, coarse = target_spacing(shapes, spacings)
    assert coarse == 2
    assert target.tolist() == pytest.approx([0.8, 0.8, np.percentile(spacings[:, 2], 10)])
    # Negative controls: less than three times as coarse, and a coarse axis with as many voxels
    assert target_spacing(shapes, spacings * (1, 1, 0.4))[1] is None
    assert target_spacing(np.full((5, 3), (512, 512, 300)), spacings)[1] is None


def test_a_coarse_axis_never_gets_finer_than_the_others():
    spacings = np.array([[1.0, 1.0, z] for z in (0.2, 4.0, 4.0, 4.0, 4.0)])
    target, coarse = target_spacing(np.full((5, 3), (300, 300, 30)), spacings)
    assert coarse == 2
    assert target[2] >= 1.0


def test_planes_follow_the_2d_rules():
    made = plan((512, 512), (1, 1), cases=1000, gpu_gib=8 / USED_SHARE)
    # nnU-Net's 2D plans of 512×512: 8 stages from 32 to 512 features, batch 12 or 13
    assert made.network.patch == (512, 512)
    assert made.network.stages == 8
    assert made.features == (32, 64, 128, 256, 512, 512, 512, 512)
    assert 11 <= made.batch_size <= 13


def test_more_memory_never_gives_a_smaller_step_and_the_largest_gain_ends_at_the_cap():
    sizes = [plan((512, 512, 400), (0.8, 0.8, 1.0), gpu_gib=gib) for gib in (6, 8, 12, 24, 32, 80)]
    voxels = [math.prod(one.network.patch) * one.batch_size for one in sizes]
    assert voxels == sorted(voxels)
    assert voxels[-1] == voxels[-2]
    assert sizes[-1].budget_gib == MOST_GIB
    assert voxels[0] < voxels[-1]


def test_a_cpu_gets_small_steps():
    made = plan((512, 512, 400), (0.8, 0.8, 1.0), gpu_gib=None)
    assert made.features[0] == 16
    assert made.batch_size * made.elements * 8 / ELEMENTS_AT_8_GIB[3] <= CPU_GIB
    assert plan((512, 512, 400), (0.8, 0.8, 1.0), gpu_gib=0) == made


def test_many_classes_cost_memory():
    few, many = (plan((256, 256, 256), (1, 1, 1), classes=count, gpu_gib=10) for count in (2, 117))
    assert math.prod(many.network.patch) < math.prod(few.network.patch)


def test_a_batch_holds_at_most_a_twentieth_of_the_set():
    assert plan((64, 64, 64), (1, 1, 1), cases=100).batch_size == 5
    assert plan((64, 64, 64), (1, 1, 1), cases=2).batch_size == 2


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([2, 3]).flatmap(
        lambda axes: st.tuples(
            st.lists(st.integers(1, 600), min_size=axes, max_size=axes),
            st.lists(st.floats(0.05, 20), min_size=axes, max_size=axes),
        )
    ),
    st.sampled_from([None, 4.0, 11.0, 80.0]),
    st.integers(1, 120),
)
def test_any_grid_gets_a_network_that_its_patch_fits(grid, gpu_gib, classes):
    shape, spacing = grid
    made = plan(shape, spacing, cases=3, gpu_gib=gpu_gib, classes=classes)
    network = made.network
    for axis, length in enumerate(network.patch):
        assert length % math.prod(stride[axis] for stride in network.strides) == 0
    assert network.stages >= 3
    assert len(network.kernels) == network.stages == len(made.features)
    assert 0 <= made.deep_supervision <= network.stages - 2
    assert made.batch_size >= 2
    lowest = [length // math.prod(s[axis] for s in network.strides) for axis, length in enumerate(network.patch)]
    assert math.prod(lowest) > 1, "an instance norm needs more than one voxel"
    # Whatever can be made smaller fits: two patches of the budget, unless the patch is at its least
    if made.batch_in_memory < 2:
        assert max(network.patch) <= 600
        assert all(
            length - math.prod(s[axis] for s in network.strides) < 8 for axis, length in enumerate(network.patch)
        )


@given(st.lists(st.integers(8, 300), min_size=3, max_size=3))
def test_isotropic_axes_are_halved_down_to_four_voxels_or_more(shape):
    network = network_for(shape, (1.0, 1.0, 1.0))
    assert all(wanted <= length for wanted, length in zip(shape, network.patch, strict=True))
    for axis, length in enumerate(network.patch):
        assert length / math.prod(stride[axis] for stride in network.strides) >= 2
