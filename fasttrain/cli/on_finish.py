"""Owns `--on-finish`: the command that is to run when a run has ended for good, such as the one that stops the pod."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from fasttrain.cli.figures import one_line
from fasttrain.cli.printing import tell
from fasttrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, FasttrainError, RecipeError
from fasttrain.machine.own_launcher import own_launcher
from fasttrain.machine.place import without_place
from fasttrain.machine.pod_variables import with_pod_variables
from fasttrain.machine.runpod import VOLUME_IS_BILLED, stop_pod, this_pod
from fasttrain.own_process import signals_held
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.events import Event, RunStarted

STOP_POD = "stop-pod"
_COMMANDS = ("train", "resume", "tune")
_SECONDS_TO_STAY = 5.0
"""A person who pressed Ctrl-C may want to keep the machine."""
_SECONDS_TO_END = 1.0
"""For a command that is told to."""


class OnFinish:
    """What the command line's one run asked for; it is carried out behind the wall, when all else is said and written."""

    def __init__(self) -> None:
        self._command: str | None = None
        self._pod = ""
        self._run_folder = ""
        self._folder: Path | None = None
        self._in_use = False
        self._process: subprocess.Popen[bytes] | subprocess.Popen[str] | None = None
        self._heard = False
        """Whether the command has come as far as to say what it wants."""

    @property
    def option(self) -> str:
        """As on a command line; empty where nothing was asked for."""
        return f" --on-finish {shlex.quote(self._command)}" if self._command is not None else ""

    @property
    def run_folder(self) -> str:
        """Of the run that was begun or gone on with; empty where none was."""
        return self._run_folder

    def ask_for(self, arguments: Sequence[str]) -> None:
        """Takes the option from a command line that was refused before its command could: a misspelt option must not bill on."""
        if not self._heard and (command := _asked_in(arguments)) is not None:
            self.belongs_to(_run_in(arguments))
            try:
                self.ask(command)
            except FasttrainError as error:
                _tell(str(error))

    def belongs_to(self, run: Path | None) -> None:
        """The folder of the run, as soon as it is known. While another process is at work in it, nothing has ended."""
        self._folder = run

    def leave_out(self) -> None:
        """The command was refused since another process is at work on what it is to do."""
        self._in_use = True

    @property
    def in_use(self) -> bool:
        """Whether another process is at work on what this one was to do, which has not ended then."""
        return self._in_use or (self._folder is not None and RunFolder(self._folder).in_use_by() is not None)

    def learn(self, run_folder: str, in_use: bool) -> None:
        """What the ranks that this process started tell of the run."""
        self._run_folder, self._in_use = run_folder, self._in_use or in_use

    def ask(self, command: str | None) -> None:
        """Takes the option's value. Raises RecipeError where it is empty, MachineError where there is no pod to be stopped."""
        self._heard, self._in_use = True, False
        if command is None:
            return
        if own_launcher() is not None:
            # It is for the process that started the ranks, which has checked it and outlives them
            self._command = command
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
            if (launch := own_launcher()) is not None:
                launch.tell(run=self._run_folder)

    def close(self) -> None:
        """An observer has nothing more to hear; the command comes later."""

    def carry_out(self, exit_code: int, seconds_to_stay: float = _SECONDS_TO_STAY) -> None:
        """After every end but 143, which someone else decided on and after which the run is to go on. Never raises."""
        command, self._command, self._heard = self._command, None, False
        if (launch := own_launcher()) is not None:
            launch.tell(in_use=exit_code != 0 and self.in_use)
            return
        if command is None or exit_code == EXIT_TERMINATED:
            return
        if self.in_use:
            _tell("--on-finish is left out: another process is at work there, and nothing has ended")
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
            # Ctrl-C once more changes nothing
            with signals_held() as heard:
                self.end_command()
                _tell("--on-finish was interrupted")
                heard.clear()

    def end_command(self) -> None:
        """Ends the command with all that it started in its group, if it is under way."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            until = time.monotonic() + _SECONDS_TO_END
            while number == signal.SIGTERM and process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)

    def _stop_pod(self) -> None:
        _tell(f"stopping this pod, {self._pod}; {VOLUME_IS_BILLED}")
        failure = stop_pod(self._pod, with_pod_variables(os.environ), begun=self._is_begun)
        if failure is not None:
            _tell(f"the pod could NOT be stopped and goes on being billed: {failure}; stop it in RunPod's console")

    def _is_begun(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _run(self, command: str, exit_code: int) -> None:
        environ = {
            **without_place(os.environ),
            "FASTTRAIN_EXIT_CODE": str(exit_code),
            "FASTTRAIN_RUN": self._run_folder,
        }
        try:
            with signals_held():
                self._process = process = subprocess.Popen(
                    command,
                    shell=True,
                    stdin=subprocess.DEVNULL,
                    # Its output is no part of the document that --json promises
                    stdout=_stderr(),
                    env=environ,
                    # A group of its own, so that all of it can be ended
                    start_new_session=True,
                )
            code = process.wait()
        except (OSError, ValueError) as error:
            _tell(f"--on-finish could not be run: {error}")
            return
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            _tell(f"--on-finish failed ({how}): {command}")


ON_FINISH = OnFinish()


def _asked_in(arguments: Sequence[str]) -> str | None:
    """The last `--on-finish` of a command line, where its command has that option and would carry it out."""
    command, *words = [*arguments, ""]
    if command not in _COMMANDS or "--dry-run" in words:
        return None
    asked = None
    for word, after in pairwise(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name == "--on-finish":
            asked = value if equals else after
    return asked or None


def _run_in(arguments: Sequence[str]) -> Path | None:
    """The run's folder, where a command line names one."""
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--run" or word.startswith("--run="):
            return Path(after if word == "--run" else word.removeprefix("--run="))
    named = [Path(word) for word in arguments[1:] if arguments[0] == "resume" and not word.startswith("-")]
    return next((path for path in named if RunFolder(path).holds_a_run()), None)


def _stderr() -> int:
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):
        return subprocess.DEVNULL


def _tell(sentence: str) -> None:
    tell(f"fasttrain: {one_line(sentence)}")
