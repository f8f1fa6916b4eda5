#!/usr/bin/env bash
# Stops the RunPod pod that it runs on: scripts/runpod/stop_pod.sh [--check]
#
# --check only says whether it could. Exit code 4: this is no pod, or it has no runpodctl; 1: the pod could not be stopped. A
# stopped pod loses its container disk, keeps its volume, and still bills that until it is terminated. It may come back without
# its GPU, where somebody else has taken that.
#
#   FASTTRAIN_RETRY_SECONDS=10   pause between two of three tries
set -euo pipefail

say() { printf 'stop_pod: %s\n' "$*" >&2; }

check() {
  # A shell that was opened over ssh lacks the pod's own variables
  if [[ -z "${RUNPOD_POD_ID:-}" && -r /etc/rp_environment ]]; then
    # shellcheck disable=SC1091
    source /etc/rp_environment
  fi
  if [[ -z "${RUNPOD_POD_ID:-}" ]]; then
    say "RUNPOD_POD_ID is not set, so that this is no RunPod pod, and nothing to be stopped"
    exit 4
  fi
  if ! command -v runpodctl >/dev/null; then
    say "runpodctl, which RunPod puts on every pod, is not on PATH; install it, or stop the pod in RunPod's console"
    exit 4
  fi
}

# The new form first (runpodctl 2), then the old one, which ends with 0 even where the pod did not stop.
stop() {
  said="$(runpodctl pod stop "$RUNPOD_POD_ID" </dev/null 2>&1)" && return
  said="$(runpodctl stop pod "$RUNPOD_POD_ID" </dev/null 2>&1)" && [[ "$said" != *"stop failed"* ]]
}

main() {
  local try
  case "${1:-}" in
    "" | --check) ;;
    --help | -h)
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    # A misspelt --check must not stop the machine
    *)
      say "$1: should be --check, or nothing"
      exit 2
      ;;
  esac
  check
  [[ "${1:-}" != --check ]] || exit 0
  say "stopping this pod, $RUNPOD_POD_ID; its volume disk is still billed until you terminate it"
  for try in 1 2 3; do
    ((try == 1)) || sleep "${FASTTRAIN_RETRY_SECONDS:-10}"
    if stop; then
      exit 0
    fi
  done
  say "the pod could NOT be stopped and goes on being billed: $said; stop it in RunPod's console"
  exit 1
}

main "$@"
