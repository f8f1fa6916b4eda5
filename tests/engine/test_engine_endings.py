"""How runs end that cannot go well: too short to diverge by the rule, out of memory, faulty data; and what is left after them."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch

from fasttrain import train
from fasttrain.engine.failures import explained, explaining
from fasttrain.engine.run import prepare, resume
from fasttrain.engine.step import Precision
from fasttrain.engine.stop import StopRequest
from fasttrain.engine.trainer import cures
from fasttrain.errors import DataError, DivergedError, MachineError, OutOfMemoryError, RecipeError
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import newest_unfinished
from fasttrain.telemetry.events import Event, RunEnded, StepLogged


class Heard:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None: ...


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_shorter_than_the_rule_that_only_gave_nan_is_no_success(epochs: int, tiny, phantoms, tmp_path) -> None:
    run = tmp_path / "run"
    recipe = tiny(
        training__epochs=epochs, optimizer={"kind": "sgd", "learning_rate": 1e30}, schedule={"kind": "constant"}
    )
    with pytest.raises(DivergedError, match=r"steps were not finite.*; lower optimizer.learning_rate"):
        train(recipe, data=phantoms, run=run, device="cpu")
    assert summary(run)["exit_code"] == 7
    assert summary(run)["status"] == "failed"


@pytest.mark.parametrize(
    ("amp", "cures"),
    [
        ("off", "lower optimizer.learning_rate or lengthen schedule.warmup"),
        ("bf16", "lower optimizer.learning_rate, lengthen schedule.warmup, or set acceleration.amp: off"),
    ],
)
def test_a_run_that_diverges_is_told_what_it_does_not_do_already(
    amp: str, cures: str, tiny, phantoms: Path, tmp_path: Path
) -> None:
    recipe = tiny(
        training__epochs=1,
        optimizer={"kind": "sgd", "learning_rate": 1e30},
        schedule={"kind": "constant"},
        acceleration__amp=amp,
    )
    with pytest.raises(DivergedError) as caught:
        train(recipe, data=phantoms, run=tmp_path / "run", device="cpu")
    assert f"; {cures};" in f"{caught.value};"


@pytest.mark.parametrize(("capability", "better"), [((9, 0), "bf16"), ((7, 5), "off")])
def test_fp16_that_diverges_is_sent_to_what_the_card_has(
    capability: tuple[int, int], better: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    step = SimpleNamespace(
        precision=Precision("cuda", torch.float16, None), last_loss=SimpleNamespace(device=torch.device("cuda"))
    )
    assert cures(step).endswith(f"or set acceleration.amp: {better}")


def test_a_sound_run_of_one_epoch_is_a_success(tiny, phantoms: Path, tmp_path: Path) -> None:
    result = train(tiny(training__epochs=1), data=phantoms, run=tmp_path / "run", device="cpu")
    assert result.exit_code == 0


def test_what_the_allocators_say_becomes_a_sentence(tiny) -> None:
    recipe = tiny().recipe
    for fill in (lambda: torch.empty(1 << 52), lambda: np.empty(1 << 52)):
        with (
            pytest.raises(OutOfMemoryError, match=r"this machine ran out of memory.*training.batch_size \(now 2\)"),
            explaining(recipe),
        ):
            fill()
    on_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")
    assert str(explained(on_gpu, recipe, 0)).startswith(
        "the GPU ran out of memory when 20.00 GiB more were asked for; lower"
    )
    pinned = RuntimeError("Pin memory thread exited unexpectedly")
    assert isinstance(explained(pinned, recipe, 2), MachineError)
    assert explained(RuntimeError("shapes differ"), recipe, 0) is None
    assert explained(DataError("a fault"), recipe, 0) is None


def test_too_little_memory_for_the_network_is_exit_5(tiny, phantoms: Path, tmp_path: Path) -> None:
    wide = tiny(
        network={"kind": "unet", "features": [10_000_000, 10_000_000], "strides": [2]},
        acceleration__channels_last="auto",
    )
    with pytest.raises(OutOfMemoryError, match="ran out of memory when .* GiB more were asked for"):
        train(wide, data=phantoms, run=tmp_path / "run", device="cpu")
    wide = tiny(network={"kind": "unet", "features": [10_000_000, 10_000_000], "strides": [2]})
    with pytest.raises(OutOfMemoryError):
        train(wide, data=phantoms, run=tmp_path / "run", device="cpu")
    told = summary(tmp_path / "run")
    assert (told["status"], told["exit_code"]) == ("failed", 5)
    assert "memory" in told["error"]


@pytest.fixture
def faulty(phantoms: Path, tmp_path: Path) -> Path:
    """Three faulty cases: a training label with a foreign value, a training image cut short, a validation image of NaN."""
    root = tmp_path / "faulty"
    shutil.copytree(phantoms, root)
    images, labels = sorted(root.rglob("imagesTr/*.nii.gz")), sorted(root.rglob("labelsTr/*.nii.gz"))
    label = nib.load(labels[0])
    values = np.asarray(label.dataobj).copy()
    values[0, 0, 0] = 9
    nib.save(nib.Nifti1Image(values, label.affine), labels[0])
    images[1].write_bytes(images[1].read_bytes()[:5000])
    image = nib.load(images[-1])
    nib.save(nib.Nifti1Image(np.full(image.shape, np.nan, np.float32), image.affine), images[-1])
    return root


@pytest.mark.parametrize("cache", ["memory", "none"])
@pytest.mark.parametrize("header_too", [False, True])
def test_the_faults_of_all_parts_are_listed_together(
    cache: str, header_too: bool, tiny, faulty: Path, tmp_path: Path
) -> None:
    if header_too:
        sorted(faulty.rglob("imagesTr/*.nii.gz"))[2].write_bytes(b"no image at all")
    with pytest.raises(DataError) as caught:
        train(_folders(tiny, data__cache__kind=cache), data=faulty, run=tmp_path / "run", device="cpu")
    cases = {
        case for case in ("000", "001", "002", "005") for fault in caught.value.faults if f"{case}.nii.gz" in fault
    }
    assert len(cases) == 3 + header_too, caught.value.faults


def _folders(tiny, **more: object):
    """The phantoms as plain folders: as phantoms they would be made anew."""
    source = {"kind": "folders", "images": "imagesTr", "labels": "labelsTr"}
    return tiny(data__source=source, **more)


def test_a_run_that_failed_before_its_first_step_makes_room(tiny, phantoms: Path, tmp_path: Path) -> None:
    run, heard = tmp_path / "runs" / "one", Heard()
    wide = tiny(network={"kind": "unet", "features": [10_000_000, 10_000_000], "strides": [2]})
    with pytest.raises(OutOfMemoryError):
        train(wide, data=phantoms, run=run, device="cpu", observers=[heard])
    ended = [event for event in heard.events if isinstance(event, RunEnded)]
    assert [event.resume_command for event in ended] == [None]
    assert newest_unfinished(tmp_path / "runs") == (None, run)
    result = train(_folders(tiny), data=phantoms, run=run, device="cpu")
    assert result.exit_code == 0
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events.count("RunStarted") == 1


def test_a_run_that_took_steps_makes_no_room(tiny, phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    diverging = tiny(
        training__epochs=1, optimizer={"kind": "sgd", "learning_rate": 1e30}, schedule={"kind": "constant"}
    )
    with pytest.raises(DivergedError):
        train(diverging, data=phantoms, run=run, device="cpu")
    with pytest.raises(RecipeError, match="already holds a run"):
        train(tiny(), data=phantoms, run=run, device="cpu")


def test_the_seconds_of_all_sessions_count(tiny, phantoms: Path, tmp_path: Path) -> None:
    run, stop = tmp_path / "run", StopRequest()

    class Stopper(Heard):
        def on_event(self, event: Event) -> None:
            if isinstance(event, StepLogged) and event.step == 7:
                stop.ask("a test", 143)

    train(tiny(), data=phantoms, run=run, device="cpu", observers=[Stopper()], stop=stop)
    first = summary(run)["seconds"]
    resume(run)
    whole = summary(run)["seconds"]
    assert whole["total"] > first["total"] + 0.1
    assert whole["training"] > first["training"]
    assert whole["total"] > whole["training"] + whole["validation"]


def test_a_folder_is_claimed_once_in_a_process_too(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other" / ".." / "run")
    (tmp_path / "other").mkdir()
    first.create()
    with pytest.raises(Exception, match="in use by this process"):
        second.claim()
    first.release()
    second.claim()
    second.release()


def test_a_dry_run_of_an_unreadable_header_lists_all_faults(tiny, faulty: Path) -> None:
    sorted(faulty.rglob("imagesTr/*.nii.gz"))[2].write_bytes(b"no image at all")
    with pytest.raises(DataError) as caught:
        prepare(_folders(tiny).recipe, faulty, "cpu")
    assert len(caught.value.faults) >= 4
