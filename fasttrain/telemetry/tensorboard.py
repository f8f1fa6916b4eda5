"""Owns the event files that TensorBoard shows: the figures of a run as scalars over its optimiser steps."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttrain.errors import MachineError, StorageError
from fasttrain.telemetry.events import EpochEnded, Event, StepLogged
from fasttrain.telemetry.line_file import PatientFile


def require_tensorboard() -> None:
    """Raises MachineError where the package is not installed or cannot be imported."""
    _parts()


class TensorBoardLog:
    """Observer that adds the scalars of each `StepLogged` and `EpochEnded` to a new event file in `folder`.

    The records are written by tensorboard's RecordWriter, since torch's SummaryWriter imports TensorFlow wherever that is
    installed, and keeps a thread; here an event is one unbuffered write, which a killed process cannot lose.
    first_step: of a run that is resumed the first step that is logged again; readers drop what earlier files in `folder`
    have from it on. What a full disk refuses is held and written later. Raises MachineError where the package is missing,
    StorageError where the file cannot be written, or in the end could not be.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        self._event, self._summary, self._session, writer = _parts()
        self._path = _new_file(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = writer(PatientFile(self._path, "xb"))
        except OSError as error:
            raise self._fault(error) from error
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=self._session(status=self._session.START))

    def on_event(self, event: Event) -> None:
        """Writes the scalars of a logged step or of an epoch; other events have none."""
        if isinstance(event, StepLogged):
            self._scalars(event.step, _of_step(event))
        elif isinstance(event, EpochEnded):
            self._scalars(event.step, _of_epoch(event))

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._writer.closed:
            return
        try:
            self._writer.close()
        except OSError as error:
            raise self._fault(error) from error

    def _scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        known = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        self._write(step=step, summary=self._summary(value=known))

    def _write(self, **content: Any) -> None:
        if self._writer.closed:
            return
        try:
            self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self._path} cannot be written: {error.strerror or error}; free space there, or choose another folder with "
            "--run, or set output.tensorboard: false"
        )


def _of_step(event: StepLogged) -> dict[str, float | None]:
    return {
        "training/loss": event.loss,
        "training/learning_rate": event.learning_rate,
        "speed/patches_per_second": event.patches_per_second,
        "speed/wait_share": event.wait_share,
        "gpu/utilisation": event.gpu_utilisation,
        "gpu/gib": event.gpu_gib,
    }


def _of_epoch(event: EpochEnded) -> dict[str, float | None]:
    """The epoch's mean loss, pace and scores; tags of its own, since the steps' figures are those of a few steps each."""
    values: dict[str, float | None] = {
        "epoch/number": event.epoch,
        "epoch/loss": event.train_loss,
        "epoch/seconds": event.seconds,
        "epoch/patches_per_second": event.patches_per_second,
        "epoch/wait_share": event.wait_share,
        "epoch/gpu_utilisation": event.gpu_utilisation,
        "epoch/gpu_gib": event.gpu_gib,
    }
    scores = event.validation
    if scores is not None:
        values |= {"validation/dice": scores.dice, "validation/hd95_mm": scores.hd95}
        values |= {"validation/dose_score_gy": scores.dose_score, "validation/dvh_score_gy": scores.dvh_score}
        values |= {"validation/seconds": scores.seconds}
        values |= {"validation/slice_dice": scores.slice_dice} if scores.slice_dice is not None else {}
        values |= {f"dice/{name}": value for name, value in scores.dice_by_class.items()}
        values |= {f"slice_dice/{name}": value for name, value in scores.slice_dice_by_class.items()}
        values |= {f"dvh_gy/{name}": value for name, value in scores.dvh_by_structure.items()}
        values |= {f"hd95_mm/{name}": value for name, value in scores.hd95_by_class.items()}
    return values


def _new_file(folder: Path) -> Path:
    """A name by which readers find the file, and which sorts behind those of earlier sessions of the run."""
    second = int(time.time())
    if folder.is_dir():
        # A clock that was put back must not sort this session before those that it goes on from
        found = [path.name.split(".") for path in folder.glob("events.out.tfevents.*")]
        second = max([second, *(int(parts[3]) + 1 for parts in found if parts[3].isdecimal())])
    return folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"


def _parts() -> tuple[Any, Any, Any, Any]:
    """tensorboard's Event, Summary and SessionLog, and its writer of records."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ModuleNotFoundError as error:
        raise MachineError(
            f"output.tensorboard: true needs the package tensorboard, and {error.name} is not installed; install it by "
            "`pip install 'fasttrain[tensorboard]'`, or set output.tensorboard: false"
        ) from error
    except (ImportError, TypeError) as error:  # protobuf answers generated code of another version with a TypeError
        raise MachineError(
            f"output.tensorboard: true needs the package tensorboard, which cannot be imported ({error}); mend it by "
            "`pip install --upgrade 'fasttrain[tensorboard]'`, or set output.tensorboard: false"
        ) from error
    return Record, Summary, SessionLog, RecordWriter
