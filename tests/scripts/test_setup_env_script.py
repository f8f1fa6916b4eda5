"""The set-up script's paths, with interpreters on PATH that answer as a machine would which has, or lacks, something.

Nothing is downloaded: the interpreter's `-m venv` makes a folder whose python notes what pip was asked for.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON3 = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$LOG/python"
case "$*" in
  *version_info*) [[ -z "${FAKE_VERSION:-}" ]] || { echo "$FAKE_VERSION"; exit; } ;;
  *ensurepip*) [[ -z "${FAKE_NO_VENV:-}" ]] || exit 1; exit 0 ;;
  *EXTERNALLY-MANAGED*) [[ -n "${FAKE_MANAGED:-}" ]]; exit ;;
  "-m venv"*)
    for folder; do :; done
    [[ -z "${FAKE_VENV_FAILS:-}" ]] || { touch "$folder/half"; exit 1; }
    rm -rf "$folder"
    mkdir -p "$folder/bin" "$folder/site"
    cp "$LOG/venv_python" "$folder/bin/python"
    exit ;;
esac
PYTHONPATH="$LOG/packages" exec REAL "$@"
"""

VENV_PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$LOG/venv"
bin="$(dirname "${BASH_SOURCE[0]}")"
case "$*" in
  *purelib*) echo "$bin/../site" ;;
  *torch.__version__*) cat "$LOG/torch_in_venv" ;;
  "-m pip install"*)
    [[ -z "${FAKE_PIP_FAILS:-}" ]] || exit 1
    while [[ "$1" != --constraint ]]; do shift; done
    cp "$2" "$LOG/constraints"
    cp "$LOG/tool" "$bin/fasttrain"
    for tool in ruff mypy lint-imports; do cp "$LOG/tool" "$bin/$tool"; done ;;
  "-m pytest"* | "scripts/run_tests.py"*) echo "pytest in $PWD, stdin $(wc -c)" >>"$LOG/tools"; exit "${FAKE_PYTEST:-0}" ;;
esac
"""

TOOL = """#!/usr/bin/env bash
printf '%s %s\\n' "$(basename "$0")" "$*" >>"$LOG/tools"
[[ "$(basename "$0")" != "${FAKE_FAILS:-}" ]] || exit 3
"""


@dataclass
class Machine:
    """A copy of the scripts in a folder with a space in its name, and a PATH on which `python3` is the stand-in."""

    checkout: Path
    log: Path
    path: str

    def run(self, script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FASTTRAIN_", "PYTHON"))}
        return subprocess.run(
            [self.checkout / script, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.log,
            input="typed ahead",
            env={**kept, "PATH": self.path, "LOG": str(self.log), **environ},
        )

    def noted(self, name: str) -> list[str]:
        path = self.log / name
        return path.read_text().splitlines() if path.exists() else []

    def venvs_made(self) -> list[str]:
        return [line for line in self.noted("python") if line.startswith("-m venv")]

    def pip_calls(self) -> list[str]:
        return [line for line in self.noted("venv") if line.startswith("-m pip")]

    def give_torch(self, version: str, cuda: bool, numpy: str = "2.1.3") -> None:
        package = self.log / "packages"
        shutil.rmtree(package, ignore_errors=True)
        for name, number in (("torch", version), ("numpy", numpy)):
            (package / f"{name}-{number}.dist-info").mkdir(parents=True)
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
            (package / f"{name}-{number}.dist-info" / "METADATA").write_text(text)
        (package / "torch").mkdir()
        (package / "torch" / "__init__.py").write_text(
            f"print('a banner')\n__version__ = {version!r}\n"
            f"class version: cuda = {'12.8' if cuda else None!r}\n"
            f"class cuda:\n    is_available = staticmethod(lambda: {cuda})\n"
        )
        (self.log / "torch_in_venv").write_text(f"a banner\n{version} {cuda}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    checkout, log, bin_folder = tmp_path / "check out", tmp_path / "log", tmp_path / "bin"
    for folder in (checkout / "scripts", checkout / ".ci", log / "packages" / "torch", bin_folder):
        folder.mkdir(parents=True)
    for name in ("scripts/setup_env.sh", "scripts/test.sh", "scripts/demo.sh", ".ci/run", "pyproject.toml"):
        shutil.copy2(ROOT / name, checkout / name)
    shutil.copy2(ROOT / "constraints.txt", checkout)
    (log / "packages" / "torch" / "__init__.py").write_text("raise ImportError('no torch on this machine')\n")
    (bin_folder / "python3").write_text(PYTHON3.replace("REAL", f"'{sys.executable}'"))
    (log / "venv_python").write_text(VENV_PYTHON)
    (log / "tool").write_text(TOOL)
    for path in (bin_folder / "python3", log / "venv_python", log / "tool"):
        path.chmod(0o755)
    return Machine(checkout, log, f"{bin_folder}:/usr/bin:/bin")


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a refused set-up."""
    assert result.returncode == 4, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("version", ["2.7", "3.8", "3.9"])
def test_an_old_python_is_refused_with_the_cure(machine: Machine, version: str) -> None:
    line = refusal(machine.run("scripts/setup_env.sh", FAKE_VERSION=version))
    assert f"is Python {version}, but fasttrain needs 3.10 or later" in line
    assert "PYTHON=" in line
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.parametrize("version", ["3.10", "3.14", "4.0"])
def test_a_python_that_is_new_enough_is_taken(machine: Machine, version: str) -> None:
    result = machine.run("scripts/setup_env.sh", FAKE_VERSION=version)
    assert result.returncode == 0, result.stderr
    assert len(machine.pip_calls()) == 1


def test_a_missing_interpreter_is_named(machine: Machine) -> None:
    assert "python9 was not found" in refusal(machine.run("scripts/setup_env.sh", PYTHON="python9"))


def test_a_python_without_venv_names_the_package(machine: Machine) -> None:
    line = refusal(machine.run("scripts/setup_env.sh", FAKE_VERSION="3.11", FAKE_NO_VENV="1"))
    assert "apt-get install python3.11-venv" in line
    assert "externally managed" not in line


def test_an_externally_managed_python_without_venv_says_so_too(machine: Machine) -> None:
    line = refusal(machine.run("scripts/setup_env.sh", FAKE_VERSION="3.12", FAKE_NO_VENV="1", FAKE_MANAGED="1"))
    assert "externally managed" in line
    assert "apt-get install python3.12-venv" in line


def test_without_torch_the_tested_versions_are_installed(machine: Machine) -> None:
    result = machine.run("scripts/setup_env.sh")
    assert result.returncode == 0, result.stderr
    assert "--system-site-packages" not in machine.venvs_made()[0]
    assert machine.noted("constraints") == (ROOT / "constraints.txt").read_text().splitlines()
    assert machine.pip_calls()[0].endswith(f"--editable {machine.checkout}")


def test_the_machines_own_cuda_torch_is_pinned_and_seen(machine: Machine) -> None:
    machine.give_torch("2.9.1+cu128", cuda=True)
    result = machine.run("scripts/setup_env.sh")
    assert result.returncode == 0, result.stderr
    assert "using torch 2.9.1+cu128" in result.stderr
    assert "--system-site-packages" in machine.venvs_made()[0]
    pins = [line for line in machine.noted("constraints") if not line.startswith("#")]
    assert {"torch==2.9.1+cu128", "numpy==2.1.3", "monai==1.6.1"} <= set(pins)
    assert len({line.split("==")[0] for line in pins}) == len(pins)
    assert not any(line.startswith(("scipy", "matplotlib")) for line in pins)


def test_a_numpy_too_old_for_fasttrain_is_not_pinned(machine: Machine) -> None:
    machine.give_torch("2.9.1+cu128", cuda=True, numpy="1.24.4")
    assert "numpy 1.24.4 is too old" in machine.run("scripts/setup_env.sh").stderr
    assert not any(line.startswith("numpy") for line in machine.noted("constraints"))


@pytest.mark.parametrize("version", ["2.5.1+cu124", "1.13.0", "2.8.0a0+5228986c39.nv25.06"])
def test_an_old_cuda_torch_is_said_and_left_alone(machine: Machine, version: str) -> None:
    machine.give_torch(version, cuda=True)
    result = machine.run("scripts/setup_env.sh")
    assert result.returncode == 0, result.stderr
    assert f"has torch {version}, but fasttrain needs 2.8 or later" in result.stderr
    assert "--system-site-packages" not in machine.venvs_made()[0]
    assert "torch==2.13.0" in machine.noted("constraints")


@pytest.mark.parametrize("version", ["2.8.0", "2.9.0a0+145a3a7.nv25.10", "2.10.0+cu130"])
def test_a_cuda_torch_that_is_new_enough_is_used(machine: Machine, version: str) -> None:
    machine.give_torch(version, cuda=True)
    assert machine.run("scripts/setup_env.sh").returncode == 0
    assert f"torch=={version}" in machine.noted("constraints")


def test_a_torch_without_cuda_and_one_not_wanted_are_not_used(machine: Machine) -> None:
    machine.give_torch("2.9.1+cpu", cuda=False)
    assert machine.run("scripts/setup_env.sh", "cpu").returncode == 0
    assert "torch==2.13.0" in machine.noted("constraints")
    machine.give_torch("2.9.1+cu128", cuda=True)
    assert machine.run("scripts/setup_env.sh", "own", FASTTRAIN_SYSTEM_TORCH="0").returncode == 0
    assert not any("--system-site-packages" in line for line in machine.venvs_made())
    assert (machine.log / "cpu").is_dir()
    assert (machine.log / "own").is_dir()


def test_a_torch_that_the_environment_does_not_see_is_an_error(machine: Machine) -> None:
    machine.give_torch("2.9.1+cu128", cuda=True)
    (machine.log / "torch_in_venv").write_text("2.13.0 True\n")
    result = machine.run("scripts/setup_env.sh")
    assert result.returncode == 4
    assert "FASTTRAIN_SYSTEM_TORCH=0" in result.stderr.splitlines()[-1]


def test_running_again_does_nothing_and_a_change_installs_into_the_same(machine: Machine) -> None:
    assert machine.run("scripts/setup_env.sh").returncode == 0
    again = machine.run("scripts/setup_env.sh")
    assert again.returncode == 0
    assert "is up to date" in again.stderr
    assert (len(machine.venvs_made()), len(machine.pip_calls())) == (1, 1)
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert machine.run("scripts/setup_env.sh").returncode == 0
    assert (len(machine.venvs_made()), len(machine.pip_calls())) == (1, 2)


def test_development_tools_are_added_to_the_same_environment_and_serve_both(machine: Machine) -> None:
    assert machine.run("scripts/setup_env.sh").returncode == 0
    assert machine.run("scripts/setup_env.sh", FASTTRAIN_DEV="1").returncode == 0
    assert machine.pip_calls()[1].endswith("[dev]")
    assert "is up to date" in machine.run("scripts/setup_env.sh").stderr
    assert (len(machine.venvs_made()), len(machine.pip_calls())) == (1, 2)


def test_another_torch_below_it_makes_the_environment_anew(machine: Machine) -> None:
    assert machine.run("scripts/setup_env.sh").returncode == 0
    machine.give_torch("2.9.1+cu128", cuda=True)
    assert machine.run("scripts/setup_env.sh").returncode == 0
    assert len(machine.venvs_made()) == 2


def test_a_folder_of_somebody_else_is_refused_and_not_touched(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    line = refusal(machine.run("scripts/setup_env.sh", str(tmp_path / "thesis")))
    assert "was not made by this script" in line
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert machine.run("scripts/setup_env.sh", str(tmp_path / "empty")).returncode == 0


def test_an_environment_left_half_made_is_made_again(machine: Machine) -> None:
    failed = machine.run("scripts/setup_env.sh", FAKE_VENV_FAILS="1")
    assert failed.returncode == 4
    assert "could not make a virtual environment" in failed.stderr
    assert (machine.checkout / ".venv" / "half").exists()
    assert machine.run("scripts/setup_env.sh").returncode == 0
    assert not (machine.checkout / ".venv" / "half").exists()
    assert not (machine.checkout / ".venv.unfinished").exists()


def test_a_failed_download_goes_on_where_it_was(machine: Machine) -> None:
    failed = machine.run("scripts/setup_env.sh", FAKE_PIP_FAILS="1")
    assert failed.returncode == 4
    assert "check the network and the disk" in failed.stderr
    assert machine.run("scripts/setup_env.sh").returncode == 0
    assert (len(machine.venvs_made()), len(machine.pip_calls())) == (1, 2)


def test_the_demo_trains_with_the_arguments_given(machine: Machine) -> None:
    assert machine.run("scripts/demo.sh", "--set", "training.epochs=1").returncode == 0
    assert machine.noted("tools") == ["fasttrain train --recipe demo --set training.epochs=1"]
    assert "[dev]" not in machine.pip_calls()[0]
    assert machine.run("scripts/demo.sh", FAKE_FAILS="fasttrain").returncode == 3


def test_all_checks_run_in_order_and_pytest_gets_the_arguments(machine: Machine) -> None:
    result = machine.run("scripts/test.sh", "-k", "one test")
    assert result.returncode == 0, result.stderr
    tools = [line.split(" in ")[0] for line in machine.noted("tools")]
    assert tools == ["ruff check .", "ruff format --check .", "mypy ", "lint-imports ", "pytest"]
    assert f"pytest in {machine.checkout}" in machine.noted("tools")[-1]
    assert machine.noted("venv")[-1] == "-m pytest -k one test"


@pytest.mark.parametrize(("failing", "ran"), [("ruff", 1), ("mypy", 3), ("lint-imports", 4)])
def test_the_first_failure_ends_the_checks_with_its_code(machine: Machine, failing: str, ran: int) -> None:
    assert machine.run("scripts/test.sh", FAKE_FAILS=failing).returncode == 3
    assert len(machine.noted("tools")) == ran
    (machine.log / "tools").unlink()
    assert machine.run("scripts/test.sh", FAKE_PYTEST="5").returncode == 5


def test_continuous_integration_leaves_nothing_and_leans_on_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.give_torch("2.9.1+cu128", cuda=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for code in ("0", "1"):
        assert machine.run(".ci/run", TMPDIR=str(scratch), FAKE_PYTEST=code).returncode == int(code)
        assert list(scratch.iterdir()) == []
    assert len(machine.venvs_made()) == 2
    assert not any("--system-site-packages" in line for line in machine.venvs_made())
    assert not (machine.checkout / ".venv").exists()
    assert machine.noted("tools")[-1] == f"pytest in {machine.checkout}, stdin 0"
