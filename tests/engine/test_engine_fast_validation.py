"""Validation in batches that cases share gives the scores of the plain way, and finds room where a GPU has little."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from torch import Tensor, nn

from fasttrain.data.restore import to_source_grid
from fasttrain.engine.step import Precision
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.engine.validating import validation_cases
from fasttrain.engine.validating.inference import CPU, Ensemble, Predictor, two_class_logits
from fasttrain.engine.validating.validation import Scores, Validator
from fasttrain.engine.validating.validation_memory import Room, batch_bytes, case_bytes, decide_stitching, shapes_of
from fasttrain.networks import build_network
from fasttrain.recipe import Recipe
from fasttrain.samples import IGNORED, Case, Grid, Sample
from fasttrain.scoring import CaseScore, score_case

PLAIN = Precision("cpu", None, None)
OTHER = torch.device("cpu:0")
"""To torch another device than `cpu`: it stands for a GPU where none is needed."""
SHAPES = {
    3: [(13, 16, 9), (16, 16, 16), (26, 20, 16), (11, 12, 13), (52, 16, 17), (7, 30, 16)],
    2: [(20, 13), (32, 32), (90, 41)],
}


class Made:
    """Cases made in memory, counted when they are read."""

    def __init__(self, recipe: Recipe, spacing: float = 1.0, ignored: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.read: list[int] = []
        self.samples = []
        dimensions, classes = recipe.dimensions, recipe.data.class_count
        for number, shape in enumerate(SHAPES[dimensions]):
            image = torch.randn(len(recipe.data.channels), *shape, generator=generator)
            label = torch.randint(0, classes, (1, *shape), generator=generator, dtype=torch.uint8)
            if ignored:
                label[:, :2] = IGNORED
            grid, turned = Grid(shape, np.eye(4)), np.diag([-spacing, spacing, spacing, 1.0])
            turned[0, 3] = shape[0] - 1
            length = [max(int((size - 1) / spacing) + 1, 1) for size in shape]
            source = Grid(tuple(length), turned)
            self.samples.append(Sample(f"case{number}", image, label, (), None, grid, source))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        return self.samples[index]

    def close(self) -> None: ...

    @property
    def cases(self) -> list[Case]:
        return [Case(sample.name, (), None) for sample in self.samples]


def network_of(recipe: Recipe, seed: int = 0) -> nn.Module:
    """The recipe's network where it has several heads, else a few layers that a CPU is quick with; weights make it decided."""
    torch.manual_seed(seed)
    channels, outputs = len(recipe.data.channels), recipe.output_channels
    if recipe.network.deep_supervision:  # type: ignore[union-attr]
        network = build_network(recipe.network, recipe.patch.size, channels, outputs)
    else:
        flat = recipe.dimensions == 2
        convolution, norm = (nn.Conv2d, nn.InstanceNorm2d) if flat else (nn.Conv3d, nn.InstanceNorm3d)
        network = nn.Sequential(convolution(channels, 4, 3, padding=1), norm(4), nn.ReLU(), convolution(4, outputs, 1))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15 if recipe.network.deep_supervision else 1.0)  # type: ignore[union-attr]
    return network


def plain_scores(recipe: Recipe, network: nn.Module, source: Made, references: Sequence[Tensor]) -> list[CaseScore]:
    """MONAI's sliding window over each case in float32, a flip and a window at a time; the whole is moved to the file's grid."""
    axes = [axis + 2 for axis in recipe.validation.mirror]
    flips = [subset for count in range(len(axes) + 1) for subset in itertools.combinations(axes, count)]
    network.eval()

    def answer(windows: Tensor) -> Tensor:
        parts = []
        for flip in flips:
            logits = network(windows.flip(flip))
            logits = two_class_logits(logits) if logits.shape[1] == 1 else logits
            parts.append(logits.softmax(1).flip(flip))
        return sum(parts) / len(parts)

    scores, window = [], recipe.validation.window
    for sample, reference in zip(source.samples, references, strict=True):
        with torch.no_grad():
            whole = sliding_window_inference(
                sample.image[None], recipe.patch.size, 1, answer, overlap=window.overlap, mode=window.blend
            )[0]
        if recipe.validation.grid == "original":
            whole = to_source_grid(whole, sample.grid, sample.source_grid, "linear", 0.0)
        prediction, ignores = whole.argmax(0).to(torch.uint8), recipe.data.ignore_label is not None
        scores.append(
            score_case(sample.name, prediction, reference, recipe.data.class_count, (1.0,) * 3, False, ignores)
        )
    return scores


def silent(done: int, total: int) -> None: ...


def same(ours: Sequence[CaseScore], theirs: Sequence[CaseScore]) -> None:
    assert [one.name for one in ours] == [one.name for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.background_dice == pytest.approx(other.background_dice, abs=1e-4)
        for mine, its in zip(one.classes, other.classes, strict=True):
            assert mine.dice == pytest.approx(its.dice, abs=1e-4)


FOLDERS = {"data__source": {"kind": "folders"}, "data__spacing": None}
VARIANTS: dict[str, dict[str, object]] = {
    "3d": {},
    "flips": {"validation__mirror": [0, 2]},
    "deep supervision": {"network__deep_supervision": 1},
    "several channels": {"data__channels": ["T1", "T2"]},
    "one channel out": {"loss": {"kind": "bce_dice"}, "data__classes": {1: "organ"}},
    "ignored": {"data__ignore_label": 9},
    "2d": {
        "patch__size": [32, 32],
        "augment": {},
        "validation__mirror": [1],
    },
    "half overlap, constant": {"validation__window": {"overlap": 0.5, "blend": "constant", "batch_size": 3}},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("grid", ["preprocessed", "original"])
def test_scores_are_those_of_the_plain_way(
    name: str, grid: str, tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(**{**FOLDERS, **VARIANTS[name]}, validation__grid=grid).recipe
    source = Made(recipe, 0.7, name == "ignored")
    network = network_of(recipe)
    references = [sample.label[0] for sample in source.samples if sample.label is not None]
    if grid == "original":
        generator = torch.Generator().manual_seed(2)
        references = [
            torch.randint(0, recipe.data.class_count, sample.source_grid.shape, generator=generator, dtype=torch.uint8)
            for sample in source.samples
        ]
    validator = Validator(Predictor(network, recipe, PLAIN, CPU), source, source.cases, recipe, keep_labels=False)
    monkeypatch.setattr(validator.kept, "reference", lambda index, sample: references[index])
    scores = validator.run(StopRequest(), silent)
    found = [one.dice for case in scores.cases for one in case.classes if one.dice is not None]
    assert len({round(one, 4) for one in found if one > 0.02}) > len(scores.cases) // 2
    same(scores.cases, plain_scores(recipe, network, source, references))


def test_the_batch_and_the_company_of_a_case_change_nothing(tiny: Callable) -> None:
    found: list[Scores] = []
    for batch_size in (1, 3, 64):
        window = {"overlap": 0.5, "batch_size": batch_size}
        recipe = tiny(validation__grid="preprocessed", validation__window=window).recipe
        source = Made(recipe)
        predictor = Predictor(network_of(recipe), recipe, PLAIN, CPU)
        found.append(Validator(predictor, source, source.cases, recipe, keep_labels=False).run(StopRequest(), silent))
        alone = [predictor.class_map(sample, False) for sample in source.samples]
        together = [one for _, one in predictor.class_maps(source.samples, False)]
        assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
        assert source.read == list(range(len(source)))
    for scores in found[1:]:
        same(scores.cases, found[0].cases)


def test_an_ensemble_is_the_mean_of_its_networks(tiny: Callable) -> None:
    recipe = tiny(validation__mirror=[0]).recipe
    members = [Predictor(network_of(recipe, seed), recipe, PLAIN, CPU) for seed in range(3)]
    sample = Made(recipe).samples[2]
    each = [member.probabilities(sample) for member in members]
    together = Ensemble(members)
    torch.testing.assert_close(together.probabilities(sample), sum(each) / 3, rtol=0, atol=1e-6)
    assert torch.equal(together.class_map(sample, False), sum(each).argmax(0).to(torch.uint8))
    assert (each[0] - each[1]).abs().max() > 0.01


class ShortOfMemory(nn.Module):
    """Runs out of memory in some of its calls."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def __init__(self, network: nn.Module, fails_in: set[int]) -> None:
        super().__init__()
        self.network = network
        self.fails_in = fails_in
        self.calls = 0

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.fails_in:
            raise self.error
        result: Tensor = self.network(image)
        return result


def test_where_memory_runs_out_sums_go_to_the_host_once_and_the_scores_are_the_same(tiny: Callable) -> None:
    recipe = tiny(validation__grid="preprocessed", validation__window={"batch_size": 2}).recipe
    network, warnings, told = network_of(recipe), [], []
    expected = Validator(
        Predictor(network, recipe, PLAIN, CPU), Made(recipe), Made(recipe).cases, recipe, keep_labels=False
    ).run(StopRequest(), silent)
    source = Made(recipe)
    predictor = Predictor(ShortOfMemory(network, {5}), recipe, PLAIN, OTHER)
    predictor.warn = warnings.append
    validator = Validator(predictor, source, source.cases, recipe, keep_labels=False)
    validator.kept.resident_bytes = 10**9
    scores = validator.run(StopRequest(), lambda done, total: told.append(done))
    same(scores.cases, expected.cases)
    assert told == list(range(1, len(source) + 1))
    assert len(warnings) == 1
    assert "ran out of memory in validation" in warnings[0]
    assert predictor.stitch_device == CPU
    assert validator.kept.resident == 0
    same(validator.run(StopRequest(), silent).cases, expected.cases)
    assert len(warnings) == 1
    predictor.network.fails_in = {predictor.network.calls + 2}
    with pytest.raises(torch.OutOfMemoryError):
        validator.run(StopRequest(), silent)


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True), ("CUDA error: an illegal memory access was encountered", False)],
)
def test_a_librarys_want_of_memory_counts_too_and_no_other_error_does(
    tiny: Callable, text: str, is_memory: bool
) -> None:
    recipe = tiny(validation__grid="preprocessed", validation__window={"batch_size": 2}).recipe
    source, network = Made(recipe), ShortOfMemory(network_of(recipe), {2})
    network.error = RuntimeError(text)
    predictor = Predictor(network, recipe, PLAIN, OTHER)
    predictor.warn = lambda text: None
    validator = Validator(predictor, source, source.cases, recipe, keep_labels=False)
    if is_memory:
        validator.run(StopRequest(), silent)
        assert predictor.stitch_device == CPU
    else:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            validator.run(StopRequest(), silent)


def test_volumes_that_stay_on_the_device_are_read_once(tiny: Callable) -> None:
    recipe = tiny(validation__grid="preprocessed").recipe
    source = Made(recipe)
    sizes = [sample.image.nbytes + sample.label.nbytes for sample in source.samples]
    validator = Validator(
        Predictor(network_of(recipe), recipe, PLAIN, OTHER), source, source.cases, recipe, keep_labels=False
    )
    validator.kept.resident_bytes = sizes[0] + sizes[1] + sizes[3]
    first = validator.run(StopRequest(), silent)
    assert source.read == list(range(len(source)))
    assert validator.kept.resident == 3  # the third is too large; the fourth fits
    second = validator.run(StopRequest(), silent)
    assert source.read[len(source) :] == [2, 4, 5]
    assert first.cases == second.cases
    assert validator.kept._under_way == {}
    validator.close()
    assert validator.kept.resident == 0


def test_the_files_label_is_not_read_again_where_nothing_was_resampled(
    tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read_label = validation_cases.read_label

    def counting(case: Case, *arguments: object) -> tuple[np.ndarray, Grid]:
        reads.append(case.name)
        return read_label(case, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(validation_cases, "read_label", counting)
    affine = np.array([[0, -1.5, 0, 9], [0, 0, -1.4, 3], [1.2, 0, 0, 1], [0, 0, 0, 1]])
    label = np.random.default_rng(0).integers(0, 3, (9, 8, 7)).astype(np.uint8)
    for folder, values in (("images", label.astype(np.float32)), ("labels", label)):
        (tmp_path / folder).mkdir()
        nib.save(nib.Nifti1Image(values, affine), tmp_path / folder / "a.nii.gz")
    case = Case("a", (tmp_path / "images/a.nii.gz",), tmp_path / "labels/a.nii.gz")
    from fasttrain.data.caches import open_case_source
    from fasttrain.data.preprocess import Preprocess

    for more, read in (({"spacing": None}, []), ({"spacing": [2.0, 2.0, 2.0]}, ["a"]), ({"crop": 0.5}, ["a"])):
        crop = {"above": more["crop"], "margin": 0} if "crop" in more else None
        recipe = tiny(
            data__source={"kind": "folders"}, data__spacing=more.get("spacing"), data__crop_foreground=crop
        ).recipe
        source = open_case_source("none", [case], Preprocess(recipe, training=False), 1)
        kept = validation_cases.ValidationCases(source, [case], recipe, CPU, keep_labels=False)
        reads.clear()
        assert np.array_equal(kept.finished(0).reference.numpy(), label)
        assert reads == read


def test_a_stop_is_heard_between_the_windows_of_a_case(tiny: Callable) -> None:
    recipe = tiny(validation__grid="preprocessed", validation__window={"batch_size": 1}).recipe
    source, stop, told = Made(recipe), StopRequest(), []
    network = ShortOfMemory(network_of(recipe), set())
    validator = Validator(Predictor(network, recipe, PLAIN, CPU), source, source.cases, recipe, keep_labels=False)

    def progress(done: int, total: int) -> None:
        told.append(done)
        if done == 2:
            stop.ask("a test", 130)

    with pytest.raises(Stopped):
        validator.run(stop, progress)
    assert told == [1, 2]
    assert network.calls <= 3


GIB = 1 << 30


@pytest.mark.parametrize(
    ("room", "on_gpu"),
    [
        (Room(80 * GIB, 20 * GIB, True), True),
        (Room(80 * GIB, 60 * GIB, True), False),
        (Room(80 * GIB, 60 * GIB, False), True),
        (Room(80 * GIB, 0, False), True),
        (Room(6 * GIB, 0, False), False),
        (Room(7 * GIB, 8 * GIB, True), False),
    ],
)
def test_where_a_large_case_is_stitched_follows_from_what_training_leaves(
    room: Room, on_gpu: bool, tiny: Callable
) -> None:
    classes = {number: f"organ{number}" for number in range(1, 14)}
    recipe = tiny(**FOLDERS, patch__size=[128, 128, 128], data__classes=classes, training__batch_size=4).recipe
    shapes = [((200, 180, 90), (200, 180, 90)), ((512, 512, 400), (512, 512, 400))]
    found, stays, why = decide_stitching(recipe, shapes, room)
    assert found == on_gpu
    assert "the largest of 2 cases, [512, 512, 400], takes about" in why
    assert (stays > 0) == (on_gpu and room.lasting > case_bytes(*shapes[1], recipe) + batch_bytes(recipe, room.step))
    assert on_gpu or "the host's" in why


def test_a_slab_is_what_counts_of_a_large_case(tiny: Callable) -> None:
    classes = {number: f"organ{number}" for number in range(1, 14)}
    recipe = tiny(**FOLDERS, patch__size=[96, 96, 96], data__classes=classes).recipe
    shape = (512, 512, 400)
    whole = 4 * 14 * 512 * 512 * 400
    assert case_bytes(shape, shape, recipe) < 0.6 * whole
    small = (36, 52, 36)
    assert case_bytes(small, small, recipe) < GIB


def test_shapes_come_from_the_header(tiny: Callable, tmp_path: Path) -> None:
    recipe = tiny(data__spacing=[2.0, 2.0, 4.0]).recipe
    nib.save(nib.Nifti1Image(np.zeros((21, 30, 9), np.float32), np.diag([1.0, 2.0, 4.0, 1])), tmp_path / "a.nii.gz")
    assert shapes_of(Case("a", (tmp_path / "a.nii.gz",), None), recipe) == ((11, 30, 9), (21, 30, 9))


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_before_the_counts_are_read(tiny: Callable) -> None:
    recipe = tiny(validation__grid="preprocessed", acceleration__cuda_graphs="off", validation__mirror=[0]).recipe
    device = torch.device("cuda:0")
    predictor = Predictor(network_of(recipe).to(device), recipe, Precision("cuda", torch.bfloat16, None), device)
    source = Made(recipe)
    validator = Validator(predictor, source, source.cases, recipe, keep_labels=False)
    validator.kept.resident_bytes = GIB
    first = validator.run(StopRequest(), silent)
    read: list[int] = []
    tolist = Tensor.tolist

    def counting(tensor: Tensor) -> object:
        read.append(1)
        torch.cuda.set_sync_debug_mode("default")
        return tolist(tensor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "tolist", counting)
        torch.cuda.set_sync_debug_mode("error")
        try:
            second = validator.run(StopRequest(), silent)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(read) == 1
    same(first.cases, second.cases)


@pytest.mark.gpu
@pytest.mark.parametrize("grid", ["preprocessed", "original"])
@pytest.mark.parametrize("stitched", ["gpu", "cpu"])
def test_a_gpu_scores_as_a_cpu_does(grid: str, stitched: str, tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny(validation__grid=grid, validation__mirror=[0, 1], acceleration__cuda_graphs="on").recipe
    torch.backends.cudnn.allow_tf32 = False
    scores = []
    for device in (CPU, torch.device("cuda:0")):
        source = Made(recipe, 0.7)
        predictor = Predictor(network_of(recipe).to(device), recipe, Precision(device.type, None, None), device)
        predictor.stitch_device = CPU if stitched == "cpu" else device
        validator = Validator(predictor, source, source.cases, recipe, keep_labels=False)
        generator = torch.Generator().manual_seed(2)
        references = [
            torch.randint(0, recipe.data.class_count, one.source_grid.shape, generator=generator, dtype=torch.uint8)
            if grid == "original"
            else one.label[0]
            for one in source.samples
        ]
        monkeypatch.setattr(validator.kept, "reference", lambda index, sample, made=references: made[index])
        scores.append(validator.run(StopRequest(), silent))
    for one, other in zip(*(score.cases for score in scores), strict=True):
        for mine, its in zip(one.classes, other.classes, strict=True):
            assert mine.dice == pytest.approx(its.dice, abs=2e-3)
