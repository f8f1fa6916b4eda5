"""Owns what a process on a RunPod pod knows of that pod, and how it stops it: by `runpodctl`, in its old and its new form."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping

from fasttrain.errors import MachineError

VOLUME_IS_BILLED = "a stopped pod still bills its volume disk; terminate it when you have your results"
_SECONDS_A_TRY = 60.0


def this_pod(environ: Mapping[str, str]) -> str:
    """The id of the pod that this process runs on; raises MachineError where it runs on none, or could not stop it.

    `environ`: with the pod's own variables (`pod_variables`).
    """
    pod = environ.get("RUNPOD_POD_ID", "")
    if not pod:
        raise MachineError(
            "stop-pod works on a RunPod pod, and this is none (RUNPOD_POD_ID is not set); elsewhere give the command that ends "
            "your machine: --on-finish 'COMMAND'"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]+", pod):
        raise MachineError(f"RUNPOD_POD_ID is {pod!r}, which is no pod's id (letters and digits); set it to this pod's")
    if shutil.which("runpodctl", path=environ.get("PATH")) is None:
        raise MachineError(
            "stop-pod needs runpodctl, which RunPod puts on every pod, and it is not on PATH; install it, or give the command "
            "that ends your machine: --on-finish 'COMMAND'"
        )
    return pod


def stop_pod(pod: str, environ: Mapping[str, str], tries: int = 3, pause_seconds: float = 10.0) -> str | None:
    """Stops the pod; returns None, or what runpodctl said where it could not after all tries.

    The new form (`runpodctl pod stop ID`, from version 2 on) comes first; a runpodctl that does not know it gets the old one
    (`runpodctl stop pod ID`), which a new one still takes.
    """
    said = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(pause_seconds)
        answers = []
        for words in (["pod", "stop", pod], ["stop", "pod", pod]):
            well, text = _answer(words, environ)
            if well:
                return None
            answers.append(text)
        # A new runpodctl fails twice alike; of an old one the second answer is that of the form it knows
        said = answers[-1]
    return said


def _answer(words: list[str], environ: Mapping[str, str]) -> tuple[bool, str]:
    try:
        done = subprocess.run(
            ["runpodctl", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS_A_TRY,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    text = " ".join(f"{done.stdout} {done.stderr}".split())
    # The old form ends with 0 where the pod did not stop: `pod "…" stop failed; status is …`
    return done.returncode == 0 and "stop failed" not in text, text or f"exit code {done.returncode}"
