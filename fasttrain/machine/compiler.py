"""Owns what torch.compile needs on this machine and where it keeps what it made."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import MutableMapping
from pathlib import Path

from fasttrain.machine.folder_lock import Hold, hold

_HELD: dict[str, Hold] = {}


def missing_for_compile() -> str | None:
    """What torch.compile lacks here for a GPU, as the user would install it; None where it has all it needs.

    Triton builds a small C launcher for each kernel, for which runtime images without a compiler or Python's headers fail.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if shutil.which(os.environ.get("CC") or "gcc") is None and not any(map(shutil.which, ("cc", "clang"))):
        return "there is no C compiler (install gcc)"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"Python's headers are missing ({header}; install python3-dev)"
    return None


def keep_compiled(folder: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Lets the compiler's caches lie in `folder`, so that the next run finds them; what the user set stands.

    They are held until the process ends, so that `fasttrain data cache --clean` does not take them from under the compiler.
    """
    for key, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        ours = str(folder / name)
        if environ.setdefault(key, ours) == ours and ours not in _HELD:
            _HELD[ours] = hold(folder / name)
