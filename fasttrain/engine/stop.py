"""Owns the one flag by which a run is asked to end early: signals, limits and pruning all set it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from fasttrain.errors import EXIT_DONE


class StopRequest:
    """Asked for from anywhere, a signal handler among it; looked at between steps and between cases."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.exit_code = EXIT_DONE
        self.begun = False
        """False until there is work that must be ended in order: whoever asks before that need not wait for an answer."""
        self.goes_on_with: str | None = None
        """The command line that goes on with the run, once there is one."""
        self.told = False
        """True once the run's own last line has said it: whoever ends the process after that need not."""
        self._lock = threading.Lock()
        self._save: Callable[[], None] | None = None

    def ask(self, reason: str, exit_code: int) -> None:
        """The first reason stands; a later one changes nothing."""
        if self.reason is None:
            self.reason, self.exit_code = reason, exit_code

    @property
    def asked(self) -> bool:
        """True once anything asked for a stop."""
        return self.reason is not None

    def has_told(self) -> None:
        """The run's own last line was printed."""
        self.told = True

    def check(self) -> None:
        """Raises Stopped where a stop was asked for; for phases that have no state of their own to save."""
        if self.asked:
            raise Stopped

    def at_rest(self, save: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """A scope in which the run may be ended from another thread, since nothing of its state changes.

        What it is at may not look at the flag for long: a compiler, a large case. save: writes what no checkpoint holds yet, from
        that thread; by default there is nothing such.
        """
        return self._at_rest(save)

    @contextlib.contextmanager
    def _at_rest(self, save: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            former, self._save = self._save, save
        try:
            yield
        finally:
            # Waits for a save that is under way, after which the process ends
            with self._lock:
                self._save = former

    def end_at_rest(self, end: Callable[[], None]) -> None:
        """Where the run is at rest: saves, then calls `end`, which ends the process; else returns at once."""
        with self._lock:
            if self._save is not None:
                self._save()
                end()


class Following(StopRequest):
    """Asked for by its own run, or by whoever asks the whole."""

    def __init__(self, whole: StopRequest) -> None:
        self._whole = whole
        super().__init__()

    @property
    def asked(self) -> bool:
        if self._whole.asked and self.reason is None:
            self.reason, self.exit_code = self._whole.reason, self._whole.exit_code
        return self.reason is not None

    def has_told(self) -> None:
        """The line of a fold that was cut short says how the whole goes on."""
        super().has_told()
        if self._whole.asked:
            self._whole.has_told()

    def at_rest(self, save: Callable[[], None] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """Whoever ends the process asks the whole."""
        return self._whole.at_rest(save)


class Stopped(Exception):  # noqa: N818 - not an error: the run ends because it was told to
    """Carries the run out of start-up or validation to where it is saved and ended."""
