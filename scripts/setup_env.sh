#!/usr/bin/env bash
# Makes a virtual environment with fasttrain in it: scripts/setup_env.sh [DIR]     (default: .venv in the checkout)
#
#   PYTHON=python3.12          the interpreter to build on (default: python3; with the environment active, the one below it)
#   FASTTRAIN_DEV=1            with the development tools
#   FASTTRAIN_SYSTEM_TORCH=0   do not use a CUDA build of torch that the interpreter already has
#
# Where the interpreter has a working CUDA build of torch 2.8 or later (the image of a GPU pod), that one is used and left as it
# is; elsewhere the versions in constraints.txt are installed. Running it again is quick. Exit code 4: the machine lacks
# something, and one sentence says what to do. Messages go to stderr.
set -euo pipefail

if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi
if [[ "${1:-}" == -* ]]; then
  printf 'setup_env: %s is no folder for the environment; see %s --help\n' "$1" "$0" >&2
  exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
dev="${FASTTRAIN_DEV:-0}"
lend="${FASTTRAIN_SYSTEM_TORCH:-1}"
venv="${1:-$root/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"
stamp="$venv/.fasttrain-setup"

say() { printf 'setup_env: %s\n' "$*" >&2; }

fail() {
  say "$*"
  exit 4
}

# Whether a program lies in the environment, or is a link that leads through it, also one that leads in a circle.
is_own() {
  local path="$1" target
  for _ in {1..40}; do
    [[ ! "$(dirname "$path")" -ef "$venv/bin" ]] || return 0
    target="$(readlink "$path")" || return 1
    [[ "$target" == /* ]] || target="$(dirname "$path")/$target"
    path="$target"
  done
}

# With the environment active, python3 is its own, which would take another base for a reason to clear the environment, itself
# among it, and at worst link itself to itself. So that one is never built on, but the one that the environment was made with.
find_python() {
  local found former folder path=""
  found="$(command -v "$python")" ||
    fail "$python was not found; install Python 3.10 or later, or name one with PYTHON=/path/to/python3."
  is_own "$found" || return 0
  former="$(stamp_line 4)"
  if [[ -n "$former" && -x "$former" ]] && ! is_own "$former"; then
    python="$former"
    return
  fi
  while IFS= read -r -d : folder; do
    [[ "$folder" -ef "$venv/bin" ]] || path+="${path:+:}$folder"
  done <<<"$PATH:"
  former="$(PATH="$path" command -v "$(basename "$python")" || PATH="$path" command -v python3 || true)"
  if [[ -z "$former" ]] || is_own "$former"; then
    fail "$found is the environment's own, on which it cannot be built, and there is no other; name one with PYTHON=/path/to/python3."
  fi
  python="$former"
}

check_python() {
  local version
  find_python
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ||
    fail "$python does not run; name a Python 3.10 or later with PYTHON=/path/to/python3."
  if [[ "${version%%.*}" -lt 3 || ("${version%%.*}" -eq 3 && "${version#*.}" -lt 10) ]]; then
    fail "$python is Python $version, but fasttrain needs 3.10 or later; install one and name it: PYTHON=python3.12 $0"
  fi
  "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$(missing_venv "$version")"
}

# An externally managed Python refuses pip outside a virtual environment, so that there is no second way.
missing_venv() {
  local managed=""
  if "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")))' 2>/dev/null; then
    managed=" and is externally managed, so that pip may not install into it"
  fi
  printf '%s' "$python (Python $1) cannot make virtual environments, since its venv or ensurepip is missing$managed; " \
    "install it (on Debian and Ubuntu: apt-get install python$1-venv) or name another Python with PYTHON=/path/to/python3."
}

# What an environment is built on, one line; with another base it is made anew, not added to.
base_line() {
  "$python" - "$root" "$venv" "$lend" <<'PYTHON'
import sys
from importlib import metadata

root, venv, lend = sys.argv[1:]
try:
    torch = metadata.version("torch")
except metadata.PackageNotFoundError:
    torch = "none"
print(f"{root} in {venv}; python {sys.version.split()[0]} of {sys.prefix} with torch {torch}, lend {lend}")
PYTHON
}

# What is installed into it, one line.
content_line() {
  "$python" - "$1" "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/setup_env.sh" <<'PYTHON'
import hashlib
import sys

dev, *files = sys.argv[1:]
digest = hashlib.sha256()
for file in files:
    with open(file, "rb") as stream:
        digest.update(hashlib.sha256(stream.read()).digest())
print(f"dev {dev}, files {digest.hexdigest()}")
PYTHON
}

stamp_line() { sed -n "$1p" "$stamp" 2>/dev/null || true; }

# Of the interpreter that it was made with, whatever PATH is by the next time.
python_path() {
  local path
  path="$(command -v "$python")"
  [[ "$path" == /* ]] || path="$PWD/$path"
  printf '%s' "$path"
}

is_up_to_date() {
  local found
  [[ -x "$venv/bin/fasttrain" && "$(stamp_line 1)" == "$(base_line)" ]] || return 1
  found="$(stamp_line 3)"
  # An environment with the development tools serves where they are not asked for, too.
  [[ "$found" == "$(content_line "$dev")" || "$found" == "$(content_line 1)" ]] || return 1
  "$venv/bin/python" -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))'
}

# Prints `none`, `cpu VERSION`, `old VERSION` or `cuda VERSION` for the torch that the interpreter already has.
probe_torch() {
  [[ "$lend" == 1 ]] || { echo none; return; }
  "$python" - 2>/dev/null <<'PYTHON' | tail -n 1
import re

try:
    import torch

    version = str(torch.__version__)
    found = "cuda" if torch.version.cuda and torch.cuda.is_available() else "cpu"
    number = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(a|b|rc|\.dev)?", version)
    release = tuple(int(part or 0) for part in number.groups()[:3])
    # To pip a pre-release of 2.8.0 is older than 2.8.
    if found == "cuda" and (release < (2, 8, 0) or (release == (2, 8, 0) and number.group(4))):
        found = "old"
    print(found, version)
except Exception:
    print("none")
PYTHON
}

# Versions of the interpreter's own torch and of what is compiled against it, in the form of a constraint file.
system_pins() {
  "$python" - <<'PYTHON'
import re
import sys
from importlib import metadata

for name in ("torch", "torchvision", "torchaudio", "triton", "pytorch-triton", "numpy"):
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
    if name == "numpy" and tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (1, 26):
        print(f"setup_env: numpy {version} is too old for fasttrain, which gets one of its own", file=sys.stderr)
        continue
    print(f"{name}=={version}")
PYTHON
}

# Makes the environment, or keeps the one there is if it has the same base ($1: kind of torch; the rest is for venv).
make_venv() {
  local kind="$1"
  shift
  if [[ "$(stamp_line 1)" == "$(base_line)" && "$(stamp_line 2)" == "$kind" ]] && "$venv/bin/python" -c "" 2>/dev/null; then
    return 0
  fi
  if [[ -e "$venv" && ! -e "$stamp" && ! -e "$venv.unfinished" && -n "$(ls -A "$venv")" ]]; then
    fail "$venv exists and was not made by this script; move it away or give another folder: $0 DIR"
  fi
  # The marker lies beside the folder while venv clears it: a run that is killed here leaves a folder that is known as ours.
  { mkdir -p "$venv" && : >"$venv.unfinished"; } || fail "$venv cannot be made; give a folder that can be written: $0 DIR"
  "$python" -m venv --clear "$@" "$venv" >&2 ||
    fail "$python could not make a virtual environment in $venv (its reason stands above); give another folder: $0 DIR"
  printf '%s\n%s\nunfinished\n%s\n' "$(base_line)" "$kind" "$(python_path)" >"$stamp"
  rm -f "$venv.unfinished"
}

# A venv made from inside a venv sees the packages of the base interpreter, not those of the venv it was made from.
lend_parent_packages() {
  local site
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  "$python" -c 'import sys, sysconfig
if sys.prefix != sys.base_prefix:
    print("\n".join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))))' >"$site/fasttrain_parent.pth"
}

install() {
  local target="$root" options=(install --disable-pip-version-check)
  [[ "$dev" != 1 ]] || target="${root}[dev]"
  [[ -t 2 ]] || options+=(--quiet --progress-bar off)
  PIP_USER=0 "$venv/bin/python" -m pip "${options[@]}" "$@" --editable "$target" >&2 ||
    fail "pip could not install fasttrain into $venv (its reason stands above); check the network and the disk, then run $0 again."
}

install_beside_system_torch() {
  local pins="$venv/system-constraints.txt" version="$1" found
  say "using torch $version of $python (CUDA works) and leaving it as it is"
  make_venv "cuda $version" --system-site-packages
  lend_parent_packages
  # Packages compiled against numpy have to suit the system's, so that pip chooses those; the others are as tested.
  { system_pins; grep -vE '^(#|(torch|numpy|scipy|matplotlib)==)' "$root/constraints.txt"; } >"$pins"
  install --constraint "$pins"
  found="$("$venv/bin/python" -c 'import torch; print(torch.__version__, torch.cuda.is_available())' | tail -n 1)" || found="none"
  [[ "$found" == "$version True" ]] ||
    fail "$venv sees torch '$found' where $python has '$version True'; run FASTTRAIN_SYSTEM_TORCH=0 $0 to install a torch of its own."
}

main() {
  local kind version
  check_python
  if is_up_to_date; then
    say "$venv is up to date"
    return
  fi
  read -r kind version <<<"$(probe_torch)"
  if [[ "$kind" == cuda ]]; then
    install_beside_system_torch "$version"
  else
    if [[ "$kind" == old ]]; then
      say "$python has torch $version, but fasttrain needs 2.8 or later: installing the tested one into $venv and leaving" \
        "that one as it is; to save the download, start from an image with torch 2.8 or later."
    fi
    make_venv own
    install --constraint "$root/constraints.txt"
  fi
  printf '%s\n%s\n%s\n%s\n' "$(base_line)" "$(stamp_line 2)" "$(content_line "$dev")" "$(python_path)" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  say "$venv is ready: $venv/bin/fasttrain --help"
}

main
