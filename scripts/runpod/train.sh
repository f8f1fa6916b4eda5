#!/usr/bin/env bash
# Trains in the background, with a log: scripts/runpod/train.sh NAME --recipe RECIPE [further arguments of fasttrain train]
#
# NAME is the run's, whose folder is NAME under the runs of the volume. The training outlives the shell that began it, and is begun
# again where it breaks off (scripts/keep_training.sh). Where it ends within seconds, refused or with nothing left to do, its last
# lines are shown, and the exit code is its own. The same command, or resume.sh, goes on with it on a pod that was stopped.
# Useful here: --max-hours, --max-cost USD --price-per-hour P, --on-finish stop-pod.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pod_settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/pod_settings.sh"
help_if_asked "$@"

[[ -n "${1:-}" && "$1" != -* && "$1" != */* ]] || fail 2 "give the run a name first: $0 NAME --recipe RECIPE"
name="$1"
shift
need_fasttrain
mkdir -p "$runs" "$logs"
log="$logs/$name.log"
process="$logs/$name.process"
! is_training "$process" || fail 2 "$name is being trained already; watch it with $root/scripts/runpod/watch.sh $name"
cd "$volume"
for argument; do printf '%s\0' "$argument"; done >"$logs/$name.arguments"
nohup setsid "$root/scripts/keep_training.sh" --run "$runs/$name" "$@" </dev/null >>"$log" 2>&1 &
training="$!"
echo "$training" >"$process"
say "$name is being trained; log: $log; watch it with $root/scripts/runpod/watch.sh $name"
# A refusal comes within seconds, and the shell is still there to be told
until="$((SECONDS + ${FASTTRAIN_LOOK_SECONDS:-5}))"
while kill -0 "$training" 2>/dev/null && ((SECONDS < until)); do sleep 0.1; done
if ! kill -0 "$training" 2>/dev/null; then
  code=0
  wait "$training" || code=$?
  tail -n 5 "$log" >&2
  say "it has ended already, with exit code $code; the lines above are its last"
  exit "$code"
fi
