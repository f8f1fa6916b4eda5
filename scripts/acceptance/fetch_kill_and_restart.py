"""Proves that `fasttrain data fetch` survives SIGKILL: killed at random moments of downloading, checking and unpacking and
started again each time, it ends with the archive's checksum and files, and at no moment was there half a set under its name.

    python scripts/acceptance/fetch_kill_and_restart.py [--kills 10] [--megabytes 40] [--seed 0]

The server is on loopback and gives ranges; a third of its connections break by themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "tests" / "data"))

from fetch_server import Server, contents, drop_after, md5, serving, set_archive, set_files  # noqa: E402


def start(server: Server, checksum: str, folder: Path) -> subprocess.Popen[bytes]:
    """The command, as a process of its own."""
    command = [sys.executable, "-m", "fasttrain", "data", "fetch", "spleen", "--to", str(folder)]
    environ = {**os.environ, "no_proxy": "*", "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen(
        [*command, "--from", server.address, "--md5", checksum],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def size_of(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def kill_somewhere(process: subprocess.Popen[bytes], folder: Path, phase: str, moment: random.Random) -> str:
    """Waits for the phase to have begun, a random while longer, and kills; what was under way, or `done`."""
    sign = {"downloading": folder.with_name("spleen.tar.part"), "unpacking": folder.with_name(".spleen.unpacking")}
    begun = size_of(sign["downloading"])
    while process.poll() is None and not sign["unpacking"].exists():
        if phase == "downloading" and size_of(sign["downloading"]) > begun:
            break
        time.sleep(0.001)
    time.sleep(moment.uniform(0.0, 0.3 if phase == "downloading" else 0.05))
    if process.poll() is not None:
        return "done"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return (
        "unpacking" if sign["unpacking"].exists() else f"downloading or checking ({size_of(sign['downloading'])} bytes)"
    )


def main() -> int:
    """Exit code 0 where all of it held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moment = random.Random(options.seed)
    files = set_files(options.megabytes, cases=40)
    blob = set_archive(files)
    with tempfile.TemporaryDirectory() as base, serving(blob, seconds_a_block=0.002, block=1 << 16) as server:
        folder = Path(base) / "spleen"
        for number in range(options.kills):
            if moment.random() < 1 / 3:
                server.faults = [drop_after(moment.randrange(1, len(blob) // 8))]
            phase = "downloading" if number < 2 * options.kills // 3 else "unpacking"
            found = kill_somewhere(start(server, md5(blob), folder), folder, phase, moment)
            if folder.exists() and contents(folder) != files:
                print(f"kill {number + 1}: half a set lies in {folder.name}")
                return 1
            if found == "done":
                print(f"run {number + 1} ended before its kill")
                break
            print(f"kill {number + 1}: while {found}, after {len(server.asked)} requests in all", flush=True)
        code = start(server, md5(blob), folder).wait()
        left = {path.name for path in Path(base).iterdir()}
        if code or left != {"spleen"} or contents(folder) != files:
            print(f"exit code {code}, left over: {sorted(left)}, files right: {contents(folder) == files}")
            return 1
        print(f"ended with MD5 {md5(blob)} after {server.sent / len(blob):.2f} times the archive's bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
