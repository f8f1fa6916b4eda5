"""What checkpoints cost a training: the same steps with and without saving a large state every so many seconds.

    python scripts/bench/saving.py [--size 500] [--every 10] [--seconds 20] [--repeats 2] [--device auto] [--folder DIR]

The bundled phantom is trained with a DynUNet whose state (weights and AdamW's two values of each) takes `--size` MB, by the
trainer and the saver that `fasttrain train` has. Windows of `--seconds` without and with saving take turns, with a save at the
begin of a window and every `--every` seconds from there. Printed are steps a second of both, what saving takes off them, how long
the training stood still by its own count (the host's copying and waiting, and the GPU's copies), and how long a write took. The
first save, which also allocates the memory of the copies, is told apart. A trial on a CPU: `--size 20 --every 2 --seconds 6
--device cpu`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fasttrain.engine.build import Assembly, build, prepare_torch
from fasttrain.engine.outline import outline_of
from fasttrain.engine.preparing import prepare
from fasttrain.engine.saving import Saver
from fasttrain.recipe import ResolvedRecipe, resolve
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.events import CheckpointSaved, Event

_BYTES_OF_A_WEIGHT = 12
_LOG_EVERY = 10


def main() -> None:
    options = _options()
    recipe = _recipe_of_size(options).recipe
    prepared = prepare(recipe, options.folder / "data", options.device, lambda event: None)
    plan, hardware = prepared.plan, prepared.hardware
    prepare_torch(plan, hardware)
    assembly = build(recipe, plan, hardware, prepared.split, lambda what, done, total: None, lambda text, level: None)
    folder = RunFolder(options.folder / "run")
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    saves: list[CheckpointSaved] = []

    def heard(event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            saves.append(event)

    saver = Saver(folder, recipe.output, assembly.state, heard, lambda: 0.0)
    steps = iter(assembly.trainer.steps())
    try:
        for _ in range(20):
            next(steps)
        saver.save_last()
        saver.finish()
        first = saves.pop()
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.repeats):
            for saving in (False, True):
                rates[saving].append(
                    _rate(assembly, steps, saver if saving else None, options.seconds, hardware.on_gpu)
                )
                saver.finish()
    finally:
        assembly.close()
    print(
        f"{hardware.device_name}, torch {torch.__version__}; a state of {first.mib * 1.048576:.0f} MB every {options.every:g} s"
    )
    print(f"first save: {first.seconds:.2f} s to write, the training stood still {first.pause_seconds * 1e3:.0f} ms")
    without, with_saves = (statistics.median(rates[saving]) for saving in (False, True))
    for name, found in (("without saving", rates[False]), ("with saving", rates[True])):
        print(f"{name:<15} {statistics.median(found):8.2f} steps/s  ({', '.join(f'{rate:.2f}' for rate in found)})")
    pauses = [save.pause_seconds for save in saves]
    stood = sum(pauses) / (options.repeats * options.seconds)
    print(
        f"{len(saves)} saves: {statistics.median(save.seconds for save in saves):.2f} s to write, the training stood still "
        f"{statistics.median(pauses) * 1e3:.0f} ms (at most {max(pauses) * 1e3:.0f} ms), {stood:.2%} of its time"
    )
    print(f"saving costs {1 - with_saves / without:.2%} of the steps")


def _rate(assembly: Assembly, steps: object, saver: Saver | None, seconds: float, on_gpu: bool) -> float:
    """Steps a second of a window, as `Fit` takes them."""
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    began, taken = time.perf_counter(), 0
    if saver is not None:
        saver.save_last()
    while time.perf_counter() - began < seconds:
        next(steps)  # type: ignore[call-overload]
        taken += 1
        if taken % _LOG_EVERY == 0:
            assembly.trainer.settle()
        if saver is not None:
            if saver.due_within_epoch():
                assembly.trainer.settle()
                saver.renew_last()
            saver.poll()
    wait()
    return taken / (time.perf_counter() - began)


def _recipe_of_size(options: argparse.Namespace) -> ResolvedRecipe:
    """The demo with a network as wide at its deepest stage as the size asks for."""
    small = options.size < 100
    features, patch = ([4, 8], [16, 16, 16]) if small else ([32, 64, 128, 256], [64, 64, 64])
    low, high = 8, 8192
    while high - low > 2:
        middle = (low + high) // 2
        resolved = _resolved(options, [*features, middle], patch)
        if outline_of(resolved.recipe).parameters * _BYTES_OF_A_WEIGHT < options.size * 1e6:
            low = middle
        else:
            high = middle
    return _resolved(options, [*features, high], patch)


def _resolved(options: argparse.Namespace, features: list[int], patch: list[int]) -> ResolvedRecipe:
    sets = [
        f"patch.size={patch}",
        f"network.features={features}",
        f"network.strides={[2] * (len(features) - 1)}",
        "training.batch_size=4",
        "training.ema=null",
        "training.iterations_per_epoch=1000000",
        "optimizer={kind: adamw, learning_rate: 0.00001}",
        f"output.checkpoint_every={options.every:g}s",
    ]
    return resolve("demo", sets)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", type=float, default=500.0, help="MB")
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    options.folder = options.folder or Path(tempfile.mkdtemp(prefix="saving-"))
    return options


if __name__ == "__main__":
    main()
