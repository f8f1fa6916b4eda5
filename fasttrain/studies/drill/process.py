"""Owns the process of a drill's run: it trains or resumes as a line on stdin says, and ends with the process that started it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fasttrain.own_process import end_with_parent


def main() -> None:
    """Reads its task, carries it out, and exits with the code of the command line."""
    began = time.time()
    # Elsewhere than on Linux a drill that is itself killed leaves a process that ends with its run
    end_with_parent()
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    # Whatever a library prints is for the log
    os.dup2(2, 1)
    from fasttrain.errors import FasttrainError, exit_code_of

    try:
        _carry_out(task, began)
    except FasttrainError as error:
        for fault in error.faults:
            _log(fault)
        sys.exit(error.exit_code)
    except Exception as error:
        import traceback

        traceback.print_exc()
        _log(f"{type(error).__name__}: {error}")
        sys.exit(exit_code_of(error))


def _log(sentence: str) -> None:
    sys.stderr.write(f"fasttrain: {sentence}\n")


def _carry_out(task: dict[str, Any], began: float) -> None:
    from fasttrain.machine.threads import limit_threads, probably_on_gpu, thread_count
    from fasttrain.recipe import Recipe

    recipe = Recipe.model_validate_json(task["recipe"])
    device = task["device"]
    limit_threads(thread_count(recipe.acceleration.threads, probably_on_gpu(device))[0])
    from fasttrain.engine.run import resume, train
    from fasttrain.studies.drill.part import part_of
    from fasttrain.studies.drill.shape import Shape
    from fasttrain.whole_files import write_json

    run, data = Path(task["run"]), Path(task["data"]) if task["data"] is not None else None
    if task["resume"]:
        resume(run, began=began)
        return
    part, root, whole = part_of(recipe, data, Shape(**task["shape"]))
    write_json(run.parent / "whole.json", {"steps_per_epoch": whole})
    train(part, data=root, run=run, device=device, began=began)


if __name__ == "__main__":
    main()
