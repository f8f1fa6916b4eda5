"""Proves what `fasttrain search` promises on a CPU: a study that is killed ends whole, two share one, a lock loses nothing.

    python scripts/acceptance/search_shows.py [--only killed shared-journal shared-postgres locked] [--trials 8]

killed: 8 trials of the demo as it is, with pruning, in under 6 minutes on two cores: SIGKILL to the search and all its workers
in the middle, and the same command again. The others take a smaller demo. shared: two processes at once on one journal, and on
one PostgreSQL that is started here on loopback. locked: SQLite held locked for 20 s by another process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "data.source.cases": 10,
    "data.split.validation": 3,
    "data.spacing": "[3,3,3]",
    "patch.size": "[32,32,32]",
    "network.features": "[8,16,24]",
    "network.strides": "[2,2]",
    "training.epochs": 9,
    "training.iterations_per_epoch": 8,
    "validation.every": 1,
    "acceleration.threads": 1,
    "acceleration.amp": "off",
    "acceleration.channels_last": "on",
    "output.pictures": "off",
    "search.epochs": 9,
    "search.pruner.min_epochs": 3,
    "search.pruner.patience": 1,
}


class Place:
    """A folder of its own, with its own caches, in which fasttrain is called."""

    def __init__(self, folder: Path, trials: int) -> None:
        self.folder = folder
        self.trials = trials
        self.environ = {**os.environ, "FASTTRAIN_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}

    def run(self, *words: str, small: bool = True) -> subprocess.Popen[bytes]:
        """A search under way."""
        sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")] if small else []
        command = ["search", "run", "--recipe", "demo", "--data", str(self.folder / "data"), "--device", "cpu"]
        command += ["--trials", str(self.trials), *words, *sets]
        return subprocess.Popen(
            [sys.executable, "-m", "fasttrain", *command], cwd=self.folder, env=self.environ, stdout=subprocess.DEVNULL
        )

    def status(self, folder: str) -> dict:
        """What `search status --json` says."""
        words = [sys.executable, "-m", "fasttrain", "search", "status", folder, "--json"]
        return json.loads(
            subprocess.run(words, cwd=self.folder, env=self.environ, check=True, stdout=subprocess.PIPE).stdout
        )

    def trial_folders(self, folder: str) -> list[Path]:
        """The runs there are."""
        return sorted((self.folder / folder).glob("trial-*"))


def check(found: dict, trials: int) -> None:
    """As many counted trials as asked for, one with the recipe's own values, and none left running or waiting."""
    counts = {state: one["count"] for state, one in found["states"].items()}
    print(f"  counted {found['trials']}, states {counts}, gone on with {found['gone_on_with']}")
    print(f"  pruning rate {found['pruning_rate']}, after epochs {found['pruned_after_epochs']}")
    assert found["trials"] == trials, found["trials"]
    assert found["baseline"]["state"] == "complete", found["baseline"]
    assert counts["running"] == counts["waiting"] == 0, counts


def killed(place: Place) -> None:
    """Show 1."""
    began = time.perf_counter()
    process = place.run(small=False)
    while not (place.folder / "runs/search-demo/trial-0003/metrics.csv").exists():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.1)
    for one in (process.pid, *below(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    process.wait()
    assert place.run(small=False).wait() == 0
    seconds = time.perf_counter() - began
    found = place.status("runs/search-demo")
    check(found, place.trials)
    assert found["gone_on_with"] == 1, found["gone_on_with"]
    print(f"  {seconds:.0f} s in all")
    assert seconds < 360, seconds


def below(process: int) -> list[int]:
    """The processes that it started, and theirs."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
    found = [child for child, parent in parents.items() if parent == process]
    return found + [one for child in found for one in below(child)]


def shared(place: Place, storage: str, folder: str) -> None:
    """Show 2: both processes at once; no trial's folder has two runs in it, and both end."""
    both = [place.run("--storage", storage, "--folder", folder) for _ in range(2)]
    codes = [process.wait() for process in both]
    assert codes == [0, 0], codes
    check(place.status(folder), place.trials)
    starts = {}
    for run in place.trial_folders(folder):
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        starts[run.name] = sum(event["event"] == "RunStarted" for event in events)
    print(f"  starts a trial {starts}")
    assert set(starts.values()) == {1}, starts
    assert len(starts) == place.trials, starts


def locked(place: Place) -> None:
    """Show 3."""
    process = place.run("--folder", "runs/locked")
    database = place.folder / "runs/locked/study.db"
    while not list((place.folder / "runs/locked").glob("trial-0001/metrics.csv")):
        assert process.poll() is None
        time.sleep(0.1)
    with contextlib.closing(sqlite3.connect(database, timeout=60, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        time.sleep(20)
        holder.execute("ROLLBACK")
    assert process.wait() == 0
    found = place.status("runs/locked")
    check(found, place.trials)
    assert found["states"]["failed"]["count"] == 0, found["states"]
    assert found["gone_on_with"] == 0, found["gone_on_with"]


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A server of its own on loopback, by Debian's package, as a user that is not root; its URL."""
    binaries = [path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    if not binaries:
        sys.exit("there is no PostgreSQL: apt-get install postgresql")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if user:
        shutil.chown(folder, "postgres")
    place = folder / "postgres"
    subprocess.run(
        [*user, str(binaries[-1] / "initdb"), "-D", str(place), "-U", "fasttrain", "--auth=trust"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    options = ["-D", str(place), "-p", str(port), "-h", "127.0.0.1", "-k", str(folder)]
    server = subprocess.Popen([*user, str(binaries[-1] / "postgres"), *options], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield f"postgresql://fasttrain@127.0.0.1:{port}/postgres"
    finally:
        stop = [*user, str(binaries[-1] / "pg_ctl"), "-D", str(place), "stop", "-m", "immediate"]
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL)
        server.wait()


def main() -> None:
    """Each show in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shows = ("killed", "shared-journal", "shared-postgres", "locked")
    parser.add_argument("--only", nargs="+", choices=shows, default=shows)
    parser.add_argument("--trials", type=int, default=8)
    arguments = parser.parse_args()
    for show in arguments.only:
        print(show, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            place = Place(Path(folder), arguments.trials)
            if show == "killed":
                killed(place)
            elif show == "locked":
                locked(place)
            elif show == "shared-journal":
                shared(place, "journal", "runs/journal")
            else:
                with tempfile.TemporaryDirectory() as server, postgres(Path(server)) as url:
                    shared(place, url, "runs/postgres")
    print("all shown")


if __name__ == "__main__":
    main()
