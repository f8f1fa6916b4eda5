"""Owns what a process on a RunPod pod knows of that pod, and how it stops it: by `runpodctl`, in its old and its new form."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from fasttrain.errors import MachineError
from fasttrain.own_process import signals_held

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


def stop_pod(
    pod: str,
    environ: Mapping[str, str],
    tries: int = 3,
    pause_seconds: float = 10.0,
    begun: Callable[[subprocess.Popen[str]], None] = lambda process: None,
) -> str | None:
    """Stops the pod; returns None, or what runpodctl said where it could not after all tries.

    The new form (`runpodctl pod stop ID`, from version 2 on) comes first; a runpodctl that does not know it gets the old one
    (`runpodctl stop pod ID`), which a new one still takes. begun: is given each process that is started, the head of a group of
    its own, for whoever has to end it at once.
    """
    said = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(pause_seconds)
        answers = []
        for words in (["pod", "stop", pod], ["stop", "pod", pod]):
            well, text = _answer(words, environ, begun)
            if well:
                return None
            answers.append(text)
        # A new runpodctl fails twice alike; of an old one the second answer is that of the form it knows
        said = answers[-1]
    return said


def _answer(
    words: list[str], environ: Mapping[str, str], begun: Callable[[subprocess.Popen[str]], None]
) -> tuple[bool, str]:
    process = None
    try:
        with signals_held():
            process = subprocess.Popen(
                ["runpodctl", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=dict(environ),
                start_new_session=True,
            )
            begun(process)
        out, err = process.communicate(timeout=_SECONDS_A_TRY)
    except BaseException as error:
        if process is None:
            if isinstance(error, OSError):
                return False, str(error)
            raise
        # All of it, also where Ctrl-C cut the wait short: what it began may hold its output open
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return False, f"runpodctl gave no answer in {_SECONDS_A_TRY:g} s"
        raise
    text = " ".join(f"{out} {err}".split())
    # The old form ends with 0 where the pod did not stop: `pod "…" stop failed; status is …`
    return process.returncode == 0 and "stop failed" not in text, text or f"exit code {process.returncode}"
