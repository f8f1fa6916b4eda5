#!/usr/bin/env bash
# Makes fasttrain ready on a fresh RunPod pod: scripts/runpod/set_up.sh
#
# The virtual environment, data, caches and runs go to the volume (FASTTRAIN_VOLUME, default /workspace), so that they are there
# again when the pod is started anew; running it again is quick. A CUDA torch (2.8 or later) of the image is used and left as it
# is. Ends with `fasttrain doctor`, and its exit code: 4 where the machine cannot train on its GPU.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pod_settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/pod_settings.sh"
help_if_asked "$@"

[[ -d "$volume" && -w "$volume" ]] ||
  fail 4 "$volume, the pod's volume, is not there or cannot be written; name its mount with FASTTRAIN_VOLUME=DIR"
mkdir -p "$runs" "$logs" "$FASTTRAIN_DATA" "$FASTTRAIN_CACHE" || fail 6 "$volume cannot be written; is it full?"
"$root/scripts/setup_env.sh" "$FASTTRAIN_VENV"
PATH="$FASTTRAIN_VENV/bin:$PATH"
if ! "$root/scripts/runpod/stop_pod.sh" --check; then
  say "so --on-finish stop-pod will be refused here"
elif ! { runpodctl pod get "$RUNPOD_POD_ID" || runpodctl get pod "$RUNPOD_POD_ID"; } </dev/null >/dev/null 2>&1; then
  say "runpodctl finds no pod $RUNPOD_POD_ID with this pod's API key, so stop-pod may fail; try: runpodctl get pod $RUNPOD_POD_ID"
fi
cd "$volume"
code=0
fasttrain doctor || code=$?
((code != 0)) || say "ready; in a shell of your own: source $root/scripts/runpod/pod_settings.sh"
exit "$code"
