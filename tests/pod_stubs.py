"""Programs on PATH that stand in for those of a pod or a cluster, and note how they were called."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FASTTRAIN = """#!/usr/bin/env bash
# Ends with the next of $STUB_CODES (the last one again and again): `5+` saves a checkpoint of a later step first, `5=` one of the
# same, `kill` dies of SIGKILL, `in-use` finds another process at work, `wait` until a signal, at which it saves
printf '%s\\n' "$*" >>"$STUB_LOG/fasttrain"
calls=$(wc -l <"$STUB_LOG/fasttrain")
read -ra codes <<<"${STUB_CODES:-0}"
code="${codes[calls - 1]:-${codes[-1]}}"
run=""
while (($#)); do [[ "$1" != --run ]] || run="$2"; shift; done
save() {
  mkdir -p "$run"
  touch "$run/recipe.yaml"
  printf '{"event": "CheckpointSaved", "path": "last.pt", "epoch": 1, "step": %s, "mib": 0.1}\\n' "$1" >>"$run/events.jsonl"
}
case "$code" in
  *+) code="${code%+}"; save "$((calls * 10))" ;;
  *=) code="${code%=}"; save 10 ;;
  kill) kill -KILL $$ ;;
  in-use) code="${FASTTRAIN_EXIT_IN_USE:-6}" ;;
  wait)
    trap 'echo TERM >>"$STUB_LOG/signals"; exit 143' TERM
    trap 'echo USR1 >>"$STUB_LOG/signals"; exit 143' USR1
    trap 'echo INT >>"$STUB_LOG/signals"; exit 130' INT
    touch "$STUB_LOG/waiting"
    for _ in {1..200}; do sleep 0.05; done
    exit 9 ;;
esac
exit "$code"
"""

RUNPODCTL = """#!/usr/bin/env bash
# $STUB_RUNPODCTL: new (version 2), old (version 1), hanging, broken (nothing works), or refusing (the old form's failure with
# exit code 0)
printf '%s\\n' "$*" >>"$STUB_LOG/runpodctl"
kind="${STUB_RUNPODCTL:-new}"
case "$kind $1 $2" in
  "hanging "*) exec sleep 300 ;;
  "broken "*) echo "Error: no route to host" >&2; exit 1 ;;
  *" receive "*) mkdir -p mine/imagesTr; echo voxels >mine/imagesTr/a.nii.gz; exit ;;
  *" send "*) cp "$2" "$STUB_LOG/sent"; echo "runpodctl receive 1-a-b-c-2"; exit ;;
  "new pod stop" | "new pod get" | "old stop pod" | "old get pod") echo "{}" ;;
  "refusing stop pod") echo 'pod "abc" stop failed; status is RUNNING' ;;
  *) echo "Error: unknown command \\"$1\\"" >&2; exit 1 ;;
esac
"""


SET_UP = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$STUB_LOG/set_up"
[[ -z "${STUB_SET_UP_FAILS:-}" ]] || exit "$STUB_SET_UP_FAILS"
mkdir -p "$1/bin"
cp "$STUB_LOG/stub" "$1/bin/fasttrain"
"""


class Place:
    """A folder with stubs first on PATH, and an environment without anything of this machine's pod or settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.volume = folder / "volume"
        for made in (self.bin, self.log, self.volume):
            made.mkdir()
        self.scripts = ROOT / "scripts"
        self.add("fasttrain", FASTTRAIN)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("FASTTRAIN", "RUNPOD", "SLURM"))
        }
        self.environ = {
            **kept,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "STUB_LOG": str(self.log),
            "FASTTRAIN_RETRY_SECONDS": "0",
            "FASTTRAIN_LOOK_SECONDS": "0",
            "FASTTRAIN_VOLUME": str(self.volume),
        }

    def add(self, name: str, text: str) -> None:
        """A program on PATH."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def with_set_up_of_its_own(self) -> "Place":
        """A copy of the scripts, whose set-up installs a stub in place of fasttrain; none is on PATH before."""
        self.scripts = self.folder / "checkout" / "scripts"
        shutil.copytree(ROOT / "scripts", self.scripts, ignore=shutil.ignore_patterns("__pycache__"))
        (self.bin / "fasttrain").rename(self.log / "stub")
        (self.scripts / "setup_env.sh").write_text(SET_UP)
        return self

    def on_a_pod(self, runpodctl: str = "new") -> "Place":
        """As RunPod has it."""
        self.add("runpodctl", RUNPODCTL)
        self.environ |= {"RUNPOD_POD_ID": "abc", "STUB_RUNPODCTL": runpodctl}
        return self

    def run(self, script: str, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs a script of the repository to its end."""
        return subprocess.run(self.words(script, *arguments), **self.options(environ), timeout=60)

    def start(self, script: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
        """Starts one."""
        return subprocess.Popen(self.words(script, *arguments), **self.options(environ))

    def words(self, script: str, *arguments: object) -> list[str]:
        """The command line."""
        return [str(self.scripts / script), *map(str, arguments)]

    def options(self, environ: dict[str, str]) -> dict:
        """For a process."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return {**pipes, "env": {**self.environ, **environ}, "cwd": self.folder}

    def calls(self, program: str) -> list[str]:
        """How a stub was called, oldest first."""
        path = self.log / program
        return path.read_text().splitlines() if path.exists() else []
