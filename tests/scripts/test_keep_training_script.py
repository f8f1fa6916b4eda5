"""The loop for a start command: what ends it, what does not, when it gives up, and that signals reach the training."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from pod_stubs import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


def keep(place: Place, codes: str, *more: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return place.run(
        "keep_training.sh", "--run", place.folder / "run", "--recipe", "demo", *more, STUB_CODES=codes, **environ
    )


@pytest.mark.parametrize("code", [0, 2, 3, 4, 6, 7, 130])
def test_it_ends_at_once_on_these(place: Place, code: int) -> None:
    done = keep(place, str(code))
    assert done.returncode == code
    assert place.calls("fasttrain") == [f"train --resume auto --run {place.folder}/run --recipe demo"]


@pytest.mark.parametrize("code", ["1", "5", "kill", "143", "139"])
def test_it_tries_again_after_others(place: Place, code: str) -> None:
    done = keep(place, f"{code} {code} 0")
    assert done.returncode == 0
    assert len(place.calls("fasttrain")) == 3
    assert "2 of 5 tries without a checkpoint of a later step" in done.stderr


def test_it_gives_up_after_five_tries_without_a_later_checkpoint(place: Place) -> None:
    done = keep(place, "1 1 1 1 5 0")
    assert done.returncode == 5
    assert len(place.calls("fasttrain")) == 5
    assert (
        "giving up: 5 tries in a row ended without a checkpoint of a later step, the last with exit code 5"
        in done.stderr
    )


def test_a_later_checkpoint_begins_the_count_anew(place: Place) -> None:
    done = keep(place, "1 1 1 1 1+ 1 1 1 1 0")
    assert done.returncode == 0
    assert len(place.calls("fasttrain")) == 10


def test_a_checkpoint_of_the_same_step_is_no_progress(place: Place) -> None:
    """A run that dies at one step saves that step again at each try."""
    done = keep(place, "5= 5= 5= 5= 5= 5= 5= 0")
    assert done.returncode == 5
    # The first was new
    assert len(place.calls("fasttrain")) == 6


def test_checkpoints_of_folds_count(place: Place) -> None:
    fold = place.folder / "run" / "fold_1"
    fold.mkdir(parents=True)
    # Found when the loop begins, so that it is no progress; a fold's later one then is
    (fold / "events.jsonl").write_text(
        '{"event": "CheckpointSaved", "path": "x", "epoch": 1, "step": 700, "seconds": 1}\n'
    )
    done = keep(place, "1 1 1 1 1+ 0")
    assert done.returncode == 0, done.stderr
    assert len(place.calls("fasttrain")) == 6


@pytest.mark.parametrize(
    ("number", "name", "code"), [(15, "TERM", 143), (10, "USR1", 143), (2, "INT", 130), (1, "TERM", 143)]
)
def test_a_signal_reaches_the_training_and_ends_the_loop(place: Place, number: int, name: str, code: int) -> None:
    loop = place.start("keep_training.sh", "--run", place.folder / "run", "--recipe", "demo", STUB_CODES="wait")
    wait_for(place.log / "waiting")
    loop.send_signal(number)
    assert loop.wait(timeout=20) == code
    assert place.calls("signals") == [name]
    assert len(place.calls("fasttrain")) == 1


def test_a_signal_in_the_pause_ends_it_too(place: Place) -> None:
    loop = place.start(
        "keep_training.sh",
        "--run",
        place.folder / "run",
        "--recipe",
        "demo",
        STUB_CODES="1",
        FASTTRAIN_RETRY_SECONDS="30",
    )
    wait_for(place.log / "fasttrain")
    time.sleep(0.5)
    loop.send_signal(signal.SIGTERM)
    assert loop.wait(timeout=20) == 143
    assert len(place.calls("fasttrain")) == 1


def test_it_works_as_the_first_process_of_a_container(place: Place) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a PID namespace")
    words = place.words("keep_training.sh", "--run", place.folder / "run", "--recipe", "demo")
    loop = subprocess.Popen([*unshare, *words], **place.options({"STUB_CODES": "wait"}))
    wait_for(place.log / "waiting")
    first = Path(f"/proc/{loop.pid}/task/{loop.pid}/children").read_text().split()[0]
    subprocess.run(["kill", "-TERM", first], check=True)
    assert loop.wait(timeout=20) == 143
    assert place.calls("signals") == ["TERM"]


@pytest.mark.parametrize("codes", ["0", "3", "1 1 1 1 1"])
def test_on_finish_follows_the_loop_and_not_each_try(place: Place, codes: str) -> None:
    done = keep(
        place, codes, "--on-finish", 'echo "$FASTTRAIN_EXIT_CODE $FASTTRAIN_RUN" >>"$STUB_LOG/finished"; exit 9'
    )
    code = codes.split()[-1]
    assert done.returncode == int(code)
    assert place.calls("finished") == [f"{code} {place.folder}/run"]
    assert "--on-finish failed (exit code 9)" in done.stderr
    assert all("--on-finish" not in call for call in place.calls("fasttrain"))


def test_the_run_is_named_in_full_to_what_follows(place: Place) -> None:
    for words in (["--run", "runs/a b"], ["--run=runs/a b"]):
        place.run("keep_training.sh", *words, "--on-finish", 'echo "$FASTTRAIN_RUN" >>"$STUB_LOG/finished"')
    assert place.calls("finished") == [f"{place.folder}/runs/a b"] * 2
    assert place.calls("fasttrain") == [f"train --resume auto --run {place.folder}/runs/a b"] * 2


def test_on_finish_does_not_follow_a_signal(place: Place) -> None:
    words = ["--run", place.folder / "run", "--recipe", "demo", "--on-finish=echo x >>$STUB_LOG/finished"]
    loop = place.start("keep_training.sh", *words, STUB_CODES="wait")
    wait_for(place.log / "waiting")
    loop.send_signal(signal.SIGTERM)
    assert loop.wait(timeout=20) == 143
    assert place.calls("finished") == []


def test_a_second_ctrl_c_leaves_it_out(place: Place) -> None:
    words = ["--run", place.folder / "run", "--recipe", "demo", "--on-finish", "echo x >>$STUB_LOG/finished"]
    loop = place.start("keep_training.sh", *words, STUB_CODES="wait")
    wait_for(place.log / "waiting")
    loop.send_signal(signal.SIGINT)
    wait_for(place.log / "signals")
    time.sleep(0.5)
    loop.send_signal(signal.SIGINT)
    assert loop.wait(timeout=4) == 130
    assert place.calls("finished") == []


def test_stop_pod_is_refused_where_there_is_no_pod(place: Place) -> None:
    done = keep(place, "0", "--on-finish", "stop-pod")
    assert done.returncode == 4
    assert "RUNPOD_POD_ID is not set" in done.stderr
    assert place.calls("fasttrain") == []


@pytest.mark.parametrize("codes", ["0", "7", "1"])
def test_stop_pod_stops_it_whatever_the_end(place: Place, codes: str) -> None:
    done = keep(place.on_a_pod(), codes, "--on-finish", "stop-pod")
    assert done.returncode == int(codes)
    assert place.calls("runpodctl") == ["pod stop abc"]
    assert "its volume disk is still billed" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--recipe", "demo"], "--run DIR is missing"),
        (["--run"], "--run needs a value"),
        (["--run", "x", "--resume", "never"], "--resume never"),
    ],
)
def test_a_misuse_is_told(place: Place, words: list[str], told: str) -> None:
    done = place.run("keep_training.sh", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert place.calls("fasttrain") == []


def test_without_fasttrain_it_says_where_it_comes_from(place: Place) -> None:
    done = keep(place, "0", FASTTRAIN="/nowhere/fasttrain")
    assert done.returncode == 4
    assert "scripts/setup_env.sh" in done.stderr


def test_a_run_in_use_is_no_end(place: Place) -> None:
    """A start command that is given twice must not stop the machine under the first."""
    done = keep(place.on_a_pod(), "in-use", "--on-finish", "stop-pod")
    assert done.returncode == 6
    assert "--on-finish is left out: another process is at work" in done.stderr
    assert len(place.calls("fasttrain")) == 1
    assert place.calls("runpodctl") == []
    # Any other end with 6 is one
    assert keep(place, "6", "--on-finish", "stop-pod").returncode == 6
    assert place.calls("runpodctl") == ["pod stop abc"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("FASTTRAIN_TRIES", value) for value in ("08", "1.5", "abc", "0", "-1", "9" * 20)]
    + [("FASTTRAIN_RETRY_SECONDS", value) for value in ("abc", "infinity", "-1", "1e9", "5m", ".")],
)
def test_settings_by_which_it_would_never_end_are_refused(place: Place, name: str, value: str) -> None:
    done = keep(place, "1", **{name: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"keep_training: {name}={value}: should be ")
    assert place.calls("fasttrain") == []


def test_settings_that_are_right_are_heeded(place: Place) -> None:
    done = keep(place, "1", FASTTRAIN_TRIES="2", FASTTRAIN_RETRY_SECONDS="0.05")
    assert done.returncode == 1
    assert "trying again in 0.05 s" in done.stderr
    assert len(place.calls("fasttrain")) == 2


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_on_finish_is_refused(place: Place, value: str) -> None:
    done = keep(place, "0", "--on-finish", value)
    assert done.returncode == 2
    assert "--on-finish is empty" in done.stderr
    assert place.calls("fasttrain") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("stubborn", ["", "trap '' TERM INT HUP; "])
def test_a_hanging_on_finish_is_ended_by_a_signal(place: Place, number: signal.Signals, stubborn: str) -> None:
    command = f"{stubborn}sleep 307 & echo $! >$STUB_LOG/hanging; echo $$ >>$STUB_LOG/hanging; sleep 307; echo >$STUB_LOG/over"
    words = ["--run", place.folder / "run", "--recipe", "demo", "--on-finish", command]
    loop = place.start("keep_training.sh", *words, STUB_CODES="7")
    wait_for(place.log / "hanging")
    time.sleep(0.2)
    loop.send_signal(number)
    assert loop.wait(timeout=10) == 7
    time.sleep(0.1)
    # A zombie that nobody fetches has ended too
    stats = [path for pid in place.calls("hanging") if (path := Path(f"/proc/{pid}/stat")).exists()]
    assert all(path.read_text().rpartition(")")[2].split()[0] in "ZX" for path in stats)
    assert not (place.log / "over").exists()


def signalled_before(place: Place, command: str, number: signal.Signals) -> dict[str, str]:
    """An environment in which the loop gets a signal just before it runs a command, once."""
    first = place.folder / "first.sh"
    first.write_text(
        "set -T\n"
        f'ask() {{ [[ -e "$STUB_LOG/asked" || "$BASH_COMMAND" != {command} || "$0" != *keep_training.sh ]] || '
        f'{{ : >"$STUB_LOG/asked"; kill -s {number.name[3:]} $$; }}; }}\n'
        "trap ask DEBUG\n"
    )
    return {"BASH_ENV": str(first)}


BEGINNING = ["'\"$@\" < /dev/null'*", "child=\\$!"]


@pytest.mark.parametrize("command", BEGINNING)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_as_a_try_begins_ends_it(place: Place, command: str, number: signal.Signals) -> None:
    environ = signalled_before(place, command, number)
    began = time.monotonic()
    # The stub waits for ten seconds, and would be tried again
    assert keep(place, "wait 0", **environ).returncode == 143
    assert (place.log / "asked").exists()
    assert time.monotonic() - began < 8
    assert len(place.calls("fasttrain")) <= 1


@pytest.mark.parametrize("command", BEGINNING)
def test_a_signal_as_on_finish_begins_ends_all_of_it(place: Place, command: str) -> None:
    hanging = "trap '' TERM INT; echo $$ >$STUB_LOG/hanging; sleep 307; echo >$STUB_LOG/over"
    environ = signalled_before(place, f'{command} || ! -n "$finishing"', signal.SIGINT)
    loop = place.start(
        "keep_training.sh",
        *("--run", place.folder / "run", "--recipe", "demo", "--on-finish", hanging),
        STUB_CODES="7",
        **environ,
    )
    try:
        assert loop.wait(timeout=20) == 7
    finally:
        loop.kill()
    assert (place.log / "asked").exists()
    time.sleep(0.1)
    stats = [path for pid in place.calls("hanging") if (path := Path(f"/proc/{pid}/stat")).exists()]
    assert all(path.read_text().rpartition(")")[2].split()[0] in "ZX" for path in stats)
    assert not (place.log / "over").exists()
