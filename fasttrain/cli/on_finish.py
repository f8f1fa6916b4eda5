"""Owns `--on-finish`: the command that is to run when a run has ended for good, such as the one that stops the pod."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from fasttrain.cli.figures import one_line
from fasttrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, RecipeError
from fasttrain.machine.pod_variables import with_pod_variables
from fasttrain.machine.runpod import VOLUME_IS_BILLED, stop_pod, this_pod
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.events import Event, RunStarted

STOP_POD = "stop-pod"
_SECONDS_TO_STAY = 5.0
"""A person who pressed Ctrl-C may want to keep the machine."""


class OnFinish:
    """What the command line's one run asked for; it is carried out behind the wall, when all else is said and written."""

    def __init__(self) -> None:
        self._command: str | None = None
        self._pod = ""
        self._run_folder = ""

    def ask(self, command: str | None) -> None:
        """Takes the option's value. Raises RecipeError where it is empty, MachineError where there is no pod to be stopped."""
        if command is None:
            return
        if not command.strip():
            raise RecipeError("--on-finish is empty; give it a command, or stop-pod")
        if command == STOP_POD:
            self._pod = this_pod(with_pod_variables(os.environ))
            _tell(f"this pod, {self._pod}, will be stopped when the run has ended; {VOLUME_IS_BILLED}")
        self._command = command

    def on_event(self, event: Event) -> None:
        """Remembers the run's folder, for the command to know it."""
        if isinstance(event, RunStarted):
            self._run_folder = os.path.abspath(RunFolder(Path(event.run)).whole())

    def close(self) -> None:
        """An observer has nothing more to hear; the command comes later."""

    def carry_out(self, exit_code: int, seconds_to_stay: float = _SECONDS_TO_STAY) -> None:
        """After every end but 143, which someone else decided on and after which the run is to go on. Never raises."""
        command, self._command = self._command, None
        if command is None or exit_code == EXIT_TERMINATED:
            return
        try:
            if exit_code == EXIT_INTERRUPTED:
                _tell(f"--on-finish follows in {seconds_to_stay:g} s; Ctrl-C now leaves it out")
                time.sleep(seconds_to_stay)
            if command == STOP_POD:
                self._stop_pod()
            else:
                self._run(command, exit_code)
        except KeyboardInterrupt:
            _tell("--on-finish was interrupted")

    def _stop_pod(self) -> None:
        _tell(f"stopping this pod, {self._pod}; {VOLUME_IS_BILLED}")
        failure = stop_pod(self._pod, with_pod_variables(os.environ))
        if failure is not None:
            _tell(f"the pod could NOT be stopped and goes on being billed: {failure}; stop it in RunPod's console")

    def _run(self, command: str, exit_code: int) -> None:
        environ = {**os.environ, "FASTTRAIN_EXIT_CODE": str(exit_code), "FASTTRAIN_RUN": self._run_folder}
        try:
            # Its output is no part of the document that --json promises
            code = subprocess.run(
                command, shell=True, stdin=subprocess.DEVNULL, stdout=_stderr(), env=environ, check=False
            ).returncode
        except (OSError, ValueError) as error:
            _tell(f"--on-finish could not be run: {error}")
            return
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            _tell(f"--on-finish failed ({how}): {command}")


ON_FINISH = OnFinish()


def _stderr() -> int:
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):
        return subprocess.DEVNULL


def _tell(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"fasttrain: {one_line(sentence)}", file=sys.stderr, flush=True)
