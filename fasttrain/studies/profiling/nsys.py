"""Owns a profile under NVIDIA Nsight Systems: the program is found and started, and what runs under it, a few steps with ranges.

    python -m fasttrain.studies.profiling.nsys TASK.json

takes the steps: torch's own profiler and Nsight Systems cannot both listen to the GPU.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fasttrain.errors import EXIT_DONE, FasttrainError, MachineError, exit_code_of
from fasttrain.recipe import Recipe
from fasttrain.whole_files import write_json

_STEPS = 20
_PROGRAM = "nsys"


def find_nsys() -> str:
    """Where the program lies; raises MachineError where it is not installed."""
    found = shutil.which(_PROGRAM)
    if found is None:
        raise MachineError(
            "--nsys: Nsight Systems is not installed (there is no `nsys` on the PATH); install NVIDIA's nsight-systems-cli, or "
            "leave --nsys out: the Chrome trace has the same ranges"
        )
    return found


def nsys_words(program: str, task: Path, report: Path) -> list[str]:
    """The command line: kernels, NVTX ranges and library calls of the steps alone, a CUDA graph's kernels one by one."""
    return [
        program,
        "profile",
        "--trace=cuda,nvtx,cudnn,cublas,osrt",
        "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={report}",
        sys.executable,
        "-m",
        "fasttrain.studies.profiling.nsys",
        str(task),
    ]


def run_nsys(program: str, recipe: Recipe, data: Path | None, device: str, folder: Path) -> Path:
    """Takes the steps under Nsight Systems and returns its report. Raises MachineError where it fails, with what it wrote."""
    task, report, log = folder / "nsys-task.json", folder / "nsys", folder / "nsys.log"
    where = None if data is None else str(data.absolute())
    write_json(task, {"recipe": recipe.model_dump(mode="json"), "data": where, "device": device})
    with open(log, "wb") as stream:
        code = subprocess.run(
            nsys_words(program, task, report), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        ).returncode
    made = report.with_suffix(".nsys-rep")
    if code != EXIT_DONE or not made.exists():
        raise MachineError(f"--nsys: `nsys profile` ended with code {code} and made no report; {log} says why")
    return made


def take_steps(task: dict[str, Any]) -> None:
    """Some real steps of a recipe with NVTX ranges, between the marks by which Nsight Systems begins and ends."""
    import torch

    from fasttrain.engine.build import build, prepare_torch
    from fasttrain.engine.preparing import prepare
    from fasttrain.ranges import listening
    from fasttrain.studies.few_cases import few_cases, plan_for_few
    from fasttrain.studies.profiling.parts import annotating
    from fasttrain.studies.timing import endless

    recipe = Recipe.model_validate(task["recipe"])
    prepared = prepare(recipe, None if task["data"] is None else Path(task["data"]), task["device"])
    split = few_cases(recipe, prepared.split, prepared.plan.cache)
    plan = plan_for_few(prepared.plan, split, recipe)
    prepare_torch(plan, prepared.hardware)
    assembly = build(recipe, plan, prepared.hardware, split, lambda *_: None, lambda text, level: None)
    on_gpu = prepared.hardware.on_gpu
    try:
        reports = endless(assembly.trainer)
        for _ in range(_STEPS):
            next(reports)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        with listening(annotating(on_gpu)):
            for _ in range(_STEPS):
                next(reports)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    finally:
        assembly.close()


def main() -> int:
    """Takes the steps of the task that the argument names."""
    try:
        take_steps(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except FasttrainError as error:
        sys.stderr.write(f"{error}\n")
        return exit_code_of(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
