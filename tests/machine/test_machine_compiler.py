"""What Triton needs is looked at as Triton looks for it, and a Triton that is there but broken is not taken for a sound one."""

import sys
from pathlib import Path

import pytest

from fasttrain.machine import compiler
from fasttrain.machine.compiler import c_compiler, missing_for_c, missing_for_compile


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package `triton` that comes first on the path."""
    folder = tmp_path / "triton"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "language.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(compiler, "missing_for_c", lambda: None)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]


def test_a_triton_that_loads_is_enough(package: Path) -> None:
    assert missing_for_compile() is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise ImportError('libtriton.so: GLIBC_2.34 not found')", "GLIBC_2.34 not found"),
        ("import of nothing", "invalid syntax"),
        ("raise OSError", "OSError"),
    ],
)
@pytest.mark.parametrize("name", ["__init__.py", "language.py"])
def test_a_triton_that_does_not_load_is_told(package: Path, name: str, text: str, told: str) -> None:
    (package / name).write_text(text)
    missing = missing_for_compile()
    assert missing is not None
    assert missing.startswith("Triton is installed and cannot be loaded (")
    assert told in missing


def test_memory_that_runs_out_is_not_a_broken_triton(package: Path) -> None:
    (package / "__init__.py").write_text("raise MemoryError")
    with pytest.raises(MemoryError):
        missing_for_compile()


def test_the_c_compiler_is_the_one_that_triton_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_compiler() is None
    assert missing_for_c() == "there is no C compiler (install gcc)"
    for name in ("cc", "clang", "gcc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        # Triton does not look for `cc`
        assert c_compiler() == (None if name == "cc" else str(tmp_path / name))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing_for_c() == "CC=no-such-compiler is no C compiler (unset CC, install gcc)"
    monkeypatch.setenv("CC", str(tmp_path / "clang"))
    assert c_compiler() == str(tmp_path / "clang")


def test_missing_headers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(compiler.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "install python3-dev" in (missing_for_c() or "")
    (tmp_path / "Python.h").touch()
    assert missing_for_c() is None
