#!/usr/bin/env bash
# Goes on in the background with a run that was cut short: scripts/runpod/resume.sh [NAME]      (default: the newest run)
#
# With the arguments that train.sh was given, limits and --on-finish among them; other ones are given to train.sh itself, which goes
# on with a run that there is as well.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pod_settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/pod_settings.sh"
help_if_asked "$@"

run="$(run_named "${1:-}")"
name="$(basename "$run")"
[[ -f "$logs/$name.arguments" ]] ||
  fail 2 "$run was not begun by train.sh; go on with it by: fasttrain resume $run"
mapfile -d '' -t arguments <"$logs/$name.arguments"
exec "$root/scripts/runpod/train.sh" "$name" ${arguments[@]+"${arguments[@]}"}
