"""Owns what torch.compile needs on this machine and where it keeps what it made."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import MutableMapping
from pathlib import Path

from fasttrain.errors import wants_memory
from fasttrain.machine.folder_lock import Hold, hold

_HELD: dict[str, Hold] = {}


def missing_for_compile() -> str | None:
    """What torch.compile lacks here for a GPU, as the user would install it; None where it has all it needs.

    Triton builds a small C launcher for each kernel, for which runtime images without a compiler or Python's headers fail.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return missing_for_c() or _broken_triton()


def missing_for_c() -> str | None:
    """What a C extension of Python lacks here, as the user would install it; None where it has all it needs."""
    if c_compiler() is None:
        named = os.environ.get("CC")
        return (
            "there is no C compiler (install gcc)"
            if not named
            else f"CC={named} is no C compiler (unset CC, install gcc)"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"Python's headers are missing ({header}; install python3-dev)"
    return None


def c_compiler() -> str | None:
    """The one that Triton takes: $CC, which it takes unseen, else gcc, else clang."""
    if named := os.environ.get("CC"):
        return shutil.which(named)
    return shutil.which("gcc") or shutil.which("clang")


def _broken_triton() -> str | None:
    # Found is not loaded: one of another Python, or whose library wants a newer glibc, is only met when it is imported
    try:
        importlib.import_module("triton")
        importlib.import_module("triton.language")
    except Exception as error:
        if wants_memory(error):
            raise
        told = " ".join(str(error).split())[:200] or type(error).__name__
        return (
            f"Triton is installed and cannot be loaded ({told}; install torch anew, which brings the Triton it needs)"
        )
    return None


def keep_compiled(folder: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Lets the compiler's caches lie in `folder`, so that the next run finds them; what the user set stands.

    They are held until the process ends, so that `fasttrain data cache --clean` does not take them from under the compiler.
    """
    for key, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        ours = str(folder / name)
        if environ.setdefault(key, ours) == ours and ours not in _HELD:
            _HELD[ours] = hold(folder / name)
