"""Owns where a pod's own variables come from: the environment, or over ssh the file that RunPod keeps of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_KEPT = Path("/etc/rp_environment")
_LINE = re.compile(r"""^(?:export\s+)?(RUNPOD_\w+)=["']?(.*?)["']?$""")


def with_pod_variables(environ: Mapping[str, str], kept: Path = _KEPT) -> Mapping[str, str]:
    """The environment, with the RUNPOD_ variables that a shell opened over ssh lacks; what is set there stands."""
    if environ.get("RUNPOD_POD_ID"):
        return environ
    try:
        lines = kept.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return environ
    return {**{match[1]: match[2] for match in map(_LINE.match, lines) if match}, **environ}
