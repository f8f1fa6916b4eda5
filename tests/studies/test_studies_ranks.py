"""Trials of several ranks in real processes: what they measure together, and that all end with one that fails, dies or hangs."""

import contextlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fasttrain.data.outcomes import one_outcome
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_DATA, EXIT_INTERRUPTED, DataError
from fasttrain.machine.place import Place
from fasttrain.machine.ranks import ONLY_ONE
from fasttrain.studies import trial_server
from fasttrain.studies.task import STEPS, VALIDATION, Task
from fasttrain.studies.trial_files import answer_of
from fasttrain.studies.trial_ranks import leave_word_to_another, of_all
from fasttrain.studies.trials import TrialServer
from fasttrain.telemetry.events import Event, Progress

LONG = 100.0


@pytest.fixture(scope="module")
def stop() -> StopRequest:
    return StopRequest()


@pytest.fixture(scope="module")
def heard() -> list[Callable[[Event], object]]:
    """What is done with the next events."""
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, stop: StopRequest, heard: list) -> Iterator[TrialServer]:
    def on_event(event: Event) -> None:
        for one in heard:
            one(event)

    with pytest.MonkeyPatch.context() as patch:
        # As the command sets them before it starts the server
        for name, value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE")):
            patch.setenv(name, value)
        found = TrialServer(tmp_path_factory.mktemp("trials"), on_event, stop)
    yield found
    found.close()


@pytest.fixture(scope="module")
def task(tiny, phantoms: Path):
    def made(kind: str, data: Path | None = None, **more: object) -> Task:
        return Task(kind, tiny(**more).recipe.model_dump_json(), str(data or phantoms), "cpu", ranks=2)

    return made


def rank_of(server: TrialServer, name: str, rank: int) -> psutil.Process:
    """By the log that takes the place of its output."""
    log = f"{name}.rank{rank}.log" if rank else f"{name}.log"
    above, until = psutil.Process(server._process.pid), time.monotonic() + 60
    while time.monotonic() < until:
        for child in above.children():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{child.pid}/fd/1").endswith(log):
                    return child
        time.sleep(0.01)
    raise TimeoutError(log)


def once_it_runs(
    server: TrialServer, name: str, rank: int, act: Callable[[psutil.Process], object]
) -> threading.Thread:
    """Does something to a rank of the next trial as soon as it is there."""
    thread = threading.Thread(target=lambda: act(rank_of(server, name, rank)), daemon=True)
    thread.start()
    return thread


def below(server: TrialServer) -> list[psutil.Process]:
    return [
        one
        for one in psutil.Process(server._process.pid).children(recursive=True)
        if one.status() != psutil.STATUS_ZOMBIE
    ]


def test_all_ranks_take_the_steps_and_their_patches_are_counted_together(server: TrialServer, task) -> None:
    outcome = server.run(task(STEPS, training__batch_size=3), "steps", LONG)
    assert outcome.done, outcome.faults
    assert outcome.rank is None
    assert outcome.values["plan"]["cache"] == "memory"
    assert outcome.values["rate"] == max(outcome.values["repeats"]) > 0
    # A rank's own answer has the very figures that the others' have, since all take every step together
    other = json.loads((server.folder / "steps.rank1.answer.json").read_text())
    assert other["status"] == "done"
    assert other["values"]["rate"] == pytest.approx(outcome.values["rate"], rel=0.3)
    assert other["values"]["wait_share"] == outcome.values["wait_share"]
    assert not below(server)


def test_memory_that_runs_out_in_one_rank_ends_both_and_is_that_ranks(server: TrialServer, task, heard: list) -> None:
    def shrink(event: Event) -> None:
        if isinstance(event, Progress) and event.what.startswith("measuring"):
            process = rank_of(server, "short", 1)
            # The system gives it no more memory from here on
            process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms // 2,) * 2)
            heard.clear()

    heard.append(shrink)
    # What a layer asks for is too much to be found in what the process has already
    wide = {"kind": "dynunet", "features": [16, 8, 8], "strides": [2, 2]}
    large = task(STEPS, training__batch_size=20, patch__size=[32, 32, 32], data__spacing=[3.0] * 3, network=wide)
    began = time.monotonic()
    outcome = server.run(large, "short", LONG)
    assert (outcome.status, outcome.rank) == ("memory", 1), outcome.faults
    assert outcome.log.endswith("short.rank1.log")
    assert time.monotonic() - began < LONG / 2
    assert not below(server)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_trial_at_once(server: TrialServer, task, rank: int) -> None:
    watch = once_it_runs(server, f"dead-{rank}", rank, lambda one: one.send_signal(signal.SIGSEGV))
    outcome = server.run(task(STEPS), f"dead-{rank}", LONG)
    watch.join()
    assert (outcome.status, outcome.rank) == ("failed", rank)
    assert outcome.faults == (f"rank {rank}: SIGSEGV ended its process",)
    assert not below(server)


def test_a_rank_that_hangs_ends_the_trial_at_its_limit(server: TrialServer, task) -> None:
    watch = once_it_runs(server, "frozen", 1, lambda one: one.suspend())
    outcome = server.run(task(STEPS), "frozen", 2.5)
    watch.join()
    assert (outcome.status, outcome.faults) == ("hung", ("ended after 2.5 s",))
    assert not below(server)


def test_what_the_first_rank_finds_wrong_is_told_and_the_others_end(server: TrialServer, task, tmp_path: Path) -> None:
    outcome = server.run(task(STEPS, tmp_path / "nowhere", data__source={"kind": "nnunet"}), "nowhere", LONG)
    assert (outcome.status, outcome.exit_code) == ("failed", EXIT_DATA)
    assert "nowhere" in outcome.faults[0]
    assert not below(server)


def test_one_rank_validates_and_the_other_waits(server: TrialServer, task) -> None:
    outcome = server.run(task(VALIDATION), "validation", LONG)
    assert outcome.done, outcome.faults
    assert outcome.values["case"].startswith("phantom_")


def test_a_stop_ends_every_rank(server: TrialServer, task, stop: StopRequest) -> None:
    # The last test of this server
    once_it_runs(server, "stopped", 1, lambda one: stop.ask("Ctrl-C", EXIT_INTERRUPTED))
    with pytest.raises(Stopped):
        server.run(task(STEPS), "stopped", LONG)
    ranks = below(server)
    server.close()
    assert ranks
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


class Fourth:
    """The third of four ranks, all of which have the same figures but for what each of them is given."""

    place = Place(2, 4, 2, 4)

    def __init__(self, **of_each: list) -> None:
        self.of_each = of_each

    def gather(self, value: dict) -> list[dict]:
        return [{**value, **{key: values[rank] for key, values in self.of_each.items()}} for rank in range(4)]


def test_the_memory_is_that_of_the_fullest_rank_and_the_wait_the_longest() -> None:
    gib = 1 << 30
    ranks = Fourth(
        reserved_bytes=[9 * gib, 8 * gib, 9 * gib, 9 * gib],
        # Something else holds a part of the second card
        free_bytes=[20 * gib, 10 * gib, 20 * gib, 20 * gib],
        wait_share=[0.0, 0.1, 0.3, 0.0],
        utilisation=[1.0, 0.5, None, 0.9],
        retries=[0, 1, 0, 1],
        warnings=[[], ["slow"], ["slow"], []],
    )
    found = of_all(ranks, {"rate": 5.0, "reserved_bytes": 9 * gib, "free_bytes": 20 * gib, "start_seconds": 1.0})
    assert (found["reserved_bytes"], found["free_bytes"], found["fullest_rank"]) == (8 * gib, 10 * gib, 1)
    assert found["reserved_by_rank"] == [9 * gib, 8 * gib, 9 * gib, 9 * gib]
    assert (found["wait_share"], found["utilisation"], found["retries"]) == (0.3, pytest.approx(0.8), 2)
    assert (found["warnings"], found["rate"], found["start_seconds"]) == (["slow"], 5.0, 1.0)
    # One rank has its own
    assert of_all(ONLY_ONE, {"rate": 5.0, "reserved_bytes": 1}) == {"rate": 5.0, "reserved_bytes": 1}


def raised(work: Callable[[], object]) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_who_merely_notices_that_another_failed_waits_to_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("fasttrain.studies.trial_ranks.time.sleep", waited.append)

    def waits(error: Exception, place: Place, memory: bool = False) -> bool:
        waited.clear()
        leave_word_to_another(error, error, place, memory)
        return bool(waited)

    first, second = Place(0, 2, 0, 2), Place(1, 2, 1, 2)
    own = raised(out_of_memory)
    # As it comes from there
    other = pickle.loads(pickle.dumps(own))
    of_another = raised(lambda: one_outcome(lambda mine: [mine, other], lambda: None))
    of_its_own = raised(lambda: one_outcome(lambda mine: [mine, None], out_of_memory))
    assert waits(of_another, first, memory=True)
    assert not waits(of_its_own, second, memory=True)
    assert not waits(own, second, memory=True)
    assert waits(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"), first)
    # NCCL's own want of memory is one
    assert not waits(
        RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), first, memory=True
    )
    # What all find wrong alike is the first one's to tell
    assert waits(DataError("a.nii.gz: unreadable"), second)
    assert not waits(DataError("a.nii.gz: unreadable"), first)
    assert not waits(ZeroDivisionError(), second)
    assert not waits(RuntimeError("gloo: connection closed by peer"), Place())


def test_a_rank_that_has_answered_and_cannot_end_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "batch-2.json"
    processes = SimpleNamespace(alive=[0, 1])
    answered: dict[int, float] = {}
    assert trial_server._stuck({"task": str(task)}, processes, answered) is None
    answer_of(task, 1).write_text("{}")
    assert trial_server._stuck({"task": str(task)}, processes, answered) is None
    monkeypatch.setattr(trial_server, "_TO_END_SECONDS", 0.0)
    assert trial_server._stuck({"task": str(task)}, processes, answered) == 1
    processes.alive.remove(1)
    assert trial_server._stuck({"task": str(task)}, processes, answered) is None
