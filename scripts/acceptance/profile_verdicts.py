"""Whether `fasttrain profile` tells a slow loader from a slow network, and predicts what the right change then gains.

    python scripts/acceptance/profile_verdicts.py [--tiny] [--keep DIR] [SCENARIO …]

Each scenario puts a delay into a real part of fasttrain: into the making of a batch, which the right change (workers) hides, or
into the forward pass of every convolution, half of which the right change (no activation checkpointing) spares. `profile` must
name what holds the run back, and its predicted gain must lie within 20% of what a second profile measures with that change.
Without a delay the demo must not be called data-bound. --tiny: a network and patches so small that it takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LOADER, NETWORK, NONE = "loader", "network", "none"
_TINY = {
    "data.source.cases": 6,
    "data.split.validation": 2,
    "data.spacing": [5, 5, 5],
    "patch.size": [16, 16, 16],
    "network.features": [4, 8, 8],
    "network.strides": [2, 2],
    "acceleration.threads": 1,
}
# What is open is set, so that both profiles of a scenario differ in the change alone
_SET = {"acceleration.amp": "off", "acceleration.channels_last": "off"}
_SCENARIOS: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    # Settings, verdict, and the change: its key and value (None: as predicted)
    LOADER: ({"data.workers": 0}, "data-bound", "data.workers", None),
    NETWORK: (
        {"data.workers": 0, "acceleration.activation_checkpointing": "on"},
        "compute-bound",
        "acceleration.activation_checkpointing",
        "off",
    ),
    NONE: ({"data.workers": 0}, "", "", None),
}
_WITHIN = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(_SCENARIOS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder for the profiles")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="profile-verdicts-") as temporary:
        base = options.keep or Path(temporary)
        base.mkdir(parents=True, exist_ok=True)
        for name in options.scenarios or list(_SCENARIOS):
            scenario(name, base.absolute(), options.tiny)


def scenario(name: str, base: Path, tiny: bool) -> None:
    """Profiles, changes what was predicted, profiles again, and compares. Ends the program where something is amiss."""
    settings, bound, key, value = _SCENARIOS[name]
    settings = {**(_TINY if tiny else {}), **_SET, **settings}
    before = profiled(name, base, f"{name}-before", settings, tiny)
    found = before["verdict"]["bound"]
    if not bound:
        if found == "data-bound":
            fail(f"{name}: called {found}: {before['verdict']['evidence']}")
        print(f"{name}: {found}, {before['patches_per_second']:.2f} patches/s")
        return
    if found != bound:
        fail(f"{name}: called {found}, not {bound}: {before['verdict']['evidence']}")
    change = next((one for one in before["changes"] if one["setting"].startswith(f"{key}: ")), None)
    if change is None or change is not before["changes"][0]:
        fail(f"{name}: {key} is not what would gain most: {before['changes']}")
    assert change is not None
    after = profiled(
        name,
        base,
        f"{name}-after",
        {**settings, key: change["setting"].split(": ")[1] if value is None else value},
        tiny,
    )
    measured = after["patches_per_second"] / before["patches_per_second"] - 1
    told = f"{name}: {found}; {change['setting']}: predicted {change['gain']:+.1%}, measured {measured:+.1%}"
    if abs(change["gain"] - measured) > _WITHIN * measured:
        fail(f"{told}: more than {_WITHIN:.0%} apart; {before['three_runs']} and then {after['three_runs']}")
    print(told)


def profiled(name: str, base: Path, folder: str, settings: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """The document of a profile, in a process that has the delay of a scenario."""
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value).strip(chr(34))}")]
    words = [sys.executable, str(Path(__file__).absolute())]
    # Beside what a batch or a step takes by itself, and what it takes more where others use the CPUs
    delay = {LOADER: 0.4 if tiny else 4.0, NETWORK: 0.03 if tiny else 0.1, NONE: 0.0}[name]
    environment = {
        **os.environ,
        "PROFILE_VERDICTS_DELAY": f"{name} {delay}",
        "FASTTRAIN_CACHE": str(base / "cache"),
        "PYTHONPATH": str(Path(__file__).absolute().parents[2]),
    }
    command = ["profile", "--recipe", "demo", "--device", "cpu", "--json", "--out", folder, *sets]
    done = subprocess.run([*words, *command], cwd=base, env=environment, capture_output=True)
    if done.returncode:
        fail(f"{name}: exit code {done.returncode}: {done.stderr.decode()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def delayed(name: str, seconds: float) -> None:
    """Puts the delay into fasttrain's own parts, in this process and in those it forks."""
    if name == LOADER:
        from fasttrain.batches.patch_maker import PatchMaker

        made = PatchMaker._made

        def slow_made(self: Any, first_position: int) -> Any:
            time.sleep(seconds)
            return made(self, first_position)

        PatchMaker._made = slow_made  # type: ignore[method-assign]
    elif name == NETWORK:
        import torch

        forward = torch.nn.Conv3d.forward

        def slow_forward(self: Any, image: Any) -> Any:
            time.sleep(seconds)
            return forward(self, image)

        torch.nn.Conv3d.forward = slow_forward  # type: ignore[method-assign]


def fail(text: str) -> None:
    raise SystemExit(f"FAULT: {text}")


if __name__ == "__main__":
    asked = os.environ.pop("PROFILE_VERDICTS_DELAY", None)
    if asked is None:
        main()
    else:
        part, pause = asked.split()
        delayed(part, float(pause))
        from fasttrain.cli.main import run

        run(sys.argv[1:])
