"""Owns the compiling of a run's kernels while its cases are read: a step is rehearsed, and what it would compile is compiled in
processes of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fasttrain.engine.planning.choices import likely_candidate
from fasttrain.engine.planning.rehearsal import rehearse
from fasttrain.engine.planning.trial import Candidate
from fasttrain.errors import FasttrainError
from fasttrain.kernels import compiling
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.compiler import keep_compiled
from fasttrain.machine.hardware import Hardware
from fasttrain.recipe import Recipe


class KernelsAhead:
    """Begins at once, in a thread; `wait` before a step is taken. What fails here is compiled at its first launch, as ever.

    A file in Triton's cache folder says for which kernels, network and batch all was compiled, so that the next run of the recipe
    need not even rehearse.
    """

    def __init__(self, recipe: Recipe, hardware: Hardware, candidate: Candidate) -> None:
        self._server = compiling.taken_server()
        self._thread = threading.Thread(target=self._run, args=(recipe, hardware, candidate), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the kernels are compiled."""
        self._thread.join()

    def close(self) -> None:
        """Ends what still runs."""
        if self._server is not None:
            self._server.close()
        self._thread.join()

    def _run(self, recipe: Recipe, hardware: Hardware, candidate: Candidate) -> None:
        # An early start is all that is lost
        with contextlib.suppress(Exception):
            done = _mark(recipe, hardware, candidate)
            if self._server is None or done.exists():
                return
            noted = _noted(recipe, hardware, candidate)
            # What a step holds is measured after this, and nothing may be left for it to take up
            torch.cuda.empty_cache()
            assert hardware.compute_capability is not None
            if noted and self._server.compile(noted, hardware.compute_capability, hardware.cpus):
                done.touch()


def _noted(recipe: Recipe, hardware: Hardware, candidate: Candidate) -> list[compiling.Noted]:
    """What is to be compiled; nothing where the step does not even run, which is told where it is measured."""
    try:
        with compiling.noting() as noted:
            rehearse(recipe, hardware, candidate)
    except Exception:
        return []
    return list(noted)


@contextlib.contextmanager
def compiling_ahead(recipe: Recipe, hardware: Hardware) -> Iterator[None]:
    """A scope beside whose work the kernels of a training step are compiled; it ends when they are, or where an error leaves it.

    On a GPU cuDNN chooses from here on by trying, so that the choices of the rehearsal are those of the run.
    """
    ahead = _begun(recipe, hardware)
    compiling.stop_early()
    try:
        yield
        if ahead is not None:
            ahead.wait()
    finally:
        if ahead is not None:
            ahead.close()


def _begun(recipe: Recipe, hardware: Hardware) -> KernelsAhead | None:
    """None where a step launches none of fasttrain's kernels."""
    if not hardware.on_gpu:
        return None
    torch.backends.cudnn.benchmark = True
    try:
        candidate = likely_candidate(recipe, hardware)
    except FasttrainError:
        # Told where the plan is made
        return None
    if not candidate.fused or torch.version.hip is not None:
        return None
    keep_compiled(own_cache_folder())
    return KernelsAhead(recipe, hardware, candidate)


def _mark(recipe: Recipe, hardware: Hardware, candidate: Candidate) -> Path:
    import triton

    sections: tuple[Callable[[], str], ...] = (
        recipe.network.model_dump_json,
        recipe.loss.model_dump_json,
        recipe.patch.model_dump_json,
        recipe.augment.model_dump_json,
    )
    parts = [section() for section in sections]
    parts += [
        str(recipe.training.batch_size),
        str(recipe.data.channels),
        str(recipe.input_channels),
        str(recipe.output_channels),
    ]
    parts += [recipe.data.storage_dtype, str(recipe.data.ignore_label)]
    parts += [str(candidate), str(hardware.compute_capability), torch.__version__, compiling.sources_digest()]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"fasttrain-{digest}.compiled"
