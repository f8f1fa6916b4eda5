"""Owns how a signal ends a command that does not answer it by itself, from the first line on: one sentence, never a traceback.

An exception would do for a command under way, but not while modules are loaded: where it comes up in what the interpreter calls
by the way, it is printed with its traceback and then lost.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading

from fasttrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

TYPE_CHECKING = False  # typing's own would have to be loaded
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGUSR1: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
}


class Unwound(BaseException):
    """A signal ends what `unwinding` encloses. No Exception: what goes on after a failure is not to go on after this."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = _CODES[signal.Signals(number)]
        self.name = _name(number)


def end_on_signals() -> None:
    """From now on, where no command's own answer is in place."""
    # What is registered first comes last
    atexit.register(_ignore)
    try:
        _answer(_end)
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)


def raise_on_ctrl_c() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt, as Python has it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with(exit_code: int, first: Callable[[], None] = lambda: None) -> None:
    """From now on all is done: a signal only hastens the end, and changes nothing about it. first: what is to be ended before."""

    def end(number: int, frame: object) -> None:
        first()
        os._exit(exit_code)

    _answer(end)


@contextlib.contextmanager
def unwinding() -> Iterator[Callable[[], None]]:
    """In the scope a signal ends all child processes and raises Unwound, so that half-made files are removed on its way out.

    Where an exception is lost, as in what the interpreter calls by the way, a second signal ends the process all the same. Gives
    what is called when all is made: the little that is left is then done, and the first signal changes nothing about it.
    """

    def unwind(number: int, _: object) -> None:
        _answer(_end)
        kill_children()
        raise Unwound(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    former = {number: signal.getsignal(number) for number in _CODES}
    try:
        _answer(unwind)
        yield lambda: _answer(lambda number, _: _answer(_end))
    except Unwound:
        # It may have come up while something half-made was removed
        end_traceless()
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _answer(handler: object) -> None:
    for number in _CODES:
        # A shell that runs a command with & has it ignore Ctrl-C, which is meant for what is in front, and nohup a lost terminal
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def _ignore() -> None:
    """The interpreter takes handlers back before it unloads torch, which takes a while: the exit code must not be lost in it."""
    _answer(signal.SIG_IGN)


def _end(number: int, frame: object) -> None:
    # A second signal ends the process even where nobody takes the sentence
    for one in _CODES:
        signal.signal(one, signal.SIG_DFL)
    code = _CODES[signal.Signals(number)]
    if _is_silent(number):
        os._exit(code)
    end_traceless()
    with contextlib.suppress(OSError):
        os.write(2, f"fasttrain: stopped by {_name(number)}\n".encode())
    os._exit(code)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _is_silent(number: int) -> bool:
    """Of several ranks the first has the word, and none where the launcher ends those that are left when one has ended."""
    _, _, launch = os.environ.get("FASTTRAIN_LAUNCHER", "").partition(":")
    if launch and number == signal.SIGTERM and not os.path.exists(os.path.join(launch, "asked")):
        if os.environ.get("RANK") == "0":
            # It may have been meant for this rank, or for all that the machine runs: who started it then has the word
            with contextlib.suppress(OSError):
                os.close(os.open(os.path.join(launch, "unsaid"), os.O_CREAT | os.O_WRONLY))
        return True
    return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


def end_traceless() -> None:
    """Just before this process ends at once: no process and no half-made file of its own is left."""
    kill_children()
    # A command that writes has loaded it; while it is being loaded, it has no such function yet
    remove = getattr(sys.modules.get("fasttrain.whole_files"), "remove_half_made", None)
    if remove is not None:
        with contextlib.suppress(Exception):
            remove()


def kill_children() -> None:
    """All that this process started, and what they started."""
    own = os.getpid()
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                    # The name of a program, in brackets, may hold anything
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    for child in parents:
        above: int | None = parents[child]
        while above not in (None, 0, own):
            above = parents.get(above or 0)
        if above == own:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
