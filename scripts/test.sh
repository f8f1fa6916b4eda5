#!/usr/bin/env bash
# Runs every check of the project on the CPU and stops at the first that fails: scripts/test.sh [pytest arguments]
#
#   FASTTRAIN_VENV=DIR   the virtual environment to use (default: .venv in the checkout); made where it is missing
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${FASTTRAIN_VENV:-$root/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"

FASTTRAIN_DEV=1 "$root/scripts/setup_env.sh" "$venv"
cd "$root"
export PATH="$venv/bin:$PATH"

check() {
  printf -- '-- %s\n' "$*" >&2
  "$@"
}

check ruff check .
check ruff format --check .
check mypy
check lint-imports
if (($#)); then
  check python -m pytest "$@"
else
  # Several files at a time: one pytest leaves every core but one idle
  check python scripts/run_tests.py
fi
