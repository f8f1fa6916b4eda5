"""Real runs on machines with little shared memory or few open files: they finish, and the plan says what was lowered."""

import json
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from small_machine import run_with, shared_memory, training

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory and limits are Linux's here")
LARGE = {
    # 16 patches of 64³ in float32: 16.8 MB, and 4.2 MB of labels
    "training__batch_size": 16,
    "patch__size": [64, 64, 64],
    "training__epochs": 1,
    "training__iterations_per_epoch": 3,
    "network": {"kind": "unet", "features": [2, 4], "strides": [2]},
    "augment__flip": None,
    "augment__rotate": None,
    "validation__every": 5,
}


def finished(done, run: Path) -> dict:
    """The plan's decisions of a run that must have finished."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    return json.loads(done.stdout.splitlines()[0])


@pytest.mark.slow
def test_four_workers_with_two_batches_of_17_megabytes_finish_in_16_megabytes(phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = training(phantoms, run, **LARGE, data__workers=4, data__prefetch_factor=2)
    plan = finished(run_with(script, shared_memory("size=16m"), namespace=True), run)
    assert plan["worker_kind"][0] == "thread"
    assert plan["workers"][0] == "4"
    assert (
        "4 × 2 batches of 21.0 MB and those in use need 188.7 MB of /dev/shm, which has 16.8 MB free"
        in (plan["worker_kind"][1])
    )


@pytest.mark.slow
def test_docker_s_64_megabytes_lower_batches_ahead_and_then_workers(phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = training(phantoms, run, **LARGE, data__workers=4, data__prefetch_factor=2)
    plan = finished(run_with(script, shared_memory("size=64m"), namespace=True), run)
    assert (plan["worker_kind"][0], plan["workers"][0], plan["prefetch_factor"][0]) == ("process", "1", "1")
    assert "lowered from 4, since" in plan["workers"][1]
    assert "lowered from 2, since" in plan["prefetch_factor"][1]


@pytest.mark.parametrize("options", ["size=16m,ro", "size=16m,nr_inodes=1"])
def test_shared_memory_that_takes_nothing_means_threads(options: str, phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = training(phantoms, run, training__epochs=1, data__workers=2, data__cache__kind="none")
    plan = finished(run_with(script, shared_memory(options), namespace=True), run)
    assert (plan["workers"][0], plan["worker_kind"][0]) == ("2", "thread")
    assert "/dev/shm, which has 0 bytes free" in plan["worker_kind"][1]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 small cases."""
    root, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir()
    for number in range(400):
        image = rng.normal(0, 100, (10, 10, 10)).astype(np.float32)
        label = (image > 50).astype(np.uint8) + (image > 100)
        for folder, values in (("imagesTr", image), ("labelsTr", label)):
            nib.save(nib.Nifti1Image(values, np.eye(4)), root / folder / f"case_{number:03d}.nii.gz")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["ulimit -n 256;", "ulimit -Sn 100; ulimit -Hn 256;"])
def test_400_items_in_256_open_files(limit: str, many: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = training(
        many,
        run,
        data__source={"kind": "folders", "images": "imagesTr", "labels": "labelsTr"},
        data__split={"kind": "last", "validation": 2},
        data__spacing=None,
        data__cache__kind="disk",
        data__cache__folder=str(tmp_path / "volumes"),
        data__workers=2,
        training__epochs=1,
        training__iterations_per_epoch=400,
        training__batch_size=1,
        patch__size=[8, 8, 8],
        network={"kind": "unet", "features": [2, 2], "strides": [2]},
        output__log_every=100,
    )
    plan = finished(run_with(script, limit), run)
    assert (plan["workers"][0], plan["worker_kind"][0]) == ("2", "process")


def test_two_dozen_open_files_mean_threads_or_a_sentence(phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = training(phantoms, run, training__epochs=1, data__workers=2)
    done = run_with(script, "ulimit -n 24;")
    plan = finished(done, run)
    assert plan["worker_kind"][0] == "thread"
    assert "open files and the limit is 24 (`ulimit -n`)" in plan["worker_kind"][1]


def test_the_limit_is_raised_before_training(phantoms: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = training(phantoms, run, training__epochs=1, data__workers=2)
    script += "\nimport resource\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    done = run_with(script, "ulimit -Sn 60; ulimit -Hn 500;")
    assert finished(done, run)["worker_kind"][0] == "process"
    assert done.stdout.splitlines()[-1] == "500 500"
