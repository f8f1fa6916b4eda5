"""Owns `--gpus N`: a process that starts the ranks through torch's launcher, passes signals on, and ends as they do."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.cli.printing import tell
from fasttrain.cli.several import SEVERAL
from fasttrain.errors import (
    EXIT_INTERRUPTED,
    EXIT_LOST_RANK,
    EXIT_TERMINATED,
    LostRankError,
    MachineError,
    OtherRankError,
    RecipeError,
)
from fasttrain.machine.limits import cpu_limit
from fasttrain.machine.own_launcher import VARIABLE, OwnLauncher
from fasttrain.machine.place import place
from fasttrain.machine.threads import limit_threads

GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus", help="Train with so many GPUs of this machine; with --device cpu so many processes.", metavar="N|all"
    ),
]
_OPTION = "--gpus"
_MOST_SECONDS_TO_END = 120.0
"""After a signal, for the ranks to save and end; a frozen one must not keep the machine."""
_SECONDS_TO_SHUT_DOWN = 18
"""For the ranks that are left when one has ended."""
_SECONDS_FOR_A_FROZEN_ONE = 8.0
"""The same where one answers nothing, no signal either: for the others, which have no state to save without it."""
_ONE_AND_THE_SAME_SECONDS = 0.2
_CPU_RANKS = 8
"""As many may be tried on any machine; more than there are CPUs only wait for each other, and a slip of a digit fills it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def launched(gpus: str | None, device: str) -> int | None:
    """The exit code of the ranks where `--gpus` asks for several, which are started then; None: this process does the work.

    Raises RecipeError for a value that can be none, MachineError where there are too few GPUs, LostRankError where a rank was
    killed.
    """
    if gpus is None:
        return None
    seat = place(os.environ)
    if not seat.alone:
        if gpus != str(seat.local_ranks) and gpus != "all":
            raise RecipeError(
                f"{_OPTION} {gpus}: this is one of {seat.local_ranks} ranks that a launcher has started on this machine; "
                "leave it out"
            )
        return None
    count = count_of(gpus, device)
    return None if count == 1 else launch(count, _without_option(SEVERAL.given))


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Starts so many ranks of a command line, which they follow, and returns their exit code; raises as `launched` does."""
    return _Launch(ranks, arguments).run()


def count_of(gpus: str, device: str) -> int:
    """How many ranks `--gpus` asks for on this machine."""
    number = int(gpus) if gpus.isdecimal() and len(gpus) < 6 else None
    if gpus != "all" and not number:
        raise RecipeError(f"{_OPTION} {gpus}: should be a number from 1, or all")
    if device == "cpu":
        if number is None:
            raise RecipeError(
                f"{_OPTION} all with --device cpu: there is no number of GPUs to go by; name one, such as {_OPTION} 2"
            )
        if number > (most := max(cpu_limit(), _CPU_RANKS)):
            raise MachineError(
                f"{_OPTION} {gpus} with --device cpu: {cpu_limit()} CPUs may be used here; say {_OPTION} {most} or less"
            )
        return number
    if ":" in device and number != 1:
        raise RecipeError(f"{_OPTION} {gpus} with --device {device}, which is one card: say --device cuda")
    if number == 1:
        return 1
    there, told = _cards()
    if number is not None and number > there:
        raise MachineError(
            f"{_OPTION} {gpus}: there {'is' if there == 1 else 'are'} {there or 'none'}{told}; {_mend(there)}"
        )
    if not there:
        raise MachineError(f"{_OPTION} all: there is no GPU{told}; {_mend(0)}")
    return number or there


def _mend(there: int) -> str:
    if there > 1:
        return f"say {_OPTION} {there} or {_OPTION} all, or rent more"
    return f"leave {_OPTION} out, or rent more" if there else "use --device cpu, or mend that first (fasttrain doctor)"


def _cards() -> tuple[int, str]:
    """How many cards CUDA would give a process, and by what that is known. Raises MachineError where they are parts of one."""
    from fasttrain.machine.driver import read_driver
    from fasttrain.machine.visible_devices import VARIABLE as VISIBLE

    driver = read_driver()
    by = f", by {VISIBLE}={os.environ[VISIBLE]!r}" if VISIBLE in os.environ else ""
    if isinstance(driver, str):
        import torch

        from fasttrain.machine.hardware import why_no_gpu

        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return there, by or ("" if there else f": {why_no_gpu()}")
    chosen = driver.chosen(os.environ)
    if chosen.instance is not None or any(driver.cards[card].instances is not None for card in chosen.cards):
        raise MachineError(
            f"{_OPTION}: this machine's GPUs are MIG instances, parts of a card; CUDA gives a run one of them and no more: use "
            f"{_OPTION} 1, or have MIG turned off (nvidia-smi -mig 0)"
        )
    return len(chosen.cards), by


class _Launch:
    """One start of so many ranks."""

    def __init__(self, ranks: int, arguments: Sequence[str] = ()) -> None:
        self._ranks = ranks
        self._arguments = tuple(arguments)
        self._notes = OwnLauncher(os.getpid(), Path(tempfile.mkdtemp(prefix="fasttrain-ranks-")))
        self._first_at = 0.0
        self._asked: int | None = None
        self._begun = False
        self._ended: list[Any] = []

    def run(self) -> int:
        """Waits for all, and returns the exit code of what ended them."""
        environ = dict(os.environ)
        former = {
            number: signal.signal(number, self._pass_on)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            agent = threading.Thread(target=self._start, name="launcher", daemon=True)
            agent.start()
            silent_at = math.inf
            while agent.is_alive():
                agent.join(0.1)
                if self._notes.told("silent"):
                    silent_at = min(silent_at, time.monotonic())
                if time.monotonic() - silent_at > _SECONDS_FOR_A_FROZEN_ONE:
                    _signal_children(signal.SIGKILL)
                if self._asked is not None and time.monotonic() - self._first_at > _MOST_SECONDS_TO_END:
                    _signal_children(signal.SIGKILL)
            return self._code()
        finally:
            os.environ.clear()
            os.environ.update(environ)
            ON_FINISH.learn(self._notes.told("run") or "", bool(self._notes.told("in_use")))
            for number, handler in former.items():
                signal.signal(number, handler)
            shutil.rmtree(self._notes.folder, ignore_errors=True)

    def _start(self) -> None:
        """In a thread of its own: torch's launcher would answer signals its own way."""
        try:
            self._launch()
        except BaseException as error:
            self._ended.append(error)

    def _launch(self) -> None:
        _share_cpus(self._ranks)
        os.environ[VARIABLE] = self._notes.variable
        package = str(Path(__file__).resolve().parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        if "lo" in [name for _, name in socket.if_nameindex()]:
            # A container's own name may lead nowhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        # Which rank ended by what is said in a sentence
        logging.disable(logging.CRITICAL)
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, launch_agent

        later: dict[str, Any] = {"shutdown_timeout": _SECONDS_TO_SHUT_DOWN}
        known = LaunchConfig.__dataclass_fields__
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._ranks,
            run_id=self._notes.folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._notes.folder)),
            **{name: value for name, value in later.items() if name in known},
        )
        if self._asked is None:
            self._begun = True
            launch_agent(config, sys.executable, ["-m", "fasttrain", *self._arguments])

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        """To each rank, once; a second signal ends all at once."""
        now = time.monotonic()
        if self._asked is None:
            self._asked, self._first_at = number, now
            self._notes.ask()
            _signal_children(number)
        elif now - self._first_at > _ONE_AND_THE_SAME_SECONDS:
            _signal_children(signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.write(2, b"fasttrain: all ranks were ended at once, by a second signal\n")
            shutil.rmtree(self._notes.folder, ignore_errors=True)
            os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)

    def _code(self) -> int:
        error = self._ended[0] if self._ended else None
        if error is None and (self._begun or self._asked is None):
            return 0
        if error is None:
            return self._stopped()
        failures = getattr(error, "failures", None)
        if not failures:
            raise MachineError(
                f"the ranks could not be started: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )
        first = failures.get(0) or min(failures.values(), key=lambda failure: (failure.timestamp, failure.local_rank))
        if self._notes.unsaid and self._asked is None:
            # It was ended since another had failed, before they met
            enders = (-signal.SIGTERM, EXIT_TERMINATED)
            first = next((one for _, one in sorted(failures.items()) if one.exitcode not in enders), first)
        code = int(first.exitcode)
        lost = self._notes.told("lost")
        killed = [(rank, -one.exitcode) for rank, one in sorted(failures.items()) if one.exitcode < 0]
        if killed and not self._notes.told("silent"):
            if self._asked is not None and code < 0:
                return self._stopped()
            raise LostRankError(_told_of(*killed[0], self._notes.told("run"), self._ranks))
        if code == EXIT_TERMINATED and self._notes.unsaid:
            return self._stopped()
        if lost and (self._asked is None or code == EXIT_LOST_RANK) and not self._notes.told("said"):
            raise LostRankError(lost) if code < 0 or code == EXIT_LOST_RANK else OtherRankError(lost, code)
        return code if code >= 0 else EXIT_LOST_RANK

    def _stopped(self) -> int:
        """Of ranks none of which has said so."""
        name = "Ctrl-C" if self._asked == signal.SIGINT else signal.Signals(self._asked or signal.SIGTERM).name
        tell(f"fasttrain: stopped by {name}")
        return EXIT_INTERRUPTED if self._asked == signal.SIGINT else EXIT_TERMINATED


def _told_of(rank: int, number: int, run: str | None, ranks: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    goes_on = f"`fasttrain resume {shlex.quote(run)} {_OPTION} {ranks}`" if run else ""
    why = "; the system does that where memory runs out (`dmesg` tells)" if number == signal.SIGKILL else ""
    how = f"; what was saved lies in {run}: {goes_on} goes on with it" if run else ""
    return f"rank {rank} was killed by {name}{why}{how}"


def _share_cpus(ranks: int) -> None:
    limit_threads(max(cpu_limit() // ranks, 1))


def _without_option(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            return [*kept, word, *words]
        if word == _OPTION:
            next(words, None)
        elif not word.startswith(f"{_OPTION}="):
            kept.append(word)
    return kept


def _signal_children(number: int) -> None:
    """Each rank, which is a session of its own: neither Ctrl-C nor a lost terminal reaches it."""
    own = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
                if parent == own:
                    os.kill(int(name), number)
