"""Proves `fasttrain drill`: that it passes on the demo recipe in time, leaves nothing behind however it ends, and finds a resume
that is wrong.

    python scripts/acceptance/drill.py [--seed 0] [--only demo stopped killed sabotaged]

demo: the default drill of the demo recipe takes less than three minutes on two free cores. stopped: SIGINT at random moments.
killed: SIGKILL of the drill itself. sabotaged: a resume that drops the optimizer's state must end with exit code 6.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

SMALL = [
    "data.source.cases=8",
    "data.split.validation=2",
    "data.spacing=[4,4,4]",
    "patch.size=[16,16,16]",
    "network.features=[8,12,16]",
    "network.strides=[2,2]",
    "network.dropout=0.1",
    "acceleration.amp=off",
    "acceleration.channels_last=on",
    "acceleration.threads=1",
]
SABOTAGE = """
    from fasttrain.studies.drill import process

    def sabotaged(task, began):
        from fasttrain.engine.state import TrainState

        TrainState._restore_optimizer = lambda self, saved, origin: None
        honest(task, began)

    honest, process._carry_out = process._carry_out, sabotaged
    process.main()
"""


def drill(base: Path, *options: str, small: bool = True) -> list[str]:
    """The command line of a drill whose runs lie in `base`."""
    sets = [part for setting in (SMALL if small else ()) for part in ("--set", setting)]
    where = ["--data", str(base / "data"), "--runs", str(base / "runs"), "--device", "cpu"]
    return [sys.executable, "-m", "fasttrain", "drill", "--recipe", "demo", *where, *sets, *options]


def left(base: Path) -> list[str]:
    """Folders of drills, and processes of theirs, that are still there."""
    found = [str(path) for path in (base / "runs").glob(".drill-*")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
            folder = os.readlink(path.parent / "cwd")
        except OSError:
            continue
        if b"studies.drill" in words and folder == str(base):
            found.append(f"process {path.parent.name}")
    return found


def fail(text: str) -> None:
    raise SystemExit(f"FAULT: {text}")


def demo(base: Path, rng: random.Random) -> None:
    """The default drill, on the clock."""
    began = time.monotonic()
    done = subprocess.run(drill(base, "--json", small=False), cwd=base, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - began
    if done.returncode:
        fail(f"exit code {done.returncode}")
    report = json.loads(done.stdout)
    if report["status"] != "same" or len(report["kills"]) != 3 or seconds > 180 or left(base):
        fail(f"{report['status']}, {len(report['kills'])} kills, {seconds:.0f} s, left {left(base)}")
    worst, saved = report["worst_loss"], report["save_seconds"]
    print(
        f"demo: {seconds:.0f} s; 3 kills, losses bit for bit; worst loss {worst['seconds']:.1f} s, a save {saved['most']:.2f} s"
    )


def stopped(base: Path, rng: random.Random) -> None:
    """Ctrl-C, to the whole group as a terminal sends it."""
    for _ in range(3):
        process = subprocess.Popen(drill(base), cwd=base, stderr=subprocess.DEVNULL, start_new_session=True)
        moment = rng.uniform(1.0, 25.0)
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        code = process.wait(timeout=60)
        took = time.monotonic() - began
        if code != 130 or left(base):
            fail(f"SIGINT after {moment:.1f} s: exit code {code}, left {left(base)}")
        print(f"stopped: SIGINT after {moment:.1f} s: gone in {took:.1f} s, nothing left")


def killed(base: Path, rng: random.Random) -> None:
    """No process outlives the drill, and the next one clears its folder away."""
    process = subprocess.Popen(drill(base), cwd=base, stderr=subprocess.DEVNULL, start_new_session=True)
    time.sleep(rng.uniform(4.0, 20.0))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10.0
    while any(one.startswith("process") for one in left(base)) and time.monotonic() < deadline:
        time.sleep(0.1)
    remains = left(base)
    if len(remains) != 1 or remains[0].startswith("process"):
        fail(f"after SIGKILL of the drill: {remains}")
    subprocess.run(
        drill(base, "--kills", "1"), cwd=base, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if left(base):
        fail(f"the next drill left {left(base)}")
    print("killed: its processes ended with it, and the next drill cleared its folder away")


def sabotaged(base: Path, rng: random.Random) -> None:
    """A resume that forgets what the optimizer knows."""
    (base / "sabotaged_process.py").write_text(textwrap.dedent(SABOTAGE), encoding="utf-8")
    code = (
        "import sys\nfrom fasttrain.studies.drill import life\nhonest = life.start_own\n"
        "life.start_own = lambda module, stderr: honest('sabotaged_process', stderr)\n"
        "from fasttrain.cli.main import run\nrun(sys.argv[1:])\n"
    )
    words = [sys.executable, "-c", code, *drill(base, "--json")[3:]]
    path = os.pathsep.join(filter(None, (str(base), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, cwd=base, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    report = json.loads(done.stdout)
    if done.returncode != 6 or report["status"] != "different":
        fail(f"exit code {done.returncode}: {report}")
    first = min(kill["resumed_step"] for kill in report["kills"] if kill["resumed_step"])
    found = report["difference"]
    if not first < found["step"] <= first + 3:
        fail(f"it first differs after step {found['step']}, but the first resume was from step {first}")
    print(f"sabotaged: exit code 6; step {found['step']}: {found['text']} (resumed from step {first})")


PROOFS = {"demo": demo, "stopped": stopped, "killed": killed, "sabotaged": sabotaged}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=PROOFS, default=list(PROOFS))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="fasttrain-drill-") as folder:
        base = Path(folder).resolve()
        for name in options.only:
            PROOFS[name](base, rng)


if __name__ == "__main__":
    main()
