"""Sliding windows equal a blend written out by hand, for any shape, flip and batch size."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data.utils import compute_importance_map, dense_patch_slices
from monai.inferers import sliding_window_inference
from monai.inferers.utils import _get_scan_interval
from torch import Tensor, nn

from fasttrain.recipe.run_spec import WindowSpec
from fasttrain.windows import Answer, Whole, WindowStream, count_windows, lay_out, predict_volume, stitching
from fasttrain.windows.layout import importance

CPU = torch.device("cpu")


def make_network(dimensions: int, channels: int = 2, classes: int = 3, kernel: int = 3) -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv3d if dimensions == 3 else nn.Conv2d
    return convolution(channels, classes, kernel, padding=kernel // 2).eval()


class Spy:
    """A forward that remembers how many patches each call had."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.batches: list[int] = []

    def __call__(self, patches: Tensor) -> Tensor:
        self.batches.append(len(patches))
        return self.network(patches)


def brute_force(
    network: nn.Module, image: Tensor, patch: tuple[int, ...], overlap: float, blend: str, mirror: tuple[int, ...]
) -> Tensor:
    """One window at a time, one flip at a time, on a volume padded on both sides."""
    shape = image.shape[1:]
    gaps = [max(length - size, 0) for length, size in zip(patch, shape, strict=True)]
    padded = torch.zeros(image.shape[0], *(size + gap for size, gap in zip(shape, gaps, strict=True)))
    inner = tuple(slice(gap // 2, gap // 2 + size) for gap, size in zip(gaps, shape, strict=True))
    padded[(slice(None), *inner)] = image
    starts = []
    for size, length in zip(padded.shape[1:], patch, strict=True):
        step = max(int(length * (1 - overlap)), 1)
        axis = list(range(0, size - length, step))
        starts.append([*axis, size - length])
    weights = compute_importance_map(patch, mode=blend)
    total, weight_sum = 0.0, torch.zeros(padded.shape[1:])
    for corner in itertools.product(*starts):
        box = tuple(slice(start, start + length) for start, length in zip(corner, patch, strict=True))
        window = padded[(slice(None), *box)]
        flips = [f for n in range(len(mirror) + 1) for f in itertools.combinations([a + 1 for a in mirror], n)]
        with torch.no_grad():
            parts = [network(window.flip(f)[None]).softmax(1)[0].flip(f) for f in flips]
        probabilities = torch.stack(parts).mean(0)
        if isinstance(total, float):
            total = torch.zeros(len(probabilities), *padded.shape[1:])
        total[(slice(None), *box)] += probabilities * weights
        weight_sum[box] += weights
    return (total / weight_sum)[(slice(None), *inner)]


@pytest.mark.parametrize("mirror", [(), (0,), (0, 1)])
@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize(
    ("shape", "patch", "overlap"),
    [
        ((13, 10, 9), (8, 6, 4), 0.25),
        ((13, 5, 9), (8, 8, 8), 0.5),
        ((7, 5, 3), (8, 8, 8), 0.5),
        ((8, 8, 8), (8, 8, 8), 0.25),
        ((20, 11), (8, 8), 0.6),
        ((6, 11), (8, 4), 0.0),
        ((5, 6), (8, 8), 0.0),
    ],
)
def test_equals_the_blend_written_out(
    shape: tuple[int, ...], patch: tuple[int, ...], overlap: float, blend: str, mirror: tuple[int, ...]
) -> None:
    network = make_network(len(patch))
    image = torch.randn(2, *shape)
    for batch_size in (1, 3, 16):
        spec = WindowSpec(overlap=overlap, blend=blend, batch_size=batch_size)
        result = predict_volume(network, image, patch, spec, CPU, mirror)
        assert result.shape == (3, *shape)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, brute_force(network, image, patch, overlap, blend, mirror))


def test_a_pointwise_network_gives_its_softmax_whatever_the_shape() -> None:
    network = make_network(3, kernel=1)
    image = torch.randn(2, 37, 45, 11)
    with torch.no_grad():
        expected = network(image[None]).softmax(1)[0]
    for overlap in (0.0, 0.5):
        result = predict_volume(network, image, (32, 32, 32), WindowSpec(overlap=overlap), CPU, mirror=(0, 1, 2))
        assert result.shape == (3, 37, 45, 11)
        torch.testing.assert_close(result, expected)
    torch.testing.assert_close(result.sum(0), torch.ones(37, 45, 11))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 15), st.integers(1, 15)),
    patch=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    overlap=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    batch_size=st.integers(1, 7),
)
def test_shape_and_progress_hold_for_any_volume(
    shape: tuple[int, int], patch: tuple[int, int], overlap: float, batch_size: int
) -> None:
    network, told = make_network(2, kernel=1), []
    spec = WindowSpec(overlap=overlap, batch_size=batch_size)
    image = torch.randn(2, *shape)
    result = predict_volume(network, image, patch, spec, CPU, progress=lambda done, total: told.append((done, total)))
    with torch.no_grad():
        torch.testing.assert_close(result, network(image[None]).softmax(1)[0])
    total = count_windows(shape, patch, overlap)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


@pytest.mark.parametrize(("batch_size", "batches"), [(1, [1] * 8), (3, [3, 3, 2]), (8, [8]), (64, [8])])
def test_the_flips_of_a_single_window_share_a_pass(batch_size: int, batches: list[int]) -> None:
    spy = Spy(make_network(3))
    predict_volume(spy, torch.randn(2, 8, 7, 6), (8, 8, 8), WindowSpec(batch_size=batch_size), CPU, mirror=(0, 1, 2))
    assert spy.batches == batches


def test_no_pass_sees_more_patches_than_the_batch_size() -> None:
    spy = Spy(make_network(3))
    predict_volume(spy, torch.randn(2, 19, 9, 8), (8, 8, 8), WindowSpec(batch_size=4), CPU, mirror=(0, 2))
    assert max(spy.batches) <= 4
    assert sum(spy.batches) == 4 * count_windows((19, 9, 8), (8, 8, 8), 0.25)


def test_a_float16_image_is_summed_in_float32() -> None:
    network = make_network(3)
    image = torch.randn(2, 13, 10, 9).half()
    spec = WindowSpec(overlap=0.5)
    result = predict_volume(network, image, (8, 6, 4), spec, CPU)
    assert result.dtype == torch.float32
    assert torch.equal(result, predict_volume(network, image.float(), (8, 6, 4), spec, CPU))


def test_the_callers_autocast_reaches_the_network() -> None:
    types = []

    def forward(patches: Tensor) -> Tensor:
        logits = network(patches)
        types.append(logits.dtype)
        return logits

    network = make_network(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = predict_volume(forward, torch.randn(2, 13, 8, 8), (8, 8, 8), WindowSpec(), CPU)
    assert set(types) == {torch.bfloat16}
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.sum(0), torch.ones(13, 8, 8))


def test_leaves_the_image_alone_and_keeps_no_graph() -> None:
    network, image = make_network(3), torch.randn(2, 8, 8, 12)
    before = image.clone()
    result = predict_volume(network, image, (8, 8, 8), WindowSpec(), CPU)
    assert torch.equal(image, before)
    assert not result.requires_grad


def test_an_image_with_other_axes_than_the_patch_is_refused() -> None:
    with pytest.raises(ValueError, match="2 axes"):
        predict_volume(make_network(3), torch.randn(2, 8, 8, 8), (8, 8), WindowSpec(), CPU)


@pytest.mark.parametrize(
    ("shape", "patch", "overlap", "mirror"),
    [
        ((37, 12, 25), (16, 16, 16), 0.5, (0, 2)),
        ((9, 40, 21), (16, 12, 8), 0.25, ()),
        ((15, 16, 16), (16, 16, 16), 0.5, (1,)),
        ((31, 64), (16, 24), 0.7, (0, 1)),
    ],
)
@pytest.mark.parametrize("blend", ["gaussian", "constant"])
def test_equals_monais_own_sliding_window(
    shape: tuple[int, ...], patch: tuple[int, ...], overlap: float, mirror: tuple[int, ...], blend: str
) -> None:
    """The plain way: the whole volume in float32, a flip and a window at a time."""
    network, image = make_network(len(patch)), torch.randn(2, *shape)

    def plain(windows: Tensor) -> Tensor:
        axes = [axis + 2 for axis in mirror]
        flips = [subset for count in range(len(axes) + 1) for subset in itertools.combinations(axes, count)]
        return sum(network(windows.flip(flip)).softmax(1).flip(flip) for flip in flips) / len(flips)

    with torch.no_grad():
        whole = sliding_window_inference(image[None], patch, 1, plain, overlap=overlap, mode=blend)[0]
    spec = WindowSpec(overlap=overlap, blend=blend, batch_size=3)
    result = predict_volume(network, image, patch, spec, CPU, mirror)
    torch.testing.assert_close(result, whole, rtol=0, atol=1e-6)
    assert torch.equal(result.argmax(0), whole.argmax(0))


@settings(max_examples=40, deadline=None)
@given(
    patch=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    blend=st.sampled_from(["gaussian", "constant"]),
)
def test_weights_are_monais(patch: list[int], blend: str) -> None:
    theirs = compute_importance_map(tuple(patch), mode=blend)
    torch.testing.assert_close(importance(tuple(patch), blend, CPU), theirs, rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, 60),) * 3),
    patch=st.tuples(*(st.integers(1, 20),) * 3),
    overlap=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_windows_lie_where_monai_lays_them(shape: tuple[int, ...], patch: tuple[int, ...], overlap: float) -> None:
    layout = lay_out(shape, patch, overlap)
    padded = tuple(max(pair) for pair in zip(shape, patch, strict=True))
    interval = _get_scan_interval(padded, patch, 3, (overlap,) * 3)
    theirs = [tuple(int(one.start) for one in box) for box in dense_patch_slices(padded, patch, interval)]
    ours = list(layout.corners())
    assert sorted(ours) == sorted(theirs)
    assert layout.windows == len(theirs) == count_windows(shape, patch, overlap)
    along = [corner[layout.axis] for corner in ours]
    assert along == sorted(along)


class Recording:
    """A sink that remembers the planes it was given, and what they were."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.parts: list[Tensor] = []
        self.axis = -1

    def add(self, axis: int, begin: int, probabilities: Tensor) -> None:
        self.axis = axis
        self.spans.append((begin, begin + probabilities.shape[axis + 1]))
        self.parts.append(probabilities.clone())


def test_many_volumes_in_one_stream_are_what_each_is_alone() -> None:
    """Of all sizes: smaller than a window, of a few, of many, which keep batches to themselves."""
    network = make_network(3, kernel=5)
    shapes = [(7, 8, 6), (8, 8, 8), (20, 8, 9), (3, 30, 8), (8, 2, 2), (40, 17, 9), (6, 6, 6), (11, 8, 8)]
    images = [torch.randn(2, *shape) for shape in shapes]
    spec = WindowSpec(overlap=0.5, batch_size=5)
    spy, sinks = Spy(network), [Whole(shape) for shape in shapes]
    stream = WindowStream(Answer([spy], (0,), spec.batch_size), (8, 8, 8), spec, CPU)
    done = list(stream.predict(zip(images, sinks, strict=True)))
    assert done == list(range(len(shapes)))
    alone = Spy(network)
    for image, sink in zip(images, sinks, strict=True):
        assert sink.probabilities is not None
        expected = predict_volume(alone, image, (8, 8, 8), spec, CPU, (0,))
        torch.testing.assert_close(sink.probabilities, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(expected, brute_force(network, image, (8, 8, 8), 0.5, "gaussian", (0,)))
    assert len(spy.batches) < len(alone.batches)
    assert max(spy.batches) <= 5


def test_sums_are_as_thick_as_a_window_and_planes_come_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    network, image, sink = make_network(3), torch.randn(2, 9, 50, 10), Recording()
    made: list[tuple[int, ...]] = []
    zeros = torch.zeros

    def noting(*arguments: object, **more: object) -> Tensor:
        tensor = zeros(*arguments, **more)  # type: ignore[call-overload]
        made.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(torch, "zeros", noting)
    spec = WindowSpec(overlap=0.5, batch_size=2)
    list(WindowStream(Answer([network], (), 2), (8, 8, 8), spec, CPU).predict([(image, sink)]))
    assert sink.axis == 1
    assert (4, 9, 8, 10) in made  # three classes and the weights
    assert max(shape[2] for shape in made if len(shape) == 4) == 8
    assert [begin for begin, _ in sink.spans] == [0, *(end for _, end in sink.spans[:-1])]
    assert sink.spans[-1][1] == 50
    torch.testing.assert_close(torch.cat(sink.parts, 2), brute_force(network, image, (8, 8, 8), 0.5, "gaussian", ()))


def test_large_planes_are_handed_on_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stitching, "_VALUES_AT_ONCE", 3 * 9 * 10 * 2)
    network, image, sink = make_network(3), torch.randn(2, 9, 50, 10), Recording()
    list(WindowStream(Answer([network], (), 2), (8, 8, 8), WindowSpec(), CPU).predict([(image, sink)]))
    assert max(end - begin for begin, end in sink.spans) == 2
    torch.testing.assert_close(torch.cat(sink.parts, 2), brute_force(network, image, (8, 8, 8), 0.25, "gaussian", ()))


def test_windows_summed_on_another_device_than_they_are_computed_on() -> None:
    """`cpu:0` is another device than `cpu` to torch: the way of a volume that a GPU has no room for."""
    network, spec = make_network(3), WindowSpec(batch_size=3)
    images = [torch.randn(2, *shape) for shape in [(7, 20, 6), (8, 8, 8), (30, 8, 8)]]
    sinks = [Whole(tuple(image.shape[1:])) for image in images]
    stream = WindowStream(Answer([network], (1,), 3), (8, 8, 8), spec, torch.device("cpu:0"), CPU)
    list(stream.predict(zip(images, sinks, strict=True)))
    for image, sink in zip(images, sinks, strict=True):
        expected = predict_volume(network, image, (8, 8, 8), spec, CPU, (1,))
        torch.testing.assert_close(sink.probabilities, expected, rtol=0, atol=1e-6)


def test_several_networks_answer_with_their_mean() -> None:
    networks = [make_network(3), make_network(3)]
    torch.nn.init.normal_(networks[1].weight)
    image, sink = torch.randn(2, 12, 8, 8), Whole((12, 8, 8))
    list(WindowStream(Answer(networks, (0,), 4), (8, 8, 8), WindowSpec(), CPU).predict([(image, sink)]))
    each = [predict_volume(network, image, (8, 8, 8), WindowSpec(), CPU, (0,)) for network in networks]
    assert (each[0] - each[1]).abs().max() > 0.01
    torch.testing.assert_close(sink.probabilities, (each[0] + each[1]) / 2, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_recorded_batch_gives_what_kernels_one_by_one_give_and_follows_the_weights(dtype: torch.dtype | None) -> None:
    device = torch.device("cuda:0")
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.ReLU(), nn.Conv3d(8, 3, 1))
    network = network.to(device).eval()

    def forward(windows: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            return network(windows)

    images = [torch.randn(1, 14 + number % 5, 16, 15, device=device) for number in range(19)]
    spec = WindowSpec(batch_size=4)
    before: Tensor | None = None
    for _ in range(2):
        maps = []
        for recorded in (False, True):
            sinks = [Whole(tuple(image.shape[1:])) for image in images]
            failed: list[str] = []
            stream = WindowStream(
                Answer([forward], (0, 1, 2), 4), (16, 16, 16), spec, device, None, recorded, None, failed.append
            )
            list(stream.predict(zip(images, sinks, strict=True)))
            assert failed == []
            assert (stream._recorded is not None) == recorded
            maps.append(torch.cat([sink.probabilities.flatten() for sink in sinks]))
        torch.testing.assert_close(maps[0], maps[1], rtol=0, atol=1e-5 if dtype is None else 2e-2)
        assert before is None or (before - maps[1]).abs().max() > 0.05
        before = maps[1].clone()
        with torch.no_grad():
            network[0].weight.mul_(-1)


@pytest.mark.gpu
def test_what_cannot_be_recorded_runs_without() -> None:
    network, failed = nn.Conv3d(1, 2, 3, padding=1).cuda(), []

    def asking(windows: Tensor) -> Tensor:
        logits = network(windows)
        return logits if bool(logits.isfinite().all()) else logits * 0

    images = [torch.randn(1, 8, 8, 8, device="cuda") for _ in range(12)]
    sinks = [Whole((8, 8, 8)) for _ in images]
    stream = WindowStream(
        Answer([asking], (), 4), (8, 8, 8), WindowSpec(), torch.device("cuda:0"), None, True, None, failed.append
    )
    assert list(stream.predict(zip(images, sinks, strict=True))) == list(range(12))
    assert len(failed) == 1
    for image, sink in zip(images, sinks, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(sink.probabilities, network(image[None]).softmax(1)[0], rtol=0, atol=1e-4)
