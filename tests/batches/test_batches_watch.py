"""Workers that die or hang, processes and threads: the run ends soon, with the case and the cause, and leaves nobody behind."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from small_machine import TESTS, run_with, shared_memory

from fasttrain.batches import LoaderSource, Loading, Order, ended_worker, worker_watch
from fasttrain.batches.whereabouts import Whereabouts, begin_as
from fasttrain.errors import MachineError, OutOfMemoryError
from fasttrain.machine.limits import oom_kills
from fasttrain.samples import Grid, Sample

NAMES = [f"liver_{number}" for number in range(4)]


class Made:
    """Four small cases; reading the one that is `stuck_at` lasts until `released`."""

    def __init__(self, seconds: float = 0.0, stuck_at: int | None = None) -> None:
        self.seconds = seconds
        self.stuck_at = stuck_at
        self.released = threading.Event()

    def __len__(self) -> int:
        return len(NAMES)

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self.seconds)
        if index == self.stuck_at:
            self.released.wait(100)
        image = torch.full((1, 20, 20, 20), float(index))
        label = torch.zeros((1, 20, 20, 20), dtype=torch.uint8)
        grid = Grid((20, 20, 20), torch.eye(4).double().numpy())
        return Sample(NAMES[index], image, label, (), None, grid, grid)

    def close(self) -> None: ...


def loader(tiny, cases: Made, workers: int = 2, kind: str = "process", **more: object) -> LoaderSource:
    recipe = tiny(training__batch_size=2).recipe
    loading = Loading(workers, kind, **more)  # type: ignore[arg-type]
    return LoaderSource(
        recipe, cases, Order(len(cases), 1, 0), torch.device("cpu"), loading, case_names=NAMES, told=lambda *_: None
    )


def workers_of(source: LoaderSource) -> list[psutil.Process]:
    return [psutil.Process(process.pid) for process in getattr(source._loader, "processes", ())]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def busy(source: LoaderSource, worker: int) -> int:
    """The process of a worker that has just begun with a case."""
    moves = source._table.moves()[worker]
    while source._table.moves()[worker] == moves or source._table.case_of(worker) is None:
        time.sleep(0.005)
    return workers_of(source)[worker].pid


def ended(source: LoaderSource, stream, most_seconds: float, act=lambda: None) -> Exception:
    """What ends a stream after `act`, in how long at most; the source is closed then and has no worker left.

    torch's handler may raise in `act` itself; the engine makes the sentence from what it raised, and so does this.
    """
    began, others = time.monotonic(), set(psutil.Process().children()) - set(workers_of(source))

    def until_the_end() -> None:
        try:
            act()
            list(itertools.islice(stream, 500))
        except RuntimeError as error:
            raise ended_worker(error, source.loading.workers) or error from error

    with pytest.raises((MachineError, OutOfMemoryError)) as caught:
        until_the_end()
    source.close()
    assert time.monotonic() - began < most_seconds
    assert not alive([child for child in psutil.Process().children() if child not in others])
    return caught.value


@pytest.mark.kills_workers
def test_a_killed_worker_is_told_with_its_case_and_signal(tiny) -> None:
    source = loader(tiny, Made(seconds=0.2))
    stream = source.batches(0)
    next(stream)
    victim = busy(source, 1)
    error = ended(source, stream, 15, lambda: os.kill(victim, signal.SIGKILL))
    assert isinstance(error, MachineError)
    assert (
        f"a data loader worker ended: pid {victim} was killed by signal 9 (SIGKILL) while it was at case liver_"
        in str(error)
    )
    assert str(error).endswith("; if memory is short, lower data.workers (now 2) or data.prefetch_factor")


@pytest.mark.kills_workers
def test_a_killed_worker_and_a_risen_count_are_want_of_memory(tiny, tmp_path: Path) -> None:
    """The count is a cgroup's file, made here; the worker is real."""
    events, group = tmp_path / "cgroup/pod/memory.events", tmp_path / "self"
    events.parent.mkdir(parents=True)
    events.write_text("oom 3\noom_kill 2\n")
    group.write_text("0::/pod\n")
    source = loader(tiny, Made(seconds=0.2))
    source._watch._kills = lambda: oom_kills(tmp_path / "cgroup", group)
    stream = source.batches(0)
    next(stream)
    events.write_text("oom 4\noom_kill 3\n")
    victim = busy(source, 0)
    error = ended(source, stream, 15, lambda: os.kill(victim, signal.SIGKILL))
    assert isinstance(error, OutOfMemoryError)
    assert error.exit_code == 5
    assert "at case liver_" in str(error)
    assert (
        "the system ran out of memory (the cgroup's oom_kill count rose from 2 to 3); lower data.workers (now 2)"
        in str(error)
    )


@pytest.mark.kills_workers
@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (signal.SIGBUS, OutOfMemoryError, "/dev/shm or the disk of a mapped file is full"),
        (signal.SIGSEGV, MachineError, "native code failed; look at that case with `fasttrain check`"),
    ],
    ids=["SIGBUS", "SIGSEGV"],
)
def test_other_signals_have_other_causes(tiny, number: int, kind: type, told: str) -> None:
    source = loader(tiny, Made(seconds=0.2))
    stream = source.batches(0)
    next(stream)
    victim = busy(source, 0)
    error = ended(source, stream, 15, lambda: os.kill(victim, number))
    assert isinstance(error, kind)
    assert told in str(error)
    assert signal.Signals(number).name in str(error)


@pytest.mark.kills_workers
def test_a_death_while_the_trainer_is_elsewhere_is_the_same_sentence(tiny) -> None:
    """torch's handler raises in whatever is under way; the sentence is made from that error alone."""
    source = loader(tiny, Made(seconds=0.2))
    stream = source.batches(0)
    next(stream)
    workers, victim = workers_of(source), busy(source, 0)

    def elsewhere() -> None:
        os.kill(victim, signal.SIGKILL)
        for _ in range(500):
            time.sleep(0.01)

    with pytest.raises(RuntimeError) as caught:
        elsewhere()
    known = ended_worker(caught.value, 2)
    assert isinstance(known, MachineError)
    assert f"pid {workers[0].pid} was killed by signal 9 (SIGKILL) while it was at case liver_" in str(known)
    source.close()
    assert not alive(workers)


@pytest.mark.kills_workers
def test_a_stopped_worker_ends_the_run_with_its_case(tiny) -> None:
    source = loader(tiny, Made(seconds=0.3), most_seconds=2.0)
    stream = source.batches(0)
    next(stream)
    busy(source, 0)
    for process in workers_of(source):
        process.suspend()
    error = ended(source, stream, 40)
    assert isinstance(error, MachineError)
    assert "the data loader's workers have not moved for 2 s: pid" in str(error)
    assert "(stopped) is at case liver_" in str(error)


@pytest.mark.kills_workers
def test_a_worker_that_stops_between_cases_ends_the_run_too(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch is there, but to hand over the memory takes an answer of its: the trainer is in a read that has no end."""
    monkeypatch.setattr(worker_watch, "LOOK_SECONDS", 0.5)
    source = loader(tiny, Made(), workers=1, most_seconds=1.0)
    stream = source.batches(0)
    next(stream)
    time.sleep(0.5)  # it has made all that it may make ahead
    workers_of(source)[0].suspend()
    error = ended(source, stream, 30)
    assert isinstance(error, MachineError)
    assert "have not moved for 1 s: pid" in str(error)
    assert "(stopped) is between two cases" in str(error)


@pytest.mark.kills_workers
def test_a_stopped_worker_does_not_hold_up_a_stop(tiny) -> None:
    source = loader(tiny, Made(seconds=0.1))
    next(source.batches(0))
    workers = workers_of(source)
    workers[0].suspend()
    deadline = time.monotonic() + 30
    while workers[0].status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    source.close()
    # On a busy machine as well; without care for it the end would be waited for for ever
    assert time.monotonic() - began < 60
    assert not alive(workers)


@pytest.mark.kills_workers
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_read_that_never_ends_is_told_with_its_case(tiny, kind: str) -> None:
    cases = Made(stuck_at=2)
    source = loader(tiny, cases, kind=kind, most_seconds=2.0)
    error = ended(source, source.batches(0), 20)
    assert isinstance(error, MachineError)
    assert "is at case liver_2" in str(error)
    assert ("thread" if kind == "thread" else "pid") in str(error)
    cases.released.set()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_slow_workers_that_move_are_waited_for(tiny, kind: str) -> None:
    """A batch of two cases of 0.7 s takes longer than a second without a batch, but no worker stands still for so long."""
    source = loader(tiny, Made(seconds=0.7), workers=1, kind=kind, most_seconds=1.0)
    stream = source.batches(0)
    assert [next(stream).positions for _ in range(3)] == [(0, 1), (2, 3), (4, 5)]
    source.close()


HUNG = """
    import sys, threading, time
    sys.path[:0] = [{tests!r}, {here!r}]
    import torch
    from tiny_recipe import TINY
    from fasttrain import load_recipe
    from fasttrain.errors import MachineError
    from test_batches_watch import Made, loader
    tiny = lambda **more: load_recipe("demo", {{**TINY, **{{key.replace("__", "."): value for key, value in more.items()}}}})
    source = loader(tiny, Made(stuck_at=1), kind="thread", most_seconds=1.0)
    try:
        for batch in source.batches(0): pass
    except MachineError as error:
        print("told")
    source.close()
"""


def test_a_thread_that_hangs_does_not_keep_the_process_alive() -> None:
    script = textwrap.dedent(HUNG).format(tests=str(TESTS), here=str(Path(__file__).parent))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=TESTS.parent, timeout=80)
    assert (done.returncode, done.stdout.strip()) == (0, "told"), done.stderr
    assert time.monotonic() - began < 60


PIPED = """
    import os, sys
    sys.path[:0] = [{tests!r}, {here!r}]
    import torch
    from tiny_recipe import TINY
    from fasttrain import load_recipe
    from fasttrain.batches import LoaderSource, Loading, Order
    from test_batches_watch import Made
    recipe = load_recipe("demo", {{**TINY, "training.batch_size": 64, "patch.size": [20, 20, 20]}}).recipe
    def made(workers):
        told = []
        source = LoaderSource(
            recipe, Made(), Order(4, 1, 0), torch.device("cpu"), Loading(workers), told=lambda *words: told.append(words)
        )
        stream = source.batches(0)
        batches = [next(stream) for _ in range(6)]
        source.close()
        return batches, told
    alone, helped = made(0)[0], made(2)
    assert all(torch.equal(a.image, b.image) and a.positions == b.positions for a, b in zip(alone, helped[0]))
    print(len(helped[1]), *helped[1][0])
    print(*[name for name in os.listdir("/dev/shm") if "torch" in name])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a tmpfs of its own is Linux's")
def test_a_batch_that_shared_memory_has_no_room_for_goes_through_a_pipe() -> None:
    """Whatever the plan thought was free: batches of 2 MB, 4 of them ahead, in 4 MB that others may fill."""
    script = textwrap.dedent(PIPED).format(tests=str(TESTS), here=str(Path(__file__).parent))
    done = run_with(script, shared_memory("size=4m"), namespace=True)
    assert done.returncode == 0, done.stderr
    told, left = done.stdout.split("\n")[:2]
    assert told.startswith("1 batches go through pipes, which is slower, since /dev/shm took one no more (")
    assert told.endswith("warning")
    assert not left
    assert "Traceback" not in done.stderr


STARTED = """
    import os, resource, sys
    sys.path[:0] = [{tests!r}, {here!r}]
    from tiny_recipe import TINY
    from fasttrain import load_recipe
    from fasttrain.errors import MachineError
    from test_batches_watch import Made, loader
    import psutil
    tiny = lambda **more: load_recipe("demo", {{**TINY, **{{key.replace("__", "."): value for key, value in more.items()}}}})
    source = loader(tiny, Made(), workers=8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 14, 4096))
    try:
        next(source.batches(0))
    except MachineError as error:
        print(error)
    source.close()
    print(psutil.Process().children())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_processes_that_cannot_be_started_are_one_sentence_and_no_orphans() -> None:
    script = textwrap.dedent(STARTED).format(tests=str(TESTS), here=str(Path(__file__).parent))
    told, left = run_with(script).stdout.splitlines()
    assert told.startswith("8 worker processes cannot be started (Too many open files); set data.worker_kind: thread")
    assert left == "[]"


def test_a_workers_error_is_no_death(tiny) -> None:
    class Odd(Made):
        def __getitem__(self, index: int) -> Sample:
            raise RuntimeError("shapes differ")

    source = loader(tiny, Odd())
    with pytest.raises(RuntimeError, match="shapes differ") as caught:
        next(source.batches(0))
    source.close()
    assert ended_worker(caught.value, 2) is None


def test_the_table_outlives_its_writer_and_knows_workers_alone() -> None:
    table = Whereabouts(2)
    table.enter(7)  # this is no worker
    assert (table.case_of(0), table.case_of(1), table.moves()) == (None, None, (0, 0))
    child = os.fork()
    if child == 0:
        begin_as(1)
        table.enter(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (table.case_of(0), table.case_of(1), table.moves()) == (None, 0, (0, 1))
    table.clear()
    assert table.case_of(1) is None
