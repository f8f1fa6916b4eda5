#!/usr/bin/env bash
# Trains the bundled demo, which needs no download and no GPU: scripts/demo.sh [further arguments of fasttrain train]
#
#   FASTTRAIN_VENV=DIR   the virtual environment to use (default: .venv in the checkout); made where it is missing
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${FASTTRAIN_VENV:-$root/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"

"$root/scripts/setup_env.sh" "$venv"
exec "$venv/bin/fasttrain" train --recipe demo "$@"
