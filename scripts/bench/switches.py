"""What each acceleration gives on this machine: the recipe as the machine decides it, with one switch changed at a time.

    python scripts/bench/switches.py --recipe hippocampus --data DIR [--set KEY=VALUE]… [--repeats 3] [--out FOLDER]

Every setting is trained `--repeats` times in turn in one process, so that imports count for none of them. Printed are medians:
patches/s over all epochs but the first, the most memory (on a GPU what tensors took, on a CPU what the trainer's process held,
its libraries among it, without its workers), and the seconds from the call to the end of the
first step (reading the cases and, where it is on, compiling among them). `plain` has every acceleration off.
"""

from __future__ import annotations

import argparse
import csv
import gc
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fasttrain.errors import FasttrainError

ONE_CHANGED: dict[str, dict[str, Any]] = {
    "auto": {},
    "amp off": {"acceleration.amp": "off"},
    "channels_last off": {"acceleration.channels_last": "off"},
    "channels_last on": {"acceleration.channels_last": "on"},
    "tf32 off (amp off)": {"acceleration.amp": "off", "acceleration.tf32": "off"},
    "fused_layers off": {"acceleration.fused_layers": "off"},
    "cuda_graphs off": {"acceleration.cuda_graphs": "off"},
    "compile on": {"acceleration.compile": "on"},
    "compile on, channels_last on": {"acceleration.compile": "on", "acceleration.channels_last": "on"},
    "activation_checkpointing on": {"acceleration.activation_checkpointing": "on"},
    "fused_optimizer off": {"acceleration.fused_optimizer": "off"},
    "cache memory": {"data.cache.kind": "memory"},
    "cache none": {"data.cache.kind": "none"},
    "cache disk": {"data.cache.kind": "disk"},
    "cache lmdb": {"data.cache.kind": "lmdb"},
    "cache smart (half)": {"data.cache.kind": "smart", "data.cache.cache_share": 0.5},
    # Of volumes on the host: the GPU cuts its patches itself
    "workers 0": {"data.cache.kind": "memory", "data.workers": 0},
    "workers 2": {"data.cache.kind": "memory", "data.workers": 2},
    "worker threads": {"data.cache.kind": "memory", "data.worker_kind": "thread"},
    "pin_memory off": {"data.cache.kind": "memory", "data.pin_memory": "off"},
    "copy_stream off": {"data.cache.kind": "memory", "data.copy_stream": "off"},
}
PLAIN = {
    "acceleration.amp": "off",
    "acceleration.channels_last": "off",
    "acceleration.tf32": "off",
    "acceleration.fused_layers": "off",
    "acceleration.cuda_graphs": "off",
    "acceleration.compile": "off",
    "acceleration.fused_optimizer": "off",
    "data.cache.kind": "none",
    "data.workers": 0,
    "data.pin_memory": "off",
    "data.copy_stream": "off",
}


def main() -> None:
    options = _options()
    import torch

    from fasttrain.engine.planning.choices import missing_for_compile
    from fasttrain.recipe import yaml_text

    given = {key: yaml_text.parse(value, key) for key, _, value in (text.partition("=") for text in options.set)}
    settings = {"plain": PLAIN, **ONE_CHANGED}
    if options.only:
        settings = {name: settings[name] for name in options.only}
    if missing_for_compile() is not None or options.device == "cpu":
        settings = {name: one for name, one in settings.items() if "compile on" not in name}
    folder = Path(tempfile.mkdtemp(prefix="switches-"))
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in settings}
    try:
        for repeat in range(options.repeats):
            for name, changed in settings.items():
                try:
                    row = _measure(
                        options, folder / f"{repeat}-{len(rows[name])}-{name.replace(' ', '_')}", {**given, **changed}
                    )
                except FasttrainError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                rows[name].append(row)
                print(
                    f"{name} #{repeat + 1}: {row[0]:.1f} patches/s, {row[1]:.2f} GiB, {row[2]:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    card = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available() and options.device != "cpu"
        else platform.processor() or "CPU"
    )
    print(
        f"{options.recipe} on {card}, torch {torch.__version__}, median of {options.repeats}: {' '.join(sys.argv[1:])}"
    )
    _print(rows, options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="hippocampus")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4, help="of which the first is not counted")
    parser.add_argument("--steps", type=int, default=60, help="an epoch")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, help="folder for switches.csv")
    return parser.parse_args()


def _measure(options: argparse.Namespace, run: Path, changed: dict[str, Any]) -> tuple[float, float, float]:
    import torch

    from fasttrain import load_recipe, train

    recipe = load_recipe(
        options.recipe,
        {
            # Few volumes to validate: it is the training that is measured
            "data.split": {"kind": "last", "validation": 2},
            "validation.mirror": [],
            "data.cache.folder": str(run.parent / "volumes"),
            "training.epochs": options.epochs,
            "training.iterations_per_epoch": options.steps,
            "validation.every": options.epochs,
            "output.plots": False,
            "output.pictures": "off",
            **changed,
        },
    )
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew (proc(5))
    result = train(recipe, data=options.data, run=run, device=options.device, began=time.time())
    with open(run / "metrics.csv", newline="") as stream:
        rates = [float(row["patches_per_second"]) for row in csv.DictReader(stream)]
    peak = torch.cuda.max_memory_allocated() / (1 << 30) if on_gpu else _peak_resident_gib()
    return statistics.median(rates[1:]), peak, result.summary["seconds"]["to_first_step"]


def _peak_resident_gib() -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / (1 << 20)


def _print(rows: dict[str, list[tuple[float, float, float]]], out: Path | None) -> None:
    medians = {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in rows.items() if found}
    base = medians.get("auto")
    table = [("setting", "patches/s", "spread", "of auto", "memory GiB", "s to first step")]
    for name, (rate, peak, begun) in medians.items():
        rates = [found[0] for found in rows[name]]
        share = f"{rate / base[0]:.2f}" if base else ""
        table.append((name, f"{rate:.1f}", f"{min(rates):.1f}–{max(rates):.1f}", share, f"{peak:.2f}", f"{begun:.1f}"))
    for number, row in enumerate(table):
        print("| " + " | ".join(row) + " |")
        if number == 0:
            print("|" + "---|" * len(row))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "switches.csv", "w", newline="") as stream:
            csv.writer(stream).writerows(table)


if __name__ == "__main__":
    main()
