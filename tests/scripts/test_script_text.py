"""The scripts as texts: valid bash, clean to shellcheck, no addresses; and constraints that cover what is installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCED = [ROOT / "scripts" / "runpod" / "pod_settings.sh"]
FOUND = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch"), ROOT / ".ci" / "run"]
SCRIPTS = sorted(path for path in FOUND if path not in SOURCED)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_strict_and_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    assert "://" not in text


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([shellcheck, "-x", *SCRIPTS, *SOURCED], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_constraints_pin_every_dependency_and_development_tool() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (dependencies,) = re.findall(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    (section,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", project, re.DOTALL | re.MULTILINE)
    wanted = [name for name in re.findall(r'"([A-Za-z0-9._-]+)', dependencies + section) if name != "fasttrain"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line.split("==")[0] for line in lines if line and not line.startswith("#")]
    assert sorted(pinned) == sorted(wanted)
    assert all(
        re.fullmatch(r'[\w.-]+==[\w.]+(; python_version >= "3\.\d+")?', line) for line in lines if line[0] != "#"
    )
