"""Proves that two machines train together: two network namespaces with addresses of their own, an agent of torchrun in each.

    sudo python scripts/acceptance/two_nodes.py [--ranks 1] [--seconds 60]

They train the demo, resume it, go on with it on one node alone, and then the link between them is cut: every rank must have ended
within the time, with a sentence on each side. Needs root and `ip` (iproute2).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NODES = ("fasttrain-a", "fasttrain-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
LINKS = ("fta0", "ftb0")
SETTINGS = [
    "data.source.cases=6",
    "data.split.validation=2",
    "data.spacing=[3,3,3]",
    "patch.size=[32,32,32]",
    "network.features=[4,8,8]",
    "network.strides=[2,2]",
    "training.iterations_per_epoch=20",
    "validation.every=1",
    "output.report=false",
    "output.plots=false",
    "acceleration.amp=off",
    "acceleration.channels_last=on",
]


def ip(*words: str, may_fail: bool = False) -> None:
    """Runs `ip`; the script ends where that fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise SystemExit(
            f"ip {' '.join(words)}: {done.stderr.strip()}; it needs root, and a system that lends network namespaces"
        )


@contextlib.contextmanager
def network():
    """Two namespaces with a link between them."""
    for node in NODES:
        ip("netns", "del", node, may_fail=True)
    try:
        for node in NODES:
            ip("netns", "add", node)
        ip("link", "add", LINKS[0], "netns", NODES[0], "type", "veth", "peer", "name", LINKS[1], "netns", NODES[1])
        for node, link, address in zip(NODES, LINKS, ADDRESSES, strict=True):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", node, "link", "set", link, "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    finally:
        for node in NODES:
            ip("netns", "del", node, may_fail=True)


def start(base: Path, name: str, ranks: int, words: list[str]) -> list[subprocess.Popen[bytes]]:
    """An agent in each namespace."""
    agents = []
    for node, link, address in zip(NODES, LINKS, ADDRESSES, strict=True):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}"]
        meeting = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={ADDRESSES[0]}:29400",
            f"--rdzv-id={name}",
            f"--local-addr={address}",
        ]
        # By itself an agent knows its machine by name, which namespaces share
        meeting.append(f"--rdzv-conf=is_host={node == NODES[0]}")
        command = ["ip", "netns", "exec", node, *torchrun, *meeting, "-m", "--", "fasttrain", *words]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"}
        with (base / f"{name}-{node}.log").open("wb") as log:
            agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True))
    return agents


def ranks_of(run: Path) -> set[int]:
    """Processes of the run that are no agents."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if str(run).encode() in words and b"torch.distributed.run" not in words:
                found.add(int(name))
    return found


def finish(base: Path, name: str, agents: list[subprocess.Popen[bytes]], seconds: float = 180) -> None:
    """Waits for both; all must have gone well."""
    codes = [agent.wait(seconds) for agent in agents]
    if codes != [0, 0]:
        for node in NODES:
            print((base / f"{name}-{node}.log").read_text(errors="replace")[-3000:])
        raise SystemExit(f"FAULT: {name}: exit codes {codes}")
    print(f"ok: {name}: {'; '.join((base / f'{name}-{NODES[0]}.log').read_text().splitlines()[-1:])}", flush=True)


def summary(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return found


def cut(base: Path, run: Path, ranks: int, train: list[str], most_seconds: float) -> None:
    """Trains without an end, and cuts the link."""
    agents = start(base, "cut", ranks, [*train, "--run", str(run), "--set", "training.epochs=5000"])
    try:
        until = time.monotonic() + 120
        while not (run / "checkpoints" / "last.pt").exists() and time.monotonic() < until:
            time.sleep(0.1)
        ip("-n", NODES[1], "link", "set", LINKS[1], "down")
        began = time.monotonic()
        while ranks_of(run) and time.monotonic() - began < most_seconds + 60:
            time.sleep(0.2)
        seconds, left = time.monotonic() - began, ranks_of(run)
        told = {}
        for node in NODES:
            log = (base / f"cut-{node}.log").read_text(errors="replace")
            told[node] = [line for line in log.splitlines() if line.startswith("fasttrain: ")]
        print(f"the link was cut: {seconds:.1f} s until every rank had ended; {told}", flush=True)
        if left or seconds > most_seconds or any(len(one) != 1 for one in told.values()):
            raise SystemExit(f"FAULT: cut: {len(left)} ranks left, {seconds:.1f} s, {told}; see {base}")
        if summary(run)["status"] != "failed":
            raise SystemExit(f"FAULT: cut: summary.json says {summary(run)['status']}")
    finally:
        for agent in agents:
            with contextlib.suppress(OSError):
                os.killpg(agent.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="two-nodes-"))
    print(f"runs in {base}", flush=True)
    train = ["train", "--recipe", "demo", "--data", str(base / "data"), "--device", "cpu"]
    train += [part for setting in SETTINGS for part in ("--set", setting)]
    run = base / "run"
    with network():
        begin = [*train, "--run", str(run), "--set", "training.epochs=2"]
        finish(base, "train", start(base, "train", options.ranks, begin))
        resume = ["resume", str(run), "--set", "training.epochs=4"]
        finish(base, "resume", start(base, "resume", options.ranks, resume))
        if (found := summary(run))["epochs"] != 4 or found["status"] != "done":
            raise SystemExit(f"FAULT: resume: {found}")
        alone = [sys.executable, "-m", "fasttrain", "resume", str(run), "--set", "training.epochs=5"]
        subprocess.run(alone, check=True, capture_output=True)
        print(f"ok: one rank went on to epoch {summary(run)['epochs']}", flush=True)
        cut(base, base / "run-cut", options.ranks, train, options.seconds)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
