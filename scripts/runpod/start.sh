#!/usr/bin/env bash
# All of it as one start command of a pod: scripts/runpod/start.sh NAME [--fetch SET | --receive CODE SET] [--tune] --recipe RECIPE …
#
# Sets the pod up, brings the data in, finds the fastest setting where --tune asks for it, trains NAME to its end and stops the pod.
# The pod may vanish at any time: started anew, the same command does what is left, and resumes the run. All other arguments are
# those of `fasttrain train`; --on-finish CMD does something else than stopping the pod, and --on-finish : nothing.
#
# What fails before training is tried three times, and then the pod is stopped as well, since an idle GPU costs as much as a busy
# one. To look around on a pod that this command stops, start it with another one, such as `sleep infinity`.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pod_settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/pod_settings.sh"
help_if_asked "$@"

pause="${FASTTRAIN_RETRY_SECONDS:-10}"
[[ "$pause" =~ ^[0-9]{1,6}(\.[0-9]{1,6})?$ ]] || pause=10
on_finish=stop-pod
fetch=""
receive=()
tune=0
recipe=()
arguments=()

take_arguments() {
  while (($#)); do
    case "$1" in
      --fetch | --on-finish | --recipe | -r | --set | -s | --data | --device)
        (($# > 1)) || fail 2 "$1 needs a value"
        ;;&
      --fetch) fetch="$2" && shift ;;
      --fetch=*) fetch="${1#*=}" ;;
      --on-finish) on_finish="$2" && shift ;;
      --on-finish=*) on_finish="${1#*=}" ;;
      --receive)
        (($# > 2)) || fail 2 "--receive needs the code and the set's name"
        receive=("$2" "$3")
        shift 2
        ;;
      --tune) tune=1 ;;
      # What decides on speed is told to the tuning, too
      --recipe | -r | --set | -s | --data | --device) recipe+=("$1" "$2") && shift ;;
      --recipe=* | -r?* | --set=* | -s?* | --data=* | --device=*) recipe+=("$1") ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
}

patiently() {
  local code=0 try
  for try in 1 2 3; do
    code=0
    "$@" && return
    code=$?
    # The same refusal would come again
    ((code != 2 && code != 4)) || break
    ((try == 3)) || sleep "$pause"
  done
  say "$(basename "$1") failed (exit code $code), so that nothing can be trained"
  give_up "$code"
}

give_up() {
  if [[ "$on_finish" == stop-pod ]]; then
    "$root/scripts/runpod/stop_pod.sh" || true
  else
    FASTTRAIN_EXIT_CODE="$1" FASTTRAIN_RUN="$runs/$name" sh -c "$on_finish" </dev/null >&2 || true
  fi
  exit "$1"
}

[[ -n "${1:-}" && "$1" != -* && "$1" != */* ]] || fail 2 "give the run a name first: $0 NAME --recipe RECIPE"
name="$1"
shift
take_arguments "$@"
here="$root/scripts/runpod"
mkdir -p "$logs"
# Given twice, the second one would fail at what the first is at, and stop the pod under it. The system drops the lock with this process
exec {lock}>>"$logs/$name.starting"
! command -v flock >/dev/null || flock -n "$lock" || fail 6 "$name is being started already by this command; nothing was done"
patiently "$here/set_up.sh"
PATH="$FASTTRAIN_VENV/bin:$PATH"
[[ -z "$fetch" ]] || patiently "$here/bring_data.sh" fetch "$fetch"
((${#receive[@]} == 0)) || patiently "$here/bring_data.sh" receive "${receive[@]}"
if ((tune)); then
  # Once: what was found is part of the run from its first step on
  [[ -f "$runs/$name/recipe.yaml" ]] || patiently "$here/tune.sh" ${recipe[@]+"${recipe[@]}"}
  arguments+=(--tuned)
fi
cd "$volume"
# From here on the run's own lock does it
exec {lock}>&-
exec "$root/scripts/keep_training.sh" --run "$runs/$name" --on-finish "$on_finish" ${recipe[@]+"${recipe[@]}"} \
  ${arguments[@]+"${arguments[@]}"}
