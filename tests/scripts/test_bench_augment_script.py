"""The bench of batched augmentation against MONAI's transforms, in its short form on the CPU."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "augment.py"


def test_both_are_measured_and_their_ratio_is_that_of_their_times() -> None:
    small = [
        "--device",
        "cpu",
        "--shape",
        "14",
        "16",
        "12",
        "--batch",
        "2",
        "--repeats",
        "3",
        "--batches",
        "1",
        "--label",
    ]
    done = subprocess.run([sys.executable, SCRIPT, *small], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (\S+), .*? \| ([\d.]+) \| ±\d+% \| ([\d.]+) \|", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["MONAI", "fasttrain"]
    (_, theirs, one), (_, ours, ratio) = rows
    assert float(one) == 1.0
    assert abs(float(ratio) - float(theirs) / float(ours)) < 0.11
    assert "torch" in done.stdout.splitlines()[0]
    assert re.search(r"^draw and table on the host: \d+ µs a batch; copy: \d+ GB/s$", done.stdout, re.MULTILINE)
