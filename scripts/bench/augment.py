"""Affine, mirroring, noise, blur and gamma, each of every patch: a whole batch at once against MONAI's transforms one by one.

    python scripts/bench/augment.py [--shape 96 96 96] [--batch 16] [--repeats 7] [--batches 5] [--device cuda] [--profile]

Both begin with patches that lie on the device. The peer is a Compose of RandAffine, RandFlip, RandGaussianNoise,
RandGaussianSmooth and RandAdjustContrast, called patch by patch on the image alone, or with --label on image and label. Ours
draws, cuts with the affine map and mirroring in one pass (image and label), and changes intensities by a table; `in a graph` is
one CUDA graph of all launches, replayed with the numbers of batches that were drawn before. Bytes are those that the passes need:
read and write of image and label in the cut, and of the image in each pass after it. Prints milliseconds a batch, their ratio,
GB/s and its share of what a copy within the device reaches in the same call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import monai
import numpy as np
import torch
from monai import transforms

from fasttrain.augment import Augmenter, Chances
from fasttrain.augment.technique import sent
from fasttrain.kernels.patches import Volumes, cut
from fasttrain.kernels.rows import kernels_take
from fasttrain.recipe.augment_spec import AugmentSpec

DEGREES = 15.0
SECTION: dict[str, Any] = {
    "rotate": {"probability": 1.0, "degrees": DEGREES},
    "scale": {"probability": 1.0, "low": 0.85, "high": 1.15},
    "flip": {"probability": 1.0, "axes": [0]},
    "noise": {"probability": 1.0, "std": 0.1},
    "blur": {"probability": 1.0, "low": 0.5, "high": 1.0},
    "gamma": {"probability": 1.0, "low": 0.7, "high": 1.5},
}
PASSES = 5
"""Over the image after the cut: noise, blur along three axes (whose last takes the moments), gamma."""


class Ours:
    """Volumes of the patches' own size, so that the cut moves what the peer's affine transform moves."""

    def __init__(self, image: torch.Tensor, label: torch.Tensor) -> None:
        self.size = tuple(image.shape[2:])
        self.count = len(image)
        voxels = image[0, 0].numel()
        device = image.device
        self.volumes = Volumes(
            image.movedim(1, -1).reshape(-1).contiguous(),
            label.reshape(-1).contiguous(),
            torch.arange(self.count, device=device) * voxels,
            torch.tensor([self.size] * self.count, dtype=torch.int32, device=device),
            1,
        )
        self.cases = torch.arange(self.count, dtype=torch.int32, device=device)
        self.corners = torch.zeros((self.count, 3), dtype=torch.int32, device=device)
        self.augmenter = Augmenter(AugmentSpec.model_validate(SECTION))
        self.device = device
        self.position = 0

    def drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices and the table of the next batch, on the host."""
        chances = Chances(0, np.arange(self.position, self.position + self.count))
        self.position += self.count
        draws = self.augmenter.draw(3, 1, chances)
        matrix, _ = self.augmenter.linear(draws, self.count, self.size)
        return matrix, self.augmenter.table(draws, 1, self.size)

    def batch(self) -> torch.Tensor:
        """Draws, sends and applies."""
        matrix, table = (sent(one, self.device) for one in self.drawn())
        return self.applied(matrix, table)

    def applied(self, matrix: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """What runs on the device."""
        image, _ = cut(self.volumes, self.cases, self.corners, matrix, self.size)
        return self.augmenter.apply_table(image, table)

    def captured(self) -> Callable[[], None]:
        """Sends what was drawn before, and replays a graph."""
        prepared = [tuple(one.pin_memory() for one in self.drawn()) for _ in range(8)]
        matrix, table = (sent(one, self.device) for one in self.drawn())
        self.applied(matrix, table)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.applied(matrix, table)

        def replay() -> None:
            prepared.append(prepared.pop(0))
            matrix.copy_(prepared[0][0], non_blocking=True)
            table.copy_(prepared[0][1], non_blocking=True)
            graph.replay()

        return replay


class Peer:
    """MONAI's transforms patch by patch."""

    def __init__(self, image: torch.Tensor, label: torch.Tensor, with_label: bool) -> None:
        self.image, self.label, self.with_label = image, label.float(), with_label
        turn, zoom, device = np.deg2rad(DEGREES), 0.15, image.device
        sigma = (0.5, 1.0)
        if with_label:
            both = ["image", "label"]
            self.transform = transforms.Compose(
                [
                    transforms.RandAffined(
                        both, prob=1.0, rotate_range=(turn,) * 3, scale_range=(zoom,) * 3, device=device,
                        mode=("bilinear", "nearest"), padding_mode="border",
                    ),
                    transforms.RandFlipd(both, prob=1.0, spatial_axis=0),
                    transforms.RandGaussianNoised("image", prob=1.0, std=0.1),
                    transforms.RandGaussianSmoothd("image", sigma, sigma, sigma, prob=1.0),
                    transforms.RandAdjustContrastd("image", prob=1.0, gamma=(0.7, 1.5)),
                ]
            )  # fmt: skip
            return
        self.transform = transforms.Compose(
            [
                transforms.RandAffine(
                    prob=1.0, rotate_range=(turn,) * 3, scale_range=(zoom,) * 3, device=device, padding_mode="border"
                ),
                transforms.RandFlip(prob=1.0, spatial_axis=0),
                transforms.RandGaussianNoise(prob=1.0, std=0.1),
                transforms.RandGaussianSmooth(sigma, sigma, sigma, prob=1.0),
                transforms.RandAdjustContrast(prob=1.0, gamma=(0.7, 1.5)),
            ]
        )

    def batch(self) -> torch.Tensor:
        """All patches of the batch."""
        made = []
        for image, label in zip(self.image, self.label, strict=True):
            if self.with_label:
                made.append(self.transform({"image": image, "label": label})["image"])
            else:
                made.append(self.transform(image))
        return torch.stack(made)


def measure(work: Callable[[], Any], batches: int, repeats: int, device: torch.device) -> tuple[float, float]:
    """Seconds a batch by the wall clock, device's work included: the median of the repeats, and their spread."""
    work()
    work()
    found = []
    for _ in range(repeats):
        await_device(device)
        began = time.perf_counter()
        for _ in range(batches):
            work()
        await_device(device)
        found.append((time.perf_counter() - began) / batches)
    middle = statistics.median(found)
    return middle, (max(found) - min(found)) / middle


def await_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def copy_rate(device: torch.device, repeats: int) -> float:
    """Bytes a second that a copy within the device reads and writes."""
    count = (1 << 28) if device.type == "cuda" else (1 << 24)
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    seconds, _ = measure(lambda: target.copy_(source), 10, repeats, device)
    return 2 * source.nbytes / seconds


def report_kernels(work: Callable[[], Any], device: torch.device) -> None:
    """Microseconds a batch by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    await_device(device)
    with torch_profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            work()
        await_device(device)
    for event in sorted(seen.key_averages(), key=lambda one: -one.self_device_time_total)[:16]:
        print(f"   {event.self_device_time_total / 5:9.1f} µs {event.count // 5:3d}× {event.key[:100]}")


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    shape = (options.batch, 1, *options.shape)
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(shape, generator=generator).to(device)
    label = torch.randint(0, 3, shape, generator=generator, dtype=torch.uint8).to(device)
    card = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{card}, torch {torch.__version__}, MONAI {monai.__version__}, kernels {'Triton' if kernels_take(image) else 'torch'}"
    )
    print(f"{options.batch} × 1 × {' × '.join(map(str, options.shape))} float32, medians of {options.repeats} repeats")
    ours, peer = Ours(image, label), Peer(image, label, options.label)
    rows = [("MONAI, patch by patch", *measure(peer.batch, 1, options.repeats, device))]
    rows.append(("fasttrain, batch", *measure(ours.batch, options.batches, options.repeats, device)))
    if device.type == "cuda":
        rows.append(("fasttrain, in a graph", *measure(ours.captured(), options.batches, options.repeats, device)))
    theirs, rate = rows[0][1], copy_rate(device, options.repeats)
    moved = 2 * image.nbytes + 2 * label.nbytes + PASSES * 2 * image.nbytes
    print("| | ms a batch | spread | ratio | GB/s | of a copy's |\n|---|---|---|---|---|---|")
    for name, seconds, spread in rows:
        reached = "– | –" if name == rows[0][0] else f"{moved / seconds / 1e9:.0f} | {moved / seconds / rate:.0%}"
        print(f"| {name} | {seconds * 1e3:.3f} | ±{spread:.0%} | {theirs / seconds:.1f} | {reached} |")
    drawing, _ = measure(ours.drawn, 50, options.repeats, torch.device("cpu"))
    print(f"draw and table on the host: {drawing * 1e6:.0f} µs a batch; copy: {rate / 1e9:.0f} GB/s")
    if options.profile and device.type == "cuda":
        report_kernels(ours.batch, device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, default=[96, 96, 96])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--label", action="store_true", help="the peer moves labels too, as ours always does")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
