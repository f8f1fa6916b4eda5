"""What making a volume takes: the estimate against a real process, and what the plan makes of it where memory is short."""

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from small_machine import TESTS

from fasttrain.engine.planning.memory_plan import choose_cache, choose_fill_threads, memory_need
from fasttrain.engine.planning.sizes import Sizes, sizes_of
from fasttrain.engine.planning.worker_plan import WORKER_BYTES, batch_bytes, choose_workers
from fasttrain.errors import OutOfMemoryError
from fasttrain.machine.hardware import GIB, Hardware
from fasttrain.recipe import Recipe

CPU = Hardware("cpu", "a CPU", 6, 8.0)
MEASURED = """
    import os, sys, threading
    sys.path.insert(0, {tests!r})
    import nibabel, numpy
    from pathlib import Path
    from tiny_recipe import TINY
    from fasttrain import load_recipe
    from fasttrain.data.caches import build_bytes
    from fasttrain.data.preprocess import Preprocess
    from fasttrain.samples import Case

    def saved(size, folder):
        folder.mkdir()
        random = numpy.random.default_rng(0)
        label = numpy.zeros((size,) * 3, numpy.{label})
        label[size // 4 :] = 1
        for name, voxels in (("image", random.normal(size=(size,) * 3).astype(numpy.float32)), ("label", label)):
            nibabel.save(nibabel.Nifti1Image(voxels, numpy.eye(4)), folder / f"{{name}}.nii")
        return Case("a", (folder / "image.nii",), folder / "label.nii")

    def peak():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10

    recipe = load_recipe("demo", {{**TINY, **{settings!r}}}).recipe
    steps, folder = Preprocess(recipe), Path({folder!r})
    steps(saved(20, folder / "small"))
    case = saved({size}, folder / "large")
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    steps(case)
    print(build_bytes([case], recipe), peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process in /proc")
@pytest.mark.parametrize(
    ("settings", "size", "label"),
    [
        ({"data.spacing": None, "data.intensity": {"kind": "zscore"}}, 180, "uint8"),
        ({"data.spacing": None, "data.intensity": {"kind": "window", "low": -1, "high": 1}}, 180, "float64"),
        ({"data.spacing": None, "data.storage_dtype": "float16", "patch.background_above": 0.0}, 180, "int16"),
        ({"data.spacing": [0.75, 0.75, 0.75], "data.intensity": {"kind": "zscore"}}, 120, "uint8"),
        ({"data.spacing": [1.2, 1.2, 1.2]}, 180, "uint8"),
    ],
)
def test_making_a_volume_takes_no_more_than_estimated(
    tmp_path: Path, settings: dict[str, object], size: int, label: str
) -> None:
    script = textwrap.dedent(MEASURED).format(
        tests=str(TESTS), settings=settings, folder=str(tmp_path), size=size, label=label
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=TESTS.parent, timeout=120)
    assert done.returncode == 0, done.stderr
    estimated, measured = map(int, done.stdout.split())
    assert estimated / 3 < measured <= estimated


def sized(recipe: Recipe, cache_gib: float, build_gib: float) -> Sizes:
    return sizes_of(recipe, (16, 2, 0), int(cache_gib * GIB), build_bytes=int(build_gib * GIB))


def test_fewer_threads_fill_where_memory_is_short(tiny) -> None:
    recipe = tiny(data__cache__kind="memory").recipe
    assert choose_fill_threads(recipe, CPU, sized(recipe, 2.0, 1.0), "memory") == (6, "6 CPUs may be used")
    threads, why = choose_fill_threads(recipe, CPU, sized(recipe, 2.0, 1.5), "memory")
    assert threads == 4
    assert why == "6 CPUs may be used; lowered, since making a volume takes about 1.5 GiB"
    assert choose_fill_threads(recipe, CPU, sized(recipe, 2.0, 1.5), "disk")[0] == 5
    # CPUs are a rank's: what is stored is made by the first of two, with those of both
    two = replace(CPU, cpus=3, local_ranks=2)
    assert choose_fill_threads(recipe, two, sized(recipe, 2.0, 1.5), "memory")[0] == 2
    assert choose_fill_threads(recipe, two, sized(recipe, 2.0, 1.5), "disk")[0] == 5
    with pytest.raises(
        OutOfMemoryError, match="to make the largest volume takes about 9.0 GiB of memory, and of 8.0 GiB free"
    ) as caught:
        choose_fill_threads(recipe, CPU, sized(recipe, 2.0, 9.0), "none")
    assert caught.value.exit_code == 5


def test_a_cache_in_memory_leaves_room_to_make_one_volume(tiny) -> None:
    recipe = tiny(data__cache__kind="auto").recipe
    assert choose_cache(recipe, CPU, sized(recipe, 4.0, 1.0))[0] == "memory"
    assert choose_cache(recipe, CPU, sized(recipe, 4.0, 2.0))[0] != "memory"
    asked = tiny(data__cache__kind="memory").recipe
    with pytest.raises(OutOfMemoryError, match="5.0 GiB before, to make one volume"):
        choose_cache(asked, CPU, sized(asked, 4.0, 5.0))


def test_workers_that_read_cases_need_room_for_one_each(tiny) -> None:
    recipe = tiny(data__workers=4, data__worker_kind="process").recipe
    one = GIB + WORKER_BYTES
    spare = 2 * one + 20 * batch_bytes(recipe)
    assert choose_workers(recipe, CPU, "none", spare, GIB).workers == 2
    assert choose_workers(recipe, CPU, "memory", spare, GIB).workers == 4
    assert choose_workers(recipe, CPU, "none", GIB / 2, GIB).workers == 0
    need = [memory_need(recipe, CPU, replace(sized(recipe, 1.0, 1.0)), kind).batches for kind in ("none", "disk")]
    assert need[0] - need[1] == 4 * GIB
