"""The scripts for several nodes, with stand-ins for `srun`, `scontrol` and the environment's python."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from pod_stubs import ROOT, Place
from ruamel.yaml import YAML

SCONTROL = """#!/usr/bin/env bash
if [[ "$1" == show ]]; then
  printf 'node3\\nnode4\\n'
else
  echo "$*" >>"$STUB_LOG/scontrol"
fi
"""
SRUN = """#!/usr/bin/env bash
echo "$*" >>"$STUB_LOG/srun"
[[ "$STUB_SRUN" == wait ]] || exit "$STUB_SRUN"
# As agents that are told to stop
trap 'exit 1' TERM
touch "$STUB_LOG/waiting"
while :; do sleep 0.05; done
"""
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$STUB_LOG/python"
"""


@pytest.mark.parametrize(
    ("srun", "number", "ended", "requeued"),
    [
        ("wait", signal.SIGUSR1, 1, ["requeue 17"]),
        ("wait", signal.SIGTERM, 1, []),
        ("0", None, 0, []),
        ("3", None, 3, []),
    ],
)
def test_a_job_of_several_nodes_is_requeued_at_its_time_limit_alone(
    tmp_path: Path, srun: str, number: int | None, ended: int, requeued: list[str]
) -> None:
    place = Place(tmp_path)
    place.add("scontrol", SCONTROL)
    place.add("srun", SRUN)
    job = shutil.copy(ROOT / "scripts" / "slurm" / "several_nodes.sbatch", place.folder / "slurm_script")
    slurm = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    # sbatch passes the environment of whoever submits the job on, whatever is in it
    environ = {**slurm, "SLURM_SUBMIT_DIR": str(place.folder), "STUB_SRUN": srun, "answer": "9"}
    words = ["bash", job, "--run", "/runs/first", "--recipe", "demo"]
    process = subprocess.Popen(words, **place.options(environ))
    if number is not None:
        until = time.monotonic() + 60
        while not (place.log / "waiting").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
    assert process.wait(timeout=60) == ended
    assert place.calls("scontrol") == requeued
    (call,) = place.calls("srun")
    torchrun, _, command = call.partition(" -m -- fasttrain ")
    assert command == "train --resume auto --run /runs/first --recipe demo"
    assert "-m torch.distributed.run --nnodes=2 --nproc-per-node=8 --max-restarts=3" in torchrun
    assert "--rdzv-id=17 --rdzv-backend=c10d --rdzv-endpoint=node3:20017" in torchrun


@pytest.mark.parametrize("rank", ["0", "1"])
def test_skypilot_starts_an_agent_on_each_machine(tmp_path: Path, rank: str) -> None:
    place = Place(tmp_path)
    task = YAML(typ="safe").load(ROOT / "scripts" / "skypilot" / "several_nodes.yaml")
    assert task["num_nodes"] == 2
    checkout = place.folder / "sky"
    (checkout / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(place.bin / "fasttrain", checkout / ".venv" / "bin" / "fasttrain")
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": rank, "SKYPILOT_NUM_NODES": "2"}
    environ = {
        **place.environ,
        **task["envs"],
        **sky,
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "FETCH": "spleen",
        "RECIPE": "spleen",
    }
    subprocess.run(["bash", "-c", task["run"]], cwd=checkout, env=environ, check=True)
    assert place.calls("fasttrain") == ["data fetch spleen"]
    (call,) = place.calls("python")
    assert f"--rdzv-endpoint=10.0.0.1:29400 --rdzv-conf=is_host={'true' if rank == '0' else 'false'}" in call
    assert call.endswith("-m -- fasttrain train --resume auto --run /runs/first --recipe spleen")
