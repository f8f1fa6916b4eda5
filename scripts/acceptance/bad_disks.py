"""Proves what a run makes of disks and accounts that are not as they should be, on real ones; needs the right to mount (root).

    python scripts/acceptance/bad_disks.py [--only too-small filled read-only home nobody]

too-small: a tmpfs of 8 MB for checkpoints of 12 MB; exit code 6 before anything is trained, with path, free and needed bytes.
filled: another program fills the disk in the middle of the run; the former checkpoint stays, training goes on, and it is saved
again once there is room (exit code 0), or the run ends with 6. read-only: the same where the disk can suddenly only be read.
home: HOME cannot be written. nobody: the user has no entry among the accounts. In both a run works as it does elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SETTINGS = [
    "data.source.cases=6",
    "data.split.validation=2",
    "data.spacing=[4,4,4]",
    "patch.size=[16,16,16]",
    "network.features=[4,8,160]",
    "network.strides=[2,2]",
    "training.epochs=40",
    "training.iterations_per_epoch=10",
    "validation.every=40",
    "output.log_every=1",
    "output.checkpoint_every=0.5s",
    "acceleration.amp=off",
    "acceleration.channels_last=on",
    "acceleration.threads=1",
]
_CLONE_NEW_NAMESPACE = 0x00020000


def command(folder: Path, data: Path, *more: str) -> list[str]:
    """A run with checkpoints of about 12 MB."""
    sets = [part for one in [*SETTINGS, *more] for part in ("--set", one)]
    return [
        *(sys.executable, "-m", "fasttrain", "train", "-r", "demo"),
        "--data",
        str(data),
        "--run",
        str(folder),
        "--device",
        "cpu",
        *sets,
    ]


def mount(*arguments: str) -> None:
    """Raises where it is not permitted."""
    subprocess.run(["mount", *arguments], check=True)


@contextlib.contextmanager
def tmpfs(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk of this size."""
    folder.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", f"size={megabytes}m,mode=777", "none", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def events(folder: Path) -> list[dict]:
    """What the run has written of itself."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def steps(folder: Path) -> int:
    """The last one that was logged."""
    return max((event["step"] for event in events(folder) if event["event"] == "StepLogged"), default=0)


def check(held: bool, what: str, told: str) -> None:
    """Ends with a fault where it does not hold."""
    if not held:
        raise SystemExit(f"FAULT: {what}\n{told}")


def wait_until(ready: object, process: subprocess.Popen[str], what: str) -> None:
    """For at most two minutes."""
    began = time.monotonic()
    while not ready():  # type: ignore[operator]
        if process.poll() is not None or time.monotonic() - began > 120:
            process.kill()
            check(False, f"{what} never came", process.communicate()[1])
        time.sleep(0.02)


def too_small(base: Path) -> None:
    with tmpfs(base / "small", 8) as disk:
        done = subprocess.run(command(disk / "run", base / "data"), capture_output=True, text=True, check=False)
        sentence = re.search(
            r"fasttrain: (\S+): the checkpoints of this run need ([\d,]+) bytes .* has ([\d,]+) free", done.stderr
        )
        check(done.returncode == 6, f"exit code {done.returncode}", done.stderr)
        check(
            sentence is not None and sentence[1].startswith(str(disk)),
            "no sentence with path, need and room",
            done.stderr,
        )
        check("epoch 1" not in done.stderr and not (disk / "run").exists(), "something was begun", done.stderr)
        print(f"  too-small: {sentence[0]}")  # type: ignore[index]


def refusing(base: Path, name: str, refuse: object, allow: object, reason: str) -> None:
    """A disk that refuses for a while, and one that does so to the end."""
    from fasttrain.checkpoints import read_checkpoint

    for ends in (False, True):
        folder = base / f"{name}-{'ends' if ends else 'goes-on'}"
        with tmpfs(folder / "checkpoints", 64):
            last = folder / "checkpoints" / "last.pt"
            env = {**os.environ, "PYTHONUNBUFFERED": "1"}
            more = ("training.epochs=12",) if ends else ()
            process = subprocess.Popen(
                command(folder, base / "data", *more), stderr=subprocess.PIPE, text=True, env=env
            )
            wait_until(last.exists, process, "the first checkpoint")
            refuse(folder / "checkpoints")  # type: ignore[operator]
            at = steps(folder)
            held = read_checkpoint(last)["progress"]["step"]
            told = lambda: [event for event in events(folder) if reason in event.get("text", "")]  # noqa: B023, E731
            wait_until(told, process, "the warning")
            wait_until(lambda: steps(folder) > at + 10, process, "a step after it")  # noqa: B023
            check(read_checkpoint(last)["progress"]["step"] - held in range(30), "the former checkpoint is gone", "")
            if not ends:
                allow(folder / "checkpoints")  # type: ignore[operator]
            _, said = process.communicate(timeout=400)
            check(process.returncode == (6 if ends else 0), f"exit code {process.returncode}", said)
            got = read_checkpoint(last)["progress"]["step"]
            check(ends or got == 400, f"last.pt holds step {got}", said)
            text = told()[0]["text"]
            check(
                str(last) in text and "bytes are needed" in text and "are free" in text,
                "path, need or room are not told",
                text,
            )
            print(
                f"  {name}: {'to the end: exit code 6' if ends else 'for a while: exit code 0'}: {text[len(str(folder)) :]}",
                flush=True,
            )


def fill(folder: Path) -> None:
    """To the last byte, by another program."""
    with contextlib.suppress(OSError), (folder / "other").open("wb", buffering=0) as other:
        while other.write(bytes(1 << 16)):
            pass


def read_only(folder: Path) -> None:
    """As soon as nobody has a file open for writing there."""
    while subprocess.run(["mount", "-o", "remount,ro", str(folder)], capture_output=True, check=False).returncode:
        time.sleep(0.005)


def whole(base: Path, name: str, told: str, env: dict[str, str], prefix: tuple[str, ...] = ()) -> None:
    """A short run in an unusual account."""
    folder = base / "open" / name
    more = ("training.epochs=2", "validation.every=1")
    done = subprocess.run(
        [*prefix, *command(folder, base / "open" / "data", *more)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=base / "open",
    )
    check(done.returncode == 0, f"exit code {done.returncode}", done.stderr)
    check("Traceback" not in done.stderr, "a traceback", done.stderr)
    check((folder / "checkpoints" / "last.pt").exists(), "there is no checkpoint", done.stderr)
    print(f"  {name}: {told}: exit code 0", flush=True)


def home(base: Path) -> None:
    with tmpfs(base / "home", 1) as folder:
        mount("-o", "remount,ro", str(folder))
        env = {**os.environ, "HOME": str(folder)}
        for name in ("XDG_CACHE_HOME", "FASTTRAIN_CACHE", "MPLCONFIGDIR"):
            env.pop(name, None)
        whole(base, "home", "HOME on a disk for reading alone", env)


def nobody(base: Path) -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "FASTTRAIN_CACHE")
    }
    prefix = ("setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups")
    check(
        subprocess.run([*prefix, "id", "-un"], capture_output=True, check=False).returncode != 0,
        "that user has an entry",
        "",
    )
    whole(base, "nobody", "uid 54321 without an entry, HOME unset", {**env, "TMPDIR": str(base / "open")}, prefix)


def main() -> None:
    parts = {
        "too-small": too_small,
        "filled": lambda base: refusing(
            base, "filled", fill, lambda at: (at / "other").unlink(), "last.pt cannot be written"
        ),
        "read-only": lambda base: refusing(
            base, "read-only", read_only, lambda at: mount("-o", "remount,rw", str(at)), "last.pt cannot be written"
        ),
        "home": home,
        "nobody": nobody,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    options = parser.parse_args()
    # Mounts of its own, which end with it
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEW_NAMESPACE):
        raise SystemExit("this needs the right to mount: run it as root")
    mount("--make-rprivate", "/")
    base = Path(tempfile.mkdtemp(prefix="bad-disks-"))
    base.chmod(0o755)
    (base / "open").mkdir(mode=0o777)
    (base / "open").chmod(0o777)
    print(f"runs in {base}", flush=True)
    for name in options.only:
        parts[name](base)
    shutil.rmtree(base)
    print("every disk passed")


if __name__ == "__main__":
    main()
