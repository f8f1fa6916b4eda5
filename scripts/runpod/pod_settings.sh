#!/usr/bin/env bash
# What the scripts in this folder share: read by them with `source`, and by a shell of your own with
#
#   source scripts/runpod/pod_settings.sh
#
# after which `fasttrain` is on PATH and data, caches and runs lie on the pod's volume, which a stopped pod keeps.
#
#   FASTTRAIN_VOLUME=/workspace   where the volume is mounted
# shellcheck disable=SC2034  # the scripts use these

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
volume="${FASTTRAIN_VOLUME:-/workspace}"
runs="$volume/runs"
logs="$volume/logs"
export FASTTRAIN_DATA="${FASTTRAIN_DATA:-$volume/data}"
export FASTTRAIN_CACHE="${FASTTRAIN_CACHE:-$volume/cache}"
export FASTTRAIN_VENV="${FASTTRAIN_VENV:-$volume/venv}"
export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$volume/pip-cache}"
[[ ! -x "$FASTTRAIN_VENV/bin/fasttrain" ]] || PATH="$FASTTRAIN_VENV/bin:$PATH"

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }

# Of a script whose first word asks for it: what stands at its head.
help_if_asked() {
  [[ "${1:-}" == --help || "${1:-}" == -h ]] || return 0
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
}

fail() {
  say "$2"
  exit "$1"
}

need_fasttrain() {
  command -v fasttrain >/dev/null || fail 4 "fasttrain is not here yet; make it with $root/scripts/runpod/set_up.sh"
}

need_runpodctl() {
  command -v runpodctl >/dev/null ||
    fail 4 "runpodctl, which RunPod puts on every pod, is not on PATH; install it, or $1"
}

# The run's folder that was named, else that of the newest run.
run_named() {
  local newest
  if [[ -n "${1:-}" ]]; then
    newest="$1"
    [[ -d "$newest" || ! -d "$runs/$newest" ]] || newest="$runs/$newest"
  else
    newest="$(find "$runs" -mindepth 2 -maxdepth 2 -name recipe.yaml -exec ls -t {} + 2>/dev/null | sed -n 1p || true)"
    newest="${newest%/recipe.yaml}"
    [[ -n "$newest" ]] || fail 2 "there is no run under $runs yet; begin one with $root/scripts/runpod/train.sh"
  fi
  [[ -f "$newest/recipe.yaml" ]] || fail 2 "$newest holds no run (it has no recipe.yaml)"
  printf '%s' "$newest"
}

# Whether the background training of a run is alive: its first line is its process, and that still is one of ours.
is_training() {
  local process command
  [[ -f "$1" ]] || return 1
  read -r process <"$1" || return 1
  [[ "$process" =~ ^[0-9]+$ ]] || return 1
  command="$(tr '\0' ' ' 2>/dev/null <"/proc/$process/cmdline")" || return 1
  [[ "$command" == *keep_training* ]]
}
