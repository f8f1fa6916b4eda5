"""Trials in real processes: what one measures, and that each ends, however it goes."""

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

from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import EXIT_DATA, EXIT_INTERRUPTED, StorageError
from fasttrain.studies.task import LOOK, STEPS, VALIDATION, Task
from fasttrain.studies.trials import TrialServer
from fasttrain.telemetry.events import Event, Message, Progress

LONG = 100.0


@pytest.fixture(scope="module")
def stop() -> StopRequest:
    return StopRequest()


@pytest.fixture(scope="module")
def heard() -> list[Event]:
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, stop: StopRequest, heard: list[Event]):
    found = TrialServer(tmp_path_factory.mktemp("trials"), heard.append, stop)
    yield found
    found.close()


@pytest.fixture(scope="module")
def task(tiny, phantoms: Path):
    def made(kind: str, data: Path | None = None, **more: object) -> Task:
        return Task(kind, tiny(**more).recipe.model_dump_json(), str(data or phantoms), "cpu")

    return made


def test_a_look_finds_machine_and_sizes(server: TrialServer, task) -> None:
    outcome = server.run(task(LOOK), "look", LONG)
    assert outcome.done
    assert outcome.values["sizes"]["training_cases"] == 4
    assert outcome.values["machine"]["gpu_bytes"] is None


def test_steps_are_measured(server: TrialServer, task, heard: list[Event]) -> None:
    outcome = server.run(task(STEPS, training__batch_size=4), "steps", LONG)
    assert outcome.done, outcome.faults
    assert len(outcome.values["repeats"]) >= 3
    assert outcome.values["rate"] == max(outcome.values["repeats"]) > 0
    assert 0 <= outcome.values["wait_share"] <= 1
    assert outcome.values["plan"]["cache"] == "memory"
    assert any(isinstance(event, Progress) and event.what == "measuring batch 4" for event in heard)


def test_the_largest_case_is_validated(server: TrialServer, task) -> None:
    outcome = server.run(task(VALIDATION), "validation", LONG)
    assert outcome.done, outcome.faults
    assert outcome.values["case"].startswith("phantom_")
    assert outcome.values["validation_seconds"] > 0


def test_a_hung_trial_is_ended_at_its_limit_and_the_next_one_runs(server: TrialServer, task) -> None:
    began = time.monotonic()
    outcome = server.run(task(STEPS), "hung", 0.1)
    assert (outcome.status, outcome.faults) == ("hung", ("ended after 0.1 s",))
    assert time.monotonic() - began < 10
    assert server.run(task(LOOK), "look", LONG).done


def test_an_error_of_the_user_keeps_its_sentence_and_code(server: TrialServer, task, tmp_path: Path) -> None:
    outcome = server.run(task(LOOK, tmp_path / "nowhere", data__source={"kind": "nnunet"}), "nowhere", LONG)
    assert (outcome.status, outcome.exit_code) == ("failed", EXIT_DATA)
    assert "nowhere" in outcome.faults[0]
    assert "nowhere" in Path(outcome.log).read_text()


def test_a_crash_is_a_failure_and_not_taken_for_want_of_memory(server: TrialServer, task) -> None:
    killer = threading.Thread(target=kill_child_of, args=(server._process.pid, signal.SIGSEGV))
    killer.start()
    outcome = server.run(task(STEPS), "crash", LONG)
    killer.join()
    assert outcome.status == "failed"
    assert outcome.faults == ("SIGSEGV ended its process",)


def test_what_cannot_be_written_down_is_told_as_that(server: TrialServer, task) -> None:
    # As a full disk would have it: neither a log nor an answer can be made
    (server.folder / "unwritable.log").mkdir()
    outcome = server.run(task(LOOK), "unwritable", LONG)
    assert outcome.status == "failed"
    assert outcome.faults[0].startswith("IsADirectoryError: ")
    (server.folder / "no-answer.answer.json").mkdir()
    with pytest.raises(StorageError, match="no-answer"):
        server.run(task(LOOK), "no-answer", LONG)
    assert server.run(task(LOOK), "look", LONG).done


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.",
    ],
)
def test_every_form_of_out_of_memory_counts_as_one(task, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    from fasttrain.studies import trial

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(trial, "build", no_memory)
    assert trial.perform(task(STEPS), lambda event: None)["status"] == "memory"
    monkeypatch.setattr(trial, "build", lambda *_, **__: 1 / 0)
    assert trial.perform(task(STEPS), lambda event: None)["status"] == "failed"


def test_messages_are_told_once(server: TrialServer, heard: list[Event]) -> None:
    texts = [event.text for event in heard if isinstance(event, Message)]
    assert len(texts) == len(set(texts))


def test_a_stop_ends_the_trial_under_way(task, tmp_path: Path) -> None:
    stop = StopRequest()
    server = TrialServer(tmp_path, lambda event: stop.ask("Ctrl-C", EXIT_INTERRUPTED), stop)
    try:
        with pytest.raises(Stopped):
            server.run(task(STEPS), "stopped", LONG)
        trials = psutil.Process(server._process.pid).children()
    finally:
        server.close()
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in trials)


def test_nothing_outlives_the_process_that_asked(task, tmp_path: Path) -> None:
    import json

    script = """
        import json, sys
        from pathlib import Path
        from fasttrain.engine.stop import StopRequest
        from fasttrain.studies.task import Task
        from fasttrain.studies.trials import TrialServer
        server = TrialServer(Path(sys.argv[1]), lambda event: print("going", flush=True), StopRequest())
        print(server._process.pid, flush=True)
        while True:
            server.run(Task(**json.loads(sys.argv[2])), "endless", 100.0)
    """
    words = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), json.dumps(task(STEPS).record())]
    asker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    server = psutil.Process(int(asker.stdout.readline()))
    asker.stdout.readline()
    below = [server, *server.children(recursive=True)]
    asker.kill()
    asker.wait()
    gone, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
    assert len(gone) >= 2


def test_the_server_never_asks_for_a_gpu() -> None:
    """What it imports must leave CUDA asleep, or no trial could use it."""
    script = """
        import torch
        asked = []
        for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties"):
            setattr(torch.cuda, name, lambda *_, name=name, **__: asked.append(name) or False)
        from fasttrain.studies.trial_server import _load
        _load()
        import threading
        assert not asked, asked
        assert threading.active_count() == 1
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )


def kill_child_of(parent: int, number: int) -> None:
    server = psutil.Process(parent)
    for _ in range(1000):
        for child in server.children():
            # Once it is a trial of its own, with a log in the place of its output
            if os.readlink(f"/proc/{child.pid}/fd/1").endswith("crash.log"):
                os.kill(child.pid, number)
                return
        time.sleep(0.005)
