"""Owns a thread beside the one that works on, which carries out one job at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Carries out one job at a time; its result, or its error, is fetched by the thread that gave it.

    The thread ends with its job and with the process: what it had half written then is left under a temporary name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._results: list[Result] = []
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def given(self) -> bool:
        """Whether a job was given whose result nobody has fetched."""
        return self._thread is not None

    def give(self, job: Callable[[], Result]) -> None:
        """Begins a job; the one before must be fetched."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._carry_out, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def fetch(self) -> Result:
        """Waits for the job, and returns its result or raises its error."""
        assert self._thread is not None
        self._thread.join()
        results, error = self._results, self._error
        self._thread, self._results, self._error = None, [], None
        if error is not None:
            raise error
        return results[0]

    def _carry_out(self, job: Callable[[], Result]) -> None:
        try:
            self._results = [job()]
        except BaseException as error:
            self._error = error
