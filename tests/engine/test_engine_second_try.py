"""Memory that runs out in a run: the first steps step the batch down once, later steps end with exit 5 and a checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from fasttrain import train
from fasttrain.checkpoints import read_checkpoint
from fasttrain.engine.run import RunResult, resume
from fasttrain.engine.step import Step
from fasttrain.errors import EXIT_OUT_OF_MEMORY, OutOfMemoryError
from fasttrain.recipe import resolve
from fasttrain.telemetry.events import Event, Message

TOLD = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"


class Messages:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Message):
            self.texts.append(event.text)

    def close(self) -> None: ...


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch):
    """Passes of more patches than `limit` run out of memory from the step `after` on, as torch tells it."""

    def set_to(limit: int, after: int = 0, error: type[Exception] = torch.OutOfMemoryError, text: str = TOLD) -> None:
        whole, taken = Step._pass, [0]

        def short(self: Step, batch):
            taken[0] += 1
            if batch.image.shape[0] > limit and taken[0] > after:
                raise error(text)
            return whole(self, batch)

        monkeypatch.setattr(Step, "_pass", short)

    return set_to


def losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "StepLogged"}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError, TOLD),
        (RuntimeError, "CUDA error: out of memory"),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=["torch", "CUDA", "cuBLAS", "cuDNN"],
)
def test_the_first_steps_step_the_batch_down(
    tiny, phantoms: Path, tmp_path: Path, little_memory, error: type[Exception], text: str
) -> None:
    little_memory(1, after=2, error=error, text=text)
    heard = Messages()
    result = train(tiny(training__epochs=1), data=phantoms, run=tmp_path / "run", device="cpu", observers=[heard])
    assert result.exit_code == 0
    told = [one for one in heard.texts if "stepped down" in one]
    assert len(told) == 1
    assert "training.batch_size 2 → 1, training.accumulate 1 → 2; the effective batch of 2" in told[0]
    training = resolve(str(tmp_path / "run" / "recipe.yaml")).recipe.training
    assert (training.batch_size, training.accumulate) == (1, 2)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["sizes"]["accumulate"] == 2
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]


def test_what_is_trained_then_is_what_two_passes_a_step_train(
    tiny, phantoms: Path, tmp_path: Path, little_memory
) -> None:
    whole = train(
        tiny(training__epochs=1, training__batch_size=1, training__accumulate=2),
        data=phantoms,
        run=tmp_path / "asked",
        device="cpu",
    )
    little_memory(1)
    short = train(tiny(training__epochs=1), data=phantoms, run=tmp_path / "short", device="cpu")
    assert losses(short.run) == losses(whole.run)


def test_it_is_tried_once_only(tiny, phantoms: Path, tmp_path: Path, little_memory) -> None:
    little_memory(0)
    heard = Messages()
    with pytest.raises(OutOfMemoryError):
        train(tiny(training__batch_size=4), data=phantoms, run=tmp_path / "run", device="cpu", observers=[heard])
    assert sum("stepped down" in one for one in heard.texts) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == EXIT_OUT_OF_MEMORY


def test_another_error_in_the_first_steps_is_no_reason_to_step_down(
    tiny, phantoms: Path, tmp_path: Path, little_memory
) -> None:
    little_memory(1, error=RuntimeError, text="CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(tiny(), data=phantoms, run=tmp_path / "run", device="cpu")


def test_later_it_ends_with_a_checkpoint_from_which_the_run_goes_on(
    tiny, phantoms: Path, tmp_path: Path, little_memory, whole_run: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context():
        little_memory(1, after=8)
        with pytest.raises(OutOfMemoryError):
            train(tiny(), data=phantoms, run=run, device="cpu")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit_code"], summary["status"], summary["steps"]) == (EXIT_OUT_OF_MEMORY, "failed", 8)
    assert read_checkpoint(run / "checkpoints" / "last.pt")["progress"]["step"] == 8
    monkeypatch.undo()
    assert resume(run, device="cpu").exit_code == 0
    assert losses(run) == losses(whole_run.run)
