#!/usr/bin/env bash
# Ten short trials: no memory ran out, none failed, every state counted, the device's use measured.
#
#   scripts/search_smoke.sh [RECIPE] [further arguments of fasttrain search run]     (RECIPE: demo)
#
#   FASTTRAIN_VENV=DIR   the virtual environment to use (default: .venv in the checkout)
#   TRIALS=N             other than ten
#   LEAST_SHARE=0.5      the share of the time in which the device must have trained (default: 0, only told)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${FASTTRAIN_VENV:-$root/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"
[[ -x "$venv/bin/python" ]] || { echo "there is no $venv; scripts/setup_env.sh makes it, or set FASTTRAIN_VENV" >&2; exit 4; }

recipe="${1:-demo}"
[[ $# -gt 0 ]] && shift
trials="${TRIALS:-10}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

"$venv/bin/python" -m fasttrain search run --recipe "$recipe" --trials "$trials" --folder "$folder/search" \
  --set search.validate_every=1 --set output.pictures=off --set output.report=false "$@"
"$venv/bin/python" -m fasttrain search status "$folder/search" --json > "$folder/status.json"
"$venv/bin/python" - "$folder/status.json" "$trials" "${LEAST_SHARE:-0}" <<'PYTHON'
import json
import sys

found, trials, least = json.load(open(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3])
counts = {state: one["count"] for state, one in found["states"].items()}
use = found["device"]
print(f"states {counts}; pruning rate {found['pruning_rate']:.0%}; out of memory {found['out_of_memory']}")
print(f"trained {use['training_share']:.0%} of {use['wall_seconds']:.0f} s, {use['name']}")
faults = []
if found["trials"] != trials or counts["complete"] + counts["pruned"] != trials:
    faults.append(f"{trials} trials were asked for: {counts}, {found['failures']}")
if found["out_of_memory"]:
    faults.append(f"{found['out_of_memory']} trials ran out of memory")
if use["training_share"] < least:
    faults.append(f"the device trained {use['training_share']:.0%} of the time, and {least:.0%} are wanted")
sys.exit("; ".join(faults) or 0)
PYTHON
