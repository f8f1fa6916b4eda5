"""The scripts for RunPod, Slurm and SkyPilot and the Dockerfile, as far as a machine without these allows: with stubs on PATH."""

import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from pod_stubs import ROOT, Place
from ruamel.yaml import YAML


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize(("kind", "calls"), [("new", ["pod stop abc"]), ("old", ["pod stop abc", "stop pod abc"])])
def test_the_pod_is_stopped_by_either_form_of_runpodctl(place: Place, kind: str, calls: list[str]) -> None:
    done = place.on_a_pod(kind).run("runpod/stop_pod.sh")
    assert done.returncode == 0, done.stderr
    assert place.calls("runpodctl") == calls
    assert "its volume disk is still billed" in done.stderr


@pytest.mark.parametrize(("kind", "reason"), [("broken", "no route to host"), ("refusing", "status is RUNNING")])
def test_a_pod_that_cannot_be_stopped_is_told_loudly(place: Place, kind: str, reason: str) -> None:
    done = place.on_a_pod(kind).run("runpod/stop_pod.sh")
    assert done.returncode == 1
    assert "could NOT be stopped and goes on being billed" in done.stderr
    assert reason in done.stderr
    assert place.calls("runpodctl") == ["pod stop abc", "stop pod abc"] * 3


def test_elsewhere_nothing_is_stopped(place: Place) -> None:
    assert place.run("runpod/stop_pod.sh").returncode == 4
    place.environ["RUNPOD_POD_ID"] = "abc"
    place.environ["PATH"] = "/usr/bin:/bin"
    done = place.run("runpod/stop_pod.sh", "--check")
    assert done.returncode == 4
    assert "runpodctl" in done.stderr
    assert place.on_a_pod().calls("runpodctl") == []


def test_set_up_makes_the_environment_on_the_volume(place: Place) -> None:
    done = place.with_set_up_of_its_own().on_a_pod().run("runpod/set_up.sh")
    assert done.returncode == 0, done.stderr
    assert place.calls("set_up") == [f"{place.volume}/venv"]
    assert place.calls("fasttrain") == ["doctor"]
    assert sorted(made.name for made in place.volume.iterdir()) == ["cache", "data", "logs", "runs", "venv"]
    assert "stop-pod may fail" not in done.stderr


def test_set_up_says_what_will_not_work(place: Place) -> None:
    done = place.with_set_up_of_its_own().on_a_pod("broken").run("runpod/set_up.sh", STUB_CODES="4")
    assert done.returncode == 4
    assert "stop-pod may fail" in done.stderr
    done = place.run("runpod/set_up.sh", FASTTRAIN_VOLUME="/nowhere")
    assert done.returncode == 4
    assert "name its mount with FASTTRAIN_VOLUME" in done.stderr


def test_data_is_fetched_or_received(place: Place) -> None:
    place.on_a_pod()
    assert place.run("runpod/bring_data.sh", "fetch", "spleen").returncode == 0
    assert place.calls("fasttrain") == ["data fetch spleen"]
    done = place.run("runpod/bring_data.sh", "receive", "1-a-b-c-2", "mine")
    assert done.returncode == 0, done.stderr
    assert (place.volume / "data" / "mine" / "imagesTr" / "a.nii.gz").read_text() == "voxels\n"
    assert [left.name for left in (place.volume / "data").iterdir()] == ["mine"]
    assert place.run("runpod/bring_data.sh", "receive", "1-a-b-c-2", "mine").returncode == 0
    assert place.calls("runpodctl") == ["receive 1-a-b-c-2"]
    # What is there is never overwritten
    done = place.run("runpod/bring_data.sh", "receive", "1-a-b-c-2")
    assert done.returncode == 2
    assert "is there already" in done.stderr


def test_a_transfer_that_breaks_off_leaves_nothing(place: Place) -> None:
    done = place.on_a_pod("broken").run("runpod/bring_data.sh", "receive", "1-a-b-c-2", "mine")
    assert done.returncode == 1
    assert "send it anew" in done.stderr
    assert list((place.volume / "data").iterdir()) == []


@pytest.mark.parametrize("words", [[], ["fetch"], ["receive"], ["steal", "x"]])
def test_a_misuse_of_bring_data_is_told(place: Place, words: list[str]) -> None:
    assert place.run("runpod/bring_data.sh", *words).returncode == 2


def test_tune_trains_nothing(place: Place) -> None:
    assert place.run("runpod/tune.sh", "--recipe", "demo").returncode == 0
    assert place.calls("fasttrain") == ["tune --no-train --recipe demo"]


def test_training_goes_on_in_the_background_and_can_be_watched_stopped_and_resumed(place: Place) -> None:
    sets = ["--set", "data.classes={1: a b, 2: c}", "--max-hours", "3"]
    done = place.run("runpod/train.sh", "first", "--recipe", "demo", *sets, STUB_CODES="wait")
    assert done.returncode == 0, done.stderr
    wait_for(place.log / "waiting")
    process = int((place.volume / "logs" / "first.process").read_text())
    again = place.run("runpod/train.sh", "first", "--recipe", "demo")
    assert again.returncode == 2
    assert "is being trained already" in again.stderr
    watching = place.start("runpod/watch.sh")
    subprocess.run(["kill", "-TERM", str(process)], check=True)
    assert watching.wait(timeout=20) == 0
    assert place.calls("signals") == ["TERM"]
    (place.volume / "runs" / "first").mkdir()
    (place.volume / "runs" / "first" / "recipe.yaml").touch()
    resumed = place.run("runpod/resume.sh", STUB_CODES="3", FASTTRAIN_LOOK_SECONDS="20")
    assert resumed.returncode == 3, resumed.stderr
    assert "it has ended already, with exit code 3" in resumed.stderr
    first, second = place.calls("fasttrain")
    assert first == second == f"train --resume auto --run {place.volume}/runs/first --recipe demo {' '.join(sets)}"


def test_without_a_run_there_is_nothing_to_watch_resume_or_send(place: Place) -> None:
    place.on_a_pod()
    for script in ("watch", "resume", "send_results"):
        done = place.run(f"runpod/{script}.sh")
        assert (done.returncode, done.stdout) == (2, ""), script
        assert "train.sh" in done.stderr


def test_results_are_sent_without_what_is_half_written(place: Place) -> None:
    run = place.volume / "runs" / "first"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("recipe.yaml", "run.lock", "checkpoints/last.pt", "checkpoints/.last.pt.1.part"):
        (run / name).touch()
    done = place.on_a_pod().run("runpod/send_results.sh", "first")
    assert done.returncode == 0, done.stderr
    assert "runpodctl receive 1-a-b-c-2" in done.stdout
    with tarfile.open(place.log / "sent") as archive:
        files = sorted(member.name for member in archive if member.isfile())
    assert files == ["first/checkpoints/last.pt", "first/recipe.yaml"]


def test_the_start_command_does_all_of_it_and_stops_the_pod(place: Place) -> None:
    place.with_set_up_of_its_own().on_a_pod()
    words = [
        "first",
        "--fetch",
        "spleen",
        "--receive",
        "1-a-b-c-2",
        "mine",
        "--tune",
        "--recipe",
        "spleen",
        "--max-hours",
        "9",
    ]
    done = place.run("runpod/start.sh", *words, STUB_CODES="0 0 0 0+")
    assert done.returncode == 0, done.stderr
    training = f"train --resume auto --run {place.volume}/runs/first --recipe spleen --max-hours 9 --tuned"
    assert place.calls("fasttrain") == ["doctor", "data fetch spleen", "tune --no-train --recipe spleen", training]
    assert place.calls("runpodctl") == ["pod get abc", "receive 1-a-b-c-2", "pod stop abc"]
    # On the pod that comes back: tuned once, and the same run again
    (place.log / "fasttrain").unlink()
    assert place.run("runpod/start.sh", *words).returncode == 0
    assert place.calls("fasttrain") == ["doctor", "data fetch spleen", training]


def test_a_start_that_cannot_train_does_not_bill_on(place: Place) -> None:
    place.with_set_up_of_its_own().on_a_pod()
    done = place.run("runpod/start.sh", "first", "--recipe", "spleen", STUB_SET_UP_FAILS="6")
    assert done.returncode == 6
    assert len(place.calls("set_up")) == 3
    assert place.calls("runpodctl") == ["pod stop abc"]
    # No GPU, as a pod that was started anew may be: trying again would not bring it
    done = place.run(
        "runpod/start.sh", "first", "--recipe", "spleen", STUB_CODES="4", FASTTRAIN_VENV=f"{place.volume}/other"
    )
    assert done.returncode == 4
    assert place.calls("fasttrain") == ["doctor"]
    assert place.calls("runpodctl")[-1] == "pod stop abc"


SCONTROL = """#!/usr/bin/env bash
echo "$*" >>"$STUB_LOG/scontrol"
"""


@pytest.mark.parametrize(
    ("codes", "number", "ended", "requeued"),
    [
        ("wait", signal.SIGUSR1, 143, ["requeue 17"]),
        # A preempted job is requeued by Slurm itself, and one that scancel ended by nobody
        ("wait", signal.SIGTERM, 143, []),
        ("0", None, 0, []),
        ("3", None, 3, []),
    ],
)
def test_a_slurm_job_is_requeued_at_its_time_limit_alone(
    place: Place, codes: str, number: int | None, ended: int, requeued: list[str]
) -> None:
    place.add("scontrol", SCONTROL)
    # As Slurm runs it: a copy elsewhere, from the folder where sbatch was called
    job = shutil.copy(ROOT / "scripts" / "slurm" / "train.sbatch", place.folder / "slurm_script")
    # sbatch passes the environment of whoever submits the job on, whatever is in it
    environ = {"STUB_CODES": codes, "SLURM_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(ROOT), "answer": "9"}
    words = ["bash", job, "--run", str(place.folder / "run"), "--recipe", "demo"]
    process = subprocess.Popen(words, **place.options(environ))
    if number is not None:
        wait_for(place.log / "waiting")
        process.send_signal(number)
    assert process.wait(timeout=20) == ended
    assert place.calls("scontrol") == requeued
    assert place.calls("fasttrain") == [f"train --resume auto --run {place.folder}/run --recipe demo"]


def test_slurm_is_asked_for_a_signal_and_a_requeue() -> None:
    text = (ROOT / "scripts" / "slurm" / "train.sbatch").read_text()
    asked = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@180"} <= set(asked)
    # After the first command Slurm reads no more of them
    assert text.rindex("#SBATCH") < text.index("set -euo")


def test_the_skypilot_file_says_what_runs(place: Place) -> None:
    task = YAML(typ="safe").load(ROOT / "scripts" / "skypilot" / "train.yaml")
    assert set(task) == {"name", "workdir", "resources", "envs", "file_mounts", "setup", "run"}
    assert task["resources"]["use_spot"] is True
    assert task["file_mounts"]["/runs"]["mode"] == "MOUNT_CACHED"
    # As SkyPilot does it: the text in a shell, in the checkout, with the variables set; here with stubs for all that it calls
    checkout = place.folder / "sky"
    (checkout / "scripts").mkdir(parents=True)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(place.bin / "fasttrain", checkout / ".venv" / "bin" / "fasttrain")
    for name in ("setup_env.sh", "keep_training.sh"):
        (checkout / "scripts" / name).write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>"$STUB_LOG/scripts"\n')
        (checkout / "scripts" / name).chmod(0o755)
    environ = {**place.environ, **task["envs"], "FETCH": "spleen", "ARGUMENTS": "--max-hours 10"}
    for part in ("setup", "run"):
        subprocess.run(["bash", "-c", task[part]], cwd=checkout, env=environ, check=True)
    assert place.calls("fasttrain") == ["doctor", "data fetch spleen"]
    assert place.calls("scripts") == [
        "setup_env.sh ",
        "keep_training.sh --run /runs/first --recipe demo --max-hours 10",
    ]


def test_the_dockerfile_copies_what_there_is_and_installs_what_is_needed() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    text = (ROOT / "Dockerfile").read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert "--gpus all" in text
    assert "--shm-size=8g" in text
    (program,) = re.findall(r'python -c "(.+?)" >/tmp/needed.txt', text)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert done.stdout.splitlines() == project["dependencies"]


def test_a_runpodctl_that_hangs_is_given_up(place: Place) -> None:
    began = time.monotonic()
    done = place.on_a_pod("hanging").run("runpod/stop_pod.sh", FASTTRAIN_STOP_SECONDS="0.1")
    assert done.returncode == 1
    assert "could NOT be stopped and goes on being billed: runpodctl gave no answer in 0.1 s" in done.stderr
    assert place.calls("runpodctl") == ["pod stop abc", "stop pod abc"] * 3
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["FASTTRAIN_RETRY_SECONDS", "FASTTRAIN_STOP_SECONDS"])
def test_a_setting_that_is_no_number_keeps_no_pod_running(place: Place, name: str) -> None:
    done = place.on_a_pod().run("runpod/stop_pod.sh", **{name: "infinity"})
    assert done.returncode == 0
    assert "infinity is no number of seconds" in done.stderr
    assert place.calls("runpodctl") == ["pod stop abc"]


def test_the_variables_of_a_pod_are_read_and_not_run(place: Place) -> None:
    kept, mark = place.folder / "rp_environment", place.folder / "mark"
    lines = [
        'export PW="pa$wor"',
        f"export TICK=`touch {mark}`",
        f'export RUNPOD_X="$(touch {mark})"',
        'export PW2="it`s',
        'export RUNPOD_POD_ID="abc"\r',
    ]
    kept.write_text("\n".join(lines))
    place.on_a_pod()
    del place.environ["RUNPOD_POD_ID"]
    done = place.run("runpod/stop_pod.sh", FASTTRAIN_POD_ENVIRONMENT=str(kept))
    assert done.returncode == 0, done.stderr
    assert place.calls("runpodctl") == ["pod stop abc"]
    assert not mark.exists()
    # What is set stands
    assert place.run("runpod/stop_pod.sh", RUNPOD_POD_ID="xyz", FASTTRAIN_POD_ENVIRONMENT=str(kept)).returncode == 0
    assert place.calls("runpodctl")[1:] == ["pod stop xyz"]
    kept.write_text("export RUNPOD_POD_ID='a b; c'\n")
    done = place.run("runpod/stop_pod.sh", FASTTRAIN_POD_ENVIRONMENT=str(kept))
    assert done.returncode == 4
    assert "which is no pod's id" in done.stderr


@pytest.mark.skipif(shutil.which("flock") is None, reason="this machine has no flock")
def test_a_start_command_that_is_given_twice_stops_no_pod_under_the_first(place: Place) -> None:
    """While the first still sets up or measures, before there is a run that is in use."""
    place.with_set_up_of_its_own().on_a_pod()
    slow = '#!/usr/bin/env bash\necho $$ >"$STUB_LOG/setting-up"\nsleep 2\nexec false\n'
    (place.scripts / "setup_env.sh").write_text(slow)
    words = ["runpod/start.sh", "first", "--recipe", "demo"]
    first = place.start(*words)
    wait_for(place.log / "setting-up")
    second = place.run(*words)
    assert second.returncode == 6
    assert "first is being started already" in second.stderr
    assert place.calls("runpodctl") == []
    assert place.run("runpod/start.sh", "other", "--recipe", "demo", "--on-finish", ":").returncode != 6
    # Once the first has failed for good it stops the pod
    first.communicate(timeout=60)
    assert place.calls("runpodctl") == ["pod stop abc"]
