"""Owns the list of formats, and the export of a run: written beside its place, checked on a real case, only then put there."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fasttrain.delivery.export import bundle, exported, onnx_file, torchscript
from fasttrain.delivery.export.agreement import TOLERANCE
from fasttrain.delivery.export.plain import PlainModel, open_plain
from fasttrain.engine.failures import explained
from fasttrain.errors import FasttrainError, MachineError, RecipeError, StorageError
from fasttrain.own_process import signals_held
from fasttrain.whole_files import half_made


@dataclass(frozen=True)
class Format:
    """module: has `write(model, path)` and `difference(model, path)`. needs: packages by the names they are imported by."""

    module: ModuleType
    file_name: str
    needs: tuple[str, ...] = ()
    refusal: Callable[[PlainModel], str | None] = lambda model: None


EXPORTS = {
    "bundle": Format(bundle, "bundle", ("ignite",), bundle.refusal),
    "torchscript": Format(torchscript, "model.ts"),
    "onnx": Format(onnx_file, "model.onnx", ("onnx", "onnxruntime", "onnxscript")),
    "exported": Format(exported, "model.pt2"),
}


@dataclass(frozen=True)
class Exported:
    """What was written, and the largest difference from the network on `case`, as a share of its largest logit."""

    path: Path
    format: str
    epoch: int
    checkpoint: Path
    case: str
    difference: float
    answer: str


def export(
    run: Path,
    format: str,
    out: Path | None,
    data: Path | None,
    overwrite: bool,
    told: Callable[[str], None],
    made: Callable[[], None] = lambda: None,
) -> Exported:
    """Exports the best weights of a run. made: is called once all that is left is to put it in its place.

    Raises MachineError where a package is missing, RecipeError where the format cannot hold the network or does not answer as
    it does (nothing is left then), StorageError where it cannot be written; as `open_plain` does besides.
    """
    chosen = EXPORTS[format]
    missing = [name for name in chosen.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineError(
            f"--format {format} needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed; install "
            "what exports need by `pip install 'fasttrain[export]'`"
        )
    model = open_plain(run, data)
    if why := chosen.refusal(model):
        raise RecipeError(f"{run} cannot be exported with --format {format}: {why}; take another format")
    target = out if out is not None else model.folder.export / chosen.file_name
    if os.path.lexists(target) and not overwrite:
        raise RecipeError(f"{target} is there already; name another with --out, or add --overwrite")
    if target.is_dir() and not (target / "configs/inference.json").exists() and any(target.iterdir()):
        raise RecipeError(f"{target} is a folder that holds no bundle, and is left alone; name another with --out")
    part = target.with_name(f".{target.name}.{os.getpid()}.part{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with half_made(part):
            told(f"writing {format}, epoch {model.epoch} of {model.checkpoint}")
            difference = _checked(chosen, model, part, format, told)
            made()
            _put(part, target)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}; name another with --out") from error
    return Exported(
        target, format, model.epoch, model.checkpoint, model.case.name, difference, model.described()["answer"]
    )


def _checked(chosen: Format, model: PlainModel, part: Path, format: str, told: Callable[[str], None]) -> float:
    run = model.folder.path
    try:
        chosen.module.write(model, part)
    except Exception as error:
        raise _sentence(error, model, f"{run} cannot be exported with --format {format}") from error
    told(f"comparing with the network on {model.case.name}")
    try:
        difference: float = chosen.module.difference(model, part)
    except Exception as error:
        raise _sentence(error, model, f"{run} was not exported, since the {format} file failed its check") from error
    if not difference <= TOLERANCE:
        raise RecipeError(
            f"{run} was not exported: on case {model.case.name} the answers of the {format} file differ from the network's by "
            f"{difference:.2g} of the largest logit, more than {TOLERANCE:g}; take another --format"
        )
    return difference


def _sentence(error: Exception, model: PlainModel, what: str) -> Exception:
    """The user's sentence for whatever an exporter raises; a full disk, a lack of memory and a faulty file are told as such."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, RecipeError):
        return RecipeError([f"{what}: {fault}; take another --format" for fault in error.faults])
    known = error if isinstance(error, FasttrainError) else explained(error, model.recipe, 0)
    if known is not None:
        return known
    text = " ".join(str(error).split()) or type(error).__name__
    shown = text if len(text) <= 300 else f"{text[:300]}…"
    return RecipeError(f"{what}: {type(error).__name__}: {shown}; take another --format")


def _put(part: Path, target: Path) -> None:
    if not (target.is_dir() or part.is_dir()) or not os.path.lexists(target):
        os.replace(part, target)
        return
    # A folder takes no other's place, and what was there is to be there until this is
    former = target.with_name(f".{target.name}.{os.getpid()}.former.part")
    # What comes meanwhile is answered before the former is removed
    with contextlib.ExitStack() as after, signals_held():
        os.replace(target, former)
        try:
            os.replace(part, target)
        except OSError:
            os.replace(former, target)
            raise
        after.enter_context(half_made(former))
