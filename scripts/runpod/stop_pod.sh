#!/usr/bin/env bash
# Stops the RunPod pod that it runs on: scripts/runpod/stop_pod.sh [--check]
#
# --check only says whether it could. Exit code 4: this is no pod, or it has no runpodctl; 1: the pod could not be stopped. A
# stopped pod loses its container disk, keeps its volume, and still bills that until it is terminated. It may come back without
# its GPU, where somebody else has taken that.
#
#   FASTTRAIN_RETRY_SECONDS=10   pause between two of three tries
#   FASTTRAIN_STOP_SECONDS=60    for an answer of runpodctl, which hangs where the network is gone
#   FASTTRAIN_POD_ENVIRONMENT=/etc/rp_environment   the file in which RunPod keeps the pod's variables
set -euo pipefail

say() { printf 'stop_pod: %s\n' "$*" >&2; }

# A number of seconds, or where it is none, since a pod that is not stopped is billed on, the usual one.
seconds() {
  if [[ "$1" =~ ^[0-9]{1,6}(\.[0-9]{1,6})?$ ]]; then
    printf '%s' "$1"
  else
    say "$1 is no number of seconds; it is taken as $2"
    printf '%s' "$2"
  fi
}

# The variables of the pod that are not set here. The file is no program: a password in it may hold anything.
read_pod_environment() {
  local line name value
  local pattern='^(export[[:space:]]+)?(RUNPOD_[A-Za-z0-9_]+)=(.*)$'
  while IFS= read -r line || [[ -n "$line" ]]; do
    [[ "${line%$'\r'}" =~ $pattern ]] || continue
    name="${BASH_REMATCH[2]}" value="${BASH_REMATCH[3]}"
    value="${value#[\"\']}"
    value="${value%[\"\']}"
    [[ -n "${!name:-}" ]] || export "$name=$value"
  done <"$1"
}

check() {
  local kept="${FASTTRAIN_POD_ENVIRONMENT:-/etc/rp_environment}"
  # A shell that was opened over ssh lacks the pod's own variables
  if [[ -z "${RUNPOD_POD_ID:-}" && -r "$kept" && ! -d "$kept" ]]; then
    read_pod_environment "$kept"
  fi
  if [[ -z "${RUNPOD_POD_ID:-}" ]]; then
    say "RUNPOD_POD_ID is not set, so that this is no RunPod pod, and nothing to be stopped"
    exit 4
  fi
  if ! [[ "$RUNPOD_POD_ID" =~ ^[A-Za-z0-9_-]+$ ]]; then
    say "RUNPOD_POD_ID is $RUNPOD_POD_ID, which is no pod's id (letters and digits); set it to this pod's"
    exit 4
  fi
  if ! command -v runpodctl >/dev/null; then
    say "runpodctl, which RunPod puts on every pod, is not on PATH; install it, or stop the pod in RunPod's console"
    exit 4
  fi
}

# The new form first (runpodctl 2), then the old one, which ends with 0 even where the pod did not stop.
stop() {
  ask pod stop "$RUNPOD_POD_ID" && return
  ask stop pod "$RUNPOD_POD_ID" && [[ "$said" != *"stop failed"* ]]
}

ask() {
  local how=0 within=()
  # A container may lack coreutils
  ! command -v timeout >/dev/null || within=(timeout -k 5 "$patience")
  said="$(${within[@]+"${within[@]}"} runpodctl "$@" </dev/null 2>&1)" || how=$?
  ((how != 124 && how != 137)) || said="runpodctl gave no answer in $patience s"
  return "$how"
}

main() {
  local try pause patience
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
  pause="$(seconds "${FASTTRAIN_RETRY_SECONDS:-10}" 10)"
  patience="$(seconds "${FASTTRAIN_STOP_SECONDS:-60}" 60)"
  check
  [[ "${1:-}" != --check ]] || exit 0
  say "stopping this pod, $RUNPOD_POD_ID; its volume disk is still billed until you terminate it"
  for try in 1 2 3; do
    ((try == 1)) || sleep "$pause"
    if stop; then
      exit 0
    fi
  done
  say "the pod could NOT be stopped and goes on being billed: $said; stop it in RunPod's console"
  exit 1
}

main "$@"
