"""Batches of a GPU cache of several cards: a copy of the set on each, a part on each, and all of it streamed from the host.

    torchrun --standalone --nproc-per-node 2 scripts/bench/sharded_cache.py [--cases 16] [--shape 256 256 112]
        [--size 96 96 96] [--batch 16] [--seconds 3] [--busy-ms 20] [--device cuda] [--set KEY=VALUE]

Volumes are made noise in float16 (no files); the recipe is `spleen` with flips, rotation, noise and gamma. `alone` is drawing,
cutting and augmenting; `beside a step` is the same with --busy-ms of matrix products after each batch, as a step would follow,
beside the rate of these without any data. The first batches of each kind are compared, to the bit, with those of a copy each.
Prints patches/s of all cards together.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch

from fasttrain import load_recipe
from fasttrain.batches import Order, Resident, ResidentSource, fill
from fasttrain.batches.device_room import voxel_bytes
from fasttrain.data.caches import MadeTogether, made_together
from fasttrain.data.preprocess import Preprocess
from fasttrain.machine.place import place
from fasttrain.machine.ranks import Ranks, join
from fasttrain.recipe import Recipe
from fasttrain.samples import Batch, Case

AUGMENTED = {
    "data.storage_dtype": "float16",
    "augment.flip": {"probability": 0.5},
    "augment.rotate": {"probability": 0.3, "degrees": 15},
    "augment.noise": {"probability": 0.15},
    "augment.gamma": {"probability": 0.3},
}


class Made(Preprocess):
    """Makes the record of a case from its number."""

    def __init__(self, recipe: Recipe, shape: tuple[int, ...]) -> None:
        super().__init__(recipe)
        self._shape = shape

    def __call__(self, case: Case) -> dict[str, Any]:
        draw = np.random.default_rng(int(case.name))
        image = torch.from_numpy(draw.standard_normal((1, *self._shape), np.float32)).half()
        label = (image.float() > 1.5).to(torch.uint8)
        grid = torch.eye(4, dtype=torch.float64)
        return {
            "name": case.name, "image": image, "label": label, "background_centres": None,
            "centres": [label.flatten().nonzero().flatten()[:1000].int()], "filled": None,
            "shape": list(self._shape), "affine": grid, "source_shape": list(self._shape), "source_affine": grid,
        }  # fmt: skip


def filled(
    recipe: Recipe, options: argparse.Namespace, ranks: Ranks, device: torch.device, kind: str
) -> tuple[Resident, float]:
    """The set as `kind` keeps it, and the seconds it took."""
    cases = [Case(str(number), (), None) for number in range(options.cases)]
    whole = options.cases * int(np.prod(options.shape)) * voxel_bytes(recipe)
    one = whole // options.cases
    room = {"a copy each": whole, "a part each": whole // ranks.place.local_ranks + one, "from the host": 0}[kind]
    source = made_together(cases, Made(recipe, tuple(options.shape)), ranks)
    assert isinstance(source, MadeTogether)
    began = time.perf_counter()
    told: list[str] = []
    sharing = ranks if kind == "a part each" else None
    resident = fill(source, recipe, device, room, 4, None, lambda text, level: told.append(text), sharing)
    ranks.gather(None)
    if ranks.place.leads:
        print(f"{kind}: {'; '.join(told)}", flush=True)
    return resident, time.perf_counter() - began


def busy_for(milliseconds: float, device: torch.device) -> Callable[[], None]:
    """Matrix products that take the device so long."""
    if not milliseconds:
        return lambda: None
    size = 4096 if device.type == "cuda" else 256
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    out = torch.empty_like(one)

    def times(count: int) -> float:
        settle(device)
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(one, one, out=out)
        settle(device)
        return time.perf_counter() - began

    times(20)
    count = max(1, round(milliseconds / 1e3 / (times(50) / 50)))

    def busy() -> None:
        for _ in range(count):
            torch.mm(one, one, out=out)

    return busy


def settle(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(batches: Any, seconds: float, ranks: Ranks, device: torch.device, busy: Callable[[], None]) -> float:
    """Patches a second of all ranks, each of which takes as many batches."""
    step = lambda: (next(batches), busy())  # noqa: E731
    for _ in range(5):
        step()
    settle(device)
    ranks.gather(None)
    began = time.perf_counter()
    for _ in range(10):
        step()
    settle(device)
    count = max(ranks.share(round(10 * seconds / (time.perf_counter() - began))), 5)
    ranks.gather(None)
    began, patches = time.perf_counter(), 0
    for _ in range(count):
        batch: Batch = step()[0]
        patches += len(batch.names)
    settle(device)
    took = time.perf_counter() - began
    return float(sum(ranks.gather(patches)) / max(ranks.gather(took)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--shape", type=int, nargs=3, default=[256, 256, 112])
    parser.add_argument("--size", type=int, nargs=3, default=[96, 96, 96])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--busy-ms", type=float, default=20.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    seat = place(os.environ)
    device = torch.device(f"cuda:{seat.local_rank}" if options.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        print(f"rank {seat.rank}: {torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    ranks = join(seat, device)
    values = {**AUGMENTED, "patch.size": list(options.size), "training.batch_size": options.batch}
    values |= dict(one.split("=", 1) for one in options.set)
    recipe = load_recipe("spleen", values).recipe
    order = Order(options.cases, recipe.data.samples_per_case, 0)
    first: list[Batch] = []
    alone_with_a_step: float | None = None
    for kind in ("a copy each", "a part each", "from the host"):
        resident, seconds = filled(recipe, options, ranks, device, kind)
        source = ResidentSource(recipe, resident, order, device, 4, seat)
        batches = source.batches(0)
        made = list(islice(batches, 3))
        if kind == "a copy each":
            first = made
        else:
            equal = all(
                one.names == two.names and torch.equal(one.image, two.image) and torch.equal(one.label, two.label)
                for one, two in zip(first, made, strict=True)
            )
            equal = all(ranks.gather(equal))
        busy = busy_for(options.busy_ms, device)
        alone = rate(batches, options.seconds, ranks, device, lambda: None)
        beside = rate(batches, options.seconds, ranks, device, busy)
        if kind == "a copy each":
            began = time.perf_counter()
            for _ in range(50):
                busy()
            settle(device)
            alone_with_a_step = 50 * options.batch * seat.ranks / max(ranks.gather(time.perf_counter() - began))
        if seat.leads:
            same = "" if kind == "a copy each" else f", bits {'as' if equal else 'NOT AS'} with a copy each"
            print(
                f"{kind}: {alone:,.0f} patches/s alone, {beside:,.0f} beside a step (without data {alone_with_a_step:,.0f})"
                f"; filled in {seconds:.1f} s{same}",
                flush=True,
            )
        source.close()
        del batches, source, resident, made
        ranks.gather(None)
    ranks.close()


if __name__ == "__main__":
    main()
