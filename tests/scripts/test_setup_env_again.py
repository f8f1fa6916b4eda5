"""The set-up script given again, with real environments and links: the environment on PATH, cut short, or linked to itself.

Nothing is downloaded: a pip of the test's own stands in, which puts torch and fasttrain in the environment's folder.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON3 = """#!/usr/bin/env bash
# The machine's Python: environments it makes have a pip that needs no network
if [[ "$1 $2" == "-m venv" ]]; then
  echo "$*" >>"$LOG/made"
  "REAL" "$@" --without-pip || exit
  [[ -z "${DIES_AFTER_CLEARING:-}" ]] || exit 1
  for folder; do :; done
  cp -r "$LOG/packages/." "$folder"/lib/python3*/site-packages/
  exit
fi
exec "REAL" "$@"
"""

PIP = """import os, pathlib, sys
log = pathlib.Path(os.environ["LOG"])
with (log / "pip").open("a") as stream:
    print(sys.executable, file=stream)
tool = pathlib.Path(sys.prefix, "bin", "fasttrain")
tool.write_text(f"#!{sys.executable}\\n")
tool.chmod(0o755)
"""


class Machine:
    """A checkout, a machine's own Python first on PATH, and a folder for the environment."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.log, self.bin = folder / "check out", folder / "log", folder / "bin"
        self.venv = folder / "volume" / "venv"
        for made in (self.checkout / "scripts" / "runpod", self.bin, self.venv.parent):
            made.mkdir(parents=True)
        for name in ("scripts/setup_env.sh", "scripts/runpod/pod_settings.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy2(ROOT / name, self.checkout / name)
        for name, text in (("pip/__main__", PIP), ("pip/__init__", ""), ("torch/__init__", "")):
            (self.log / "packages" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
            (self.log / "packages" / f"{name}.py").write_text(text)
        self.python = self.bin / "python3"
        self.python.write_text(PYTHON3.replace("REAL", os.path.realpath(sys.executable)))
        self.python.chmod(0o755)

    def run(self, *before: str, path: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs the script in a shell that ran `before`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FASTTRAIN", "PYTHON"))}
        settings = {
            "PATH": path or f"{self.bin}:/usr/bin:/bin",
            "LOG": str(self.log),
            "FASTTRAIN_SYSTEM_TORCH": "0",
            "FASTTRAIN_VOLUME": str(self.venv.parent),
            "V": str(self.venv),
        }
        text = "\n".join((*before, 'exec bash scripts/setup_env.sh "$V"'))
        return subprocess.run(
            ["bash", "-ec", text],
            cwd=self.checkout,
            env={**kept, **settings, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def noted(self, name: str) -> int:
        """How often an environment was `made`, or `pip` was called."""
        path = self.log / name
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    "before", ['source "$V/bin/activate"', "source scripts/runpod/pod_settings.sh", 'export PYTHON="$V/bin/python"']
)
def test_with_the_environment_active_it_is_up_to_date(machine: Machine, before: str) -> None:
    assert machine.run().returncode == 0
    kept = machine.venv / "of_a_running_training"
    kept.touch()
    again = machine.run(before)
    assert again.returncode == 0, again.stderr
    assert "is up to date" in again.stderr
    assert (machine.noted("made"), machine.noted("pip")) == (1, 1)
    # What has to be installed goes into the same environment
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert machine.run(before).returncode == 0
    assert (machine.noted("made"), machine.noted("pip")) == (1, 2)
    assert kept.exists()


def test_an_environment_without_a_note_of_its_interpreter_finds_that_on_path(machine: Machine) -> None:
    assert machine.run().returncode == 0
    stamp = machine.venv / ".fasttrain-setup"
    assert stamp.read_text().splitlines()[3] == str(machine.python)
    stamp.write_text("".join(stamp.read_text().splitlines(keepends=True)[:3]))
    assert "is up to date" in machine.run('source "$V/bin/activate"').stderr
    (machine.venv / ".fasttrain-setup").unlink()
    # And where there is none but its own, that is said, and nothing cleared
    nothing = machine.log / "few"
    nothing.mkdir()
    for tool in ("bash", "dirname", "basename", "readlink", "sed"):
        (nothing / tool).symlink_to(str(shutil.which(tool)))
    refused = machine.run(path=f"{machine.venv}/bin:{nothing}")
    assert refused.returncode == 4
    assert "is the environment's own, on which it cannot be built" in refused.stderr
    assert (machine.venv / "bin" / "fasttrain").exists()


@pytest.mark.parametrize("active", [False, True])
def test_after_an_installation_that_was_cut_short_one_more_time_is_enough(machine: Machine, active: bool) -> None:
    assert machine.run().returncode == 0
    cut = machine.run(FASTTRAIN_SYSTEM_TORCH="1", DIES_AFTER_CLEARING="1")
    assert cut.returncode == 4
    # Cleared as far as that: the settings of the environment are gone, and its python is not
    (machine.venv / "pyvenv.cfg").unlink()
    path = f"{machine.venv}/bin:{machine.bin}:/usr/bin:/bin" if active else ""
    again = machine.run(path=path)
    assert again.returncode == 0, again.stderr
    assert os.path.realpath(machine.venv / "bin" / "python") == os.path.realpath(sys.executable)
    assert "is up to date" in machine.run(path=path).stderr


def test_a_python_that_links_to_itself_is_made_anew(machine: Machine) -> None:
    assert machine.run().returncode == 0
    for name, target in (("python", "python3"), ("python3", "python")):
        (machine.venv / "bin" / name).unlink()
        (machine.venv / "bin" / name).symlink_to(machine.venv / "bin" / target)
    again = machine.run("source scripts/runpod/pod_settings.sh")
    assert again.returncode == 0, again.stderr
    assert os.path.realpath(machine.venv / "bin" / "python") == os.path.realpath(sys.executable)
    assert machine.noted("made") == 2


def test_a_link_elsewhere_that_leads_through_the_environment_is_not_built_on(machine: Machine) -> None:
    assert machine.run().returncode == 0
    (machine.log / "python3").symlink_to(machine.venv / "bin" / "python")
    again = machine.run(path=f"{machine.log}:{machine.bin}:/usr/bin:/bin")
    assert "is up to date" in again.stderr, again.stderr
