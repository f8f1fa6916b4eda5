"""Trials of several ranks in real processes: what they measure together, and that all end with the one that fails, dies or hangs."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_DATA, EXIT_INTERRUPTED
from fasttrain.studies.task import STEPS, VALIDATION, Task
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
        if isinstance(event, Progress) and event.what.startswith("measuring") and event.done:
            process = rank_of(server, "short", 1)
            # The system gives it no more memory from here on
            process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms // 2,) * 2)
            heard.clear()

    heard.append(shrink)
    large = task(STEPS, training__batch_size=72, patch__size=[32, 32, 32], data__spacing=[3.0, 3.0, 3.0])
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
