"""Owns a command's part in a run of several ranks: the first carries the command out and speaks, the others follow it."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fasttrain.errors import FasttrainError, LostRankError, MachineError, RecipeError
from fasttrain.machine.own_launcher import OwnLauncher, own_launcher
from fasttrain.machine.place import place
from fasttrain.machine.threads import wait_without_spinning
from fasttrain.own_process import end_with_parent

if TYPE_CHECKING:
    from fasttrain.engine.stop import StopRequest
    from fasttrain.machine.ranks import Joined, Ranks

_FOR_SEVERAL = ("train", "resume")
_STARTS_RANKS = ("tune", "tune-batch")


class Several:
    """The ranks of this command, as soon as they have met."""

    def __init__(self) -> None:
        self._joined: Joined | None = None
        self._seat = place({})
        self._launch = own_launcher({})
        self._silent = False
        self._stop: StopRequest | None = None
        self._kept: list[str] = []
        self.given: list[str] = []
        """The command line, which other ranks are given too."""
        self.end_here: Callable[[FasttrainError], None] = lambda error: None
        """What the first rank's command says where another rank ends it."""

    @property
    def met(self) -> bool:
        """Whether there are others."""
        return self._joined is not None

    @property
    def ranks(self) -> Ranks:
        """All that train together."""
        from fasttrain.machine.ranks import ONLY_ONE

        return ONLY_ONE if self._joined is None else self._joined

    @property
    def alone(self) -> bool:
        """Whether there never was another."""
        return self._seat.alone

    @property
    def restarts(self) -> int:
        """How often the launcher has begun this very command anew."""
        return self._seat.restarts

    @property
    def began_at(self) -> float:
        """When the launcher began, in Unix seconds; 0 where that is not known."""
        try:
            import psutil

            return float(psutil.Process(os.getppid()).create_time())
        except Exception:  # a /proc that is not there
            return 0.0

    @property
    def follows(self) -> bool:
        """Whether this is another rank than the first, which leaves the word to that one."""
        return not self._seat.leads

    def begin(self, arguments: list[str]) -> None:
        """A command line. Raises RecipeError where it is a rank's, and of a command that works alone."""
        self.given = arguments
        command = next((word for word in arguments if not word.startswith("-")), "train")
        if command in _FOR_SEVERAL or not {"RANK", "WORLD_SIZE"} <= set(os.environ):
            return
        with contextlib.suppress(MachineError):
            # Without a place among others it works alone
            seat = place(os.environ)
            if not seat.alone:
                self._seat = seat
                own = f", and say --gpus {seat.local_ranks}" if command in _STARTS_RANKS else ""
                raise RecipeError(
                    f"`fasttrain {command}` works in one process: leave torchrun out{own} (RANK {seat.rank} of {seat.ranks})"
                )

    def meet(self, device: str) -> bool:
        """Meets the other ranks, if there are any; False in those that follow. Raises MachineError where they cannot be met."""
        self._seat = place(os.environ)
        if self._seat.alone:
            return True
        self._launch = own_launcher()
        if self._launch is not None or "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        if self._launch is not None and os.getppid() != self._launch.pid:
            raise MachineError(f"the process that started this rank ({self._launch.pid}) is gone")
        if self.follows:
            warnings.simplefilter("ignore")
        # What torch's C++ logs of a connection is several pages; what matters of it becomes a sentence
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        wait_without_spinning()
        import torch

        from fasttrain.machine.hardware import survey
        from fasttrain.machine.ranks import join

        chosen = survey(device, self._seat).torch_device
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        try:
            self._joined = join(
                self._seat, chosen, self._ended_by, _tell if self._seat.leads else lambda sentence: None
            )
        except LostRankError as error:
            self._silent = error.silent
            raise
        self._joined.watch.at_last = self._at_last
        from fasttrain.engine.agreeing import check_versions

        check_versions(self._joined)
        return self._seat.leads

    def follow(self, data: Path | None, device: str) -> int:
        """Does what the first rank says, and returns the exit code that it names. Raises what goes wrong here."""
        from fasttrain.cli.signals import stop_on_signals

        with stop_on_signals() as stop:
            stop.begun = True
            from fasttrain.engine.agreeing import check_cases
            from fasttrain.engine.following import follow

            return follow(self.ranks, data, device, stop, partial(check_cases, self._seat.rank))

    def heed(self, stop: StopRequest, on_stop: Callable[[int], None]) -> None:
        """A stop that any rank is asked for is one of all; on_stop hears its exit code where it was another rank."""
        if self._joined is not None:
            self._stop = stop
            self._joined.watch.heed(stop, on_stop)

    def keep(self, sentence: str) -> bool:
        """Whether the sentence is left to another process."""
        if self.leaves_word:
            self._kept.append(sentence)
            return True
        if self._launch is not None:
            self._launch.tell(said=True)
        return False

    @property
    def failing(self) -> bool:
        """Whether another rank's end is what ends this one."""
        return self._joined is not None and self._joined.watch.failure is not None

    @property
    def leaves_word(self) -> bool:
        """Whether another process says how this command ends: the first rank, or who started the ranks and knows how one died."""
        return self.follows or (self._launch is not None and self._lost)

    def ended_by_launcher(self, number: int) -> bool:
        """Whether a signal is the launcher's own, which ends the ranks that are left when one has ended."""
        if self._launch is not None and number == signal.SIGTERM:
            return not self._launch.asked
        return self.failing

    def explain(self, error: BaseException) -> FasttrainError | None:
        """Who is gone, where something sent to or from other ranks broke off."""
        return None if self._joined is None else self._joined.watch.explain(error)

    def gone(self, code: int) -> None:
        """This process ends at once."""
        if self._joined is not None:
            self._joined.watch.gone(code)

    def leave(self, code: int, failed: bool) -> None:
        """The command has ended: the first rank lets the others go. One that failed may have left them in the middle of a
        step.
        """
        joined, self._joined = self._joined, None
        if joined is None:
            self._say_what_is_kept()
            return
        lost = joined.watch.failure
        self._silent = isinstance(lost, LostRankError) and lost.silent
        if not failed and self._seat.leads:
            from fasttrain.engine.orders import Over

            with contextlib.suppress(RuntimeError):
                # What it has done is done, whether the others are there or not
                joined.share(Over(code))
        if self._seat.leads:
            joined.watch.over(code)
            self._say_what_is_kept()
            return
        if failed and not joined.watch.failed(tuple(self._kept), code):
            self._say_for_first(joined)
        elif code:
            joined.watch.wait_for_first()
        self._kept.clear()

    @property
    def _lost(self) -> bool:
        return self._joined is not None and isinstance(self._joined.watch.failure, LostRankError)

    @property
    def launch(self) -> OwnLauncher | None:
        """The `--gpus N` that this process is a rank of."""
        return self._launch

    def _ended_by(self, error: FasttrainError) -> None:
        """Of a thread, while the main one may wait for what never comes."""
        self._silent = isinstance(error, LostRankError) and error.silent
        if self._seat.leads:
            self.end_here(error)
            self._say_what_is_kept()
        elif self._joined is not None:
            self._kept[:] = error.faults
            self._say_for_first(self._joined)

    def _at_last(self, code: int) -> None:
        """The last that a process does which another rank's failure ends, from a thread."""
        from fasttrain.cli.interruption import end_traceless
        from fasttrain.cli.on_finish import ON_FINISH

        end_traceless()
        if not self.follows:
            ON_FINISH.carry_out(code)

    def _say_for_first(self, joined: Joined) -> None:
        """One of those that are left does, where the first is lost, unless all were told to stop."""
        if self._stop is not None and self._stop.asked:
            self._kept.clear()
        if self._launch is None:
            first = False
            with contextlib.suppress(Exception):
                from fasttrain.machine.patience import within

                first = within(3.0, lambda: joined.store.add("fasttrain/said", 1)) == 1
                if not first:
                    return
            if not first and self._seat.local_rank > 1:
                return
        self._say_what_is_kept()

    def _say_what_is_kept(self) -> None:
        kept, self._kept = self._kept, []
        if kept and self._launch is not None:
            self._launch.tell(lost=kept, **({"silent": True} if self._silent else {}))
            return
        for sentence in kept:
            _tell(sentence)


def _tell(sentence: str) -> None:
    from fasttrain.cli.figures import one_line
    from fasttrain.cli.printing import tell

    tell(f"fasttrain: {one_line(sentence)}")


SEVERAL = Several()
