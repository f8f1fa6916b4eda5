"""Proves that `doctor` and `train` do the right thing whatever the NVIDIA driver's library and CUDA_VISIBLE_DEVICES say.

    python scripts/acceptance/driver_states.py

Where torch has no GPU, a stand-in for the library (tests/fake_nvml) shows two cards, raises when it is opened, hangs, answers
with nonsense or is absent; where torch has one, the real library is used and the card is named by index and by UUID, in full and
short. Each state is a row: what `doctor` and `train --recipe demo` ended with, and the run's figures of the GPU, which must be
empty and never zero where no GPU trained, and those of the run's own card where one did. One more row has no /proc, where
mounts can be undone here, and one a limit of address space.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests")]

import fake_cards  # noqa: E402

SMALL = [
    "data.source.cases=4", "data.split.validation=1", "data.spacing=[5,5,5]", "data.workers=0", "patch.size=[16,16,16]",
    "network.features=[4,8,8]", "network.strides=[2,2]", "training.epochs=1", "training.iterations_per_epoch=4",
    "acceleration.amp=off", "acceleration.channels_last=off", "output.plots=false", "output.pictures=off",
]  # fmt: skip
PASSED_OVER = "training runs on the CPU (mend: "


@dataclass(frozen=True)
class Case:
    """One state. `gpu`: the state of doctor's finding of that name, None: there is a GPU and no such finding; `says`: what train
    says on stderr, and with an exclamation mark what it does not; `figures`: whether the run has figures of a GPU.
    """

    name: str
    doctor_code: int
    gpu: str | None
    environ: Mapping[str, str] = field(default_factory=dict)
    says: str = "!" + PASSED_OVER
    figures: bool = False
    before: str = ""


def without_gpu() -> list[Case]:
    """With the stand-in, on a torch that has no GPU."""

    def case(
        name: str, code: int, gpu: str, visible: str | None = None, says: str = "!" + PASSED_OVER, **fake: object
    ) -> Case:
        environ = {"FAKE_NVML": fake_cards.settings(**fake)}  # type: ignore[arg-type]
        return Case(name, code, gpu, environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}), says)

    cases = [
        case(f"two cards, {visible}", 4, "fault", visible, PASSED_OVER)
        for visible in (None, "1,0", fake_cards.SECOND, "GPU-bbbb")
    ]
    cases += [case("two cards, 7", 4, "fault", "7", PASSED_OVER)]
    cases += [case(f"two cards, {visible!r}", 0, "warning", visible) for visible in ("", "-1", " -1", "NoDevFiles")]
    cases += [case("a MIG instance", 4, "fault", fake_cards.INSTANCES[1], PASSED_OVER, cards=fake_cards.SPLIT)]
    cases += [case(f"the library {how}", 0, "warning", init=how) for how in ("absent", "raises", "odd", "hangs")]
    cases += [case("nonsense for figures", 4, "fault", None, PASSED_OVER, figures="nonsense")]
    cases += [Case("a limit of address space", 0, "warning", before="ulimit -v 6000000; ")]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0:
        cases += [Case("no /proc", 0, "warning", before="umount -l /proc; ")]
    return cases


def with_gpu(uuids: Sequence[str]) -> list[Case]:
    """With the real library: each card by index and UUID, and hidden."""
    names = [str(index) for index in range(len(uuids))]
    names += [name for uuid in uuids for name in (f"GPU-{uuid}", f"GPU-{uuid[:13]}")]
    names += [",".join(reversed(names[: len(uuids)]))] if len(uuids) > 1 else []
    cases = [Case(f"card {name}", 0, None, {"CUDA_VISIBLE_DEVICES": name}, figures=True) for name in names]
    cases += [Case(f"hidden by {text!r}", 0, "warning", {"CUDA_VISIBLE_DEVICES": text}) for text in ("", "-1")]
    absent = {"FAKE_NVML": json.dumps({"init": "absent"})}
    return [*cases, Case("no library", 0, None, absent)]


def command(case: Case, base: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """fasttrain with `arguments` in the state of a case."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    paths = [str(CHECKOUT), *([str(fake_cards.FOLDER)] if "FAKE_NVML" in case.environ else [])]
    environ |= {**case.environ, "PYTHONPATH": os.pathsep.join(paths), "FASTTRAIN_CACHE": str(base / "cache")}
    whole = [sys.executable, "-m", "fasttrain", *arguments]
    if case.before:
        whole = ["sh", "-c", f'{case.before}exec "$@"', "sh", *whole]
    if "umount" in case.before:
        whole = ["unshare", "-m", *whole]
    return subprocess.run(whole, capture_output=True, text=True, timeout=300, cwd=base, env=environ)


def proves(case: Case, base: Path) -> str:
    """Runs both commands; gives the row of the table, and raises AssertionError where something is not right."""
    began = time.monotonic()
    examined = command(case, base, "doctor", "--json")
    seconds = time.monotonic() - began
    document = json.loads(examined.stdout)
    found = {one["name"]: one for one in document["findings"]}
    faults = [one for one in document["findings"] if one["state"] == "fault"]
    assert examined.returncode == document["exit_code"] == case.doctor_code, faults
    assert (found["gpu"]["state"] if "gpu" in found else None) == case.gpu, found.get("gpu")
    assert all(one["mend"] for one in faults), faults
    run = base / "run"
    shutil.rmtree(run, ignore_errors=True)
    trained = command(
        case, base, "train", "--recipe", "demo", "--run", str(run), *[part for one in SMALL for part in ("--set", one)]
    )
    assert trained.returncode == 0, trained.stderr
    text = case.says.removeprefix("!")
    assert (text in trained.stderr) is (not case.says.startswith("!")), trained.stderr
    (row,) = csv.DictReader((run / "metrics.csv").open(encoding="utf-8"))
    figures = (row["gpu_util"], row["gpu_gib"])
    if case.figures:
        # Of a run of seconds the driver may not have counted a kernel yet, but its memory it has
        assert 0 <= float(figures[0]) <= 1, figures
        assert float(figures[1]) > 0, figures
    else:
        assert figures == ("", ""), figures
    shown = ", ".join(one or "empty" for one in figures)
    return f"| {case.name} | {examined.returncode}, gpu {case.gpu or 'ok'} | {seconds:.1f} | {trained.returncode} | {shown} |"


def main() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    base = Path(tempfile.mkdtemp(prefix="driver-states-"))
    try:
        rows = [proves(case, base) for case in (with_gpu(uuids) if uuids else without_gpu())]
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print("| state | doctor | s | train | gpu_util, gpu_gib |")
    print("|---|---|---|---|---|")
    print("\n".join(rows))
    return rows


if __name__ == "__main__":
    main()
