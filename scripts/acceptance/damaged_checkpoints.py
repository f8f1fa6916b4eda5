"""Proves what a resume makes of damaged checkpoints: cut at half, emptied, one bit flipped; some of them, and all of them.

    python scripts/acceptance/damaged_checkpoints.py

Where one is sound it must be warned of the others, go on from the newest good one, name the lost epochs, and end with the losses
of an unbroken run. Where none is, it must end with exit code 6 and leave the run folder as it was, to the last byte.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from stop_anywhere import SETTINGS, losses


def cut(path: Path) -> None:
    """At half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    """Nothing is left."""
    path.write_bytes(b"")


def one_bit(path: Path) -> None:
    """In the middle, among the weights."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGES: tuple[Callable[[Path], None], ...] = (cut, emptied, one_bit)


def fasttrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command."""
    return subprocess.run([sys.executable, "-m", "fasttrain", *arguments], capture_output=True, text=True, check=False)


def contents(folder: Path) -> dict[str, str]:
    """Path → digest and time of every file."""
    return {
        str(path.relative_to(folder)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def unfinished(whole: Path, folder: Path) -> None:
    """A copy of a run as if it had been killed in its last epoch, with the checkpoints of epochs 1 to 3."""
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    checkpoints = folder / "checkpoints"
    for name in ("last.pt", "best.pt", "epoch_0004.pt"):
        (checkpoints / name).unlink()
    shutil.copy(checkpoints / "epoch_0003.pt", checkpoints / "last.pt")
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("epoch", 0) <= 3 and json.loads(line)["event"] != "RunEnded"]
    (folder / "events.jsonl").write_text("".join(kept), encoding="utf-8")


def main() -> None:
    base = Path(tempfile.mkdtemp(prefix="damaged-checkpoints-"))
    print(f"runs in {base}", flush=True)
    whole = base / "whole"
    sets = [
        part for one in [*SETTINGS, "data.workers=0", "output.keep_every=1", "output.keep=9"] for part in ("--set", one)
    ]
    done = fasttrain(
        *("train", "-r", "demo", "--data", str(base / "data"), "--run", str(whole), "--device", "cpu"), *sets
    )
    if done.returncode:
        raise SystemExit(f"FAULT: {done.stderr}")
    for damage in DAMAGES:
        for lost in (1, 2):
            folder = base / f"{damage.__name__}-{lost}"
            unfinished(whole, folder)
            names = ["last.pt", "epoch_0003.pt", "epoch_0002.pt"][: lost + 1]
            for name in names:
                damage(folder / "checkpoints" / name)
            done = fasttrain("resume", str(folder))
            epochs = "epoch 3 is lost" if lost == 1 else "epochs 2 to 3 are lost"
            wanted = [*(f"{name} is damaged" for name in names), f"going on from epoch_000{3 - lost}.pt", epochs]
            missing = [text for text in wanted if text not in done.stderr]
            if done.returncode or missing or losses(folder) != losses(whole):
                raise SystemExit(f"FAULT: {damage.__name__}: {done.returncode}, not said: {missing}\n{done.stderr}")
            print(f"  {damage.__name__}: {', '.join(names)}: {epochs}, the end is the same", flush=True)
        folder = base / f"{damage.__name__}-all"
        unfinished(whole, folder)
        for path in (folder / "checkpoints").glob("*.pt"):
            damage(path)
        before = contents(folder)
        done = fasttrain("resume", str(folder))
        if done.returncode != 6 or contents(folder) != before or len(done.stderr.strip().splitlines()) != 4:
            changed = [
                name for name in {**before, **contents(folder)} if before.get(name) != contents(folder).get(name)
            ]
            raise SystemExit(f"FAULT: {damage.__name__}, all: {done.returncode}, changed {changed}\n{done.stderr}")
        print(f"  {damage.__name__}: all of them: exit code 6, nothing changed", flush=True)
    shutil.rmtree(base)
    print("every damage was found")


if __name__ == "__main__":
    main()
