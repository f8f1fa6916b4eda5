"""Owns the one flag by which a run is asked to end early: signals, limits and pruning all set it."""

from __future__ import annotations

from fasttrain.errors import EXIT_DONE


class StopRequest:
    """Asked for from anywhere, a signal handler among it; looked at between steps and between cases."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.exit_code = EXIT_DONE
        self.begun = False
        """False until there is work that must be ended in order: whoever asks before that need not wait for an answer."""

    def ask(self, reason: str, exit_code: int) -> None:
        """The first reason stands; a later one changes nothing."""
        if self.reason is None:
            self.reason, self.exit_code = reason, exit_code

    @property
    def asked(self) -> bool:
        """True once anything asked for a stop."""
        return self.reason is not None

    def check(self) -> None:
        """Raises Stopped where a stop was asked for; for phases that have no state of their own to save."""
        if self.asked:
            raise Stopped


class Stopped(Exception):  # noqa: N818 - not an error: the run ends because it was told to
    """Carries the run out of start-up or validation to where it is saved and ended."""
