"""The proof that killed fills leave no wrong tensor, in its short form: real processes, and two kills of one kind of cache.

Both kinds are killed ten times in tests/data/test_data_cache_processes.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "acceptance" / "cache_kill.py"


@pytest.mark.slow
def test_tensors_are_right_after_every_kill() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kinds", "disk", "--kills", "2", "--cases", "8"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if "all equal" in line]
    assert [(row[0].strip("| "), row[1]) for row in rows] == [
        ("disk", "1"),
        ("disk", "2"),
    ]
    assert all(row[3].endswith("of 8") for row in rows)
