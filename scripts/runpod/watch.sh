#!/usr/bin/env bash
# Shows a training in the background as it goes on: scripts/runpod/watch.sh [NAME]      (default: the newest); Ctrl-C ends the view
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pod_settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/pod_settings.sh"
help_if_asked "$@"

log="$logs/${1:-}.log"
if [[ -z "${1:-}" ]]; then
  log="$(find "$logs" -name '*.log' -exec ls -t {} + 2>/dev/null | sed -n 1p || true)"
fi
[[ -f "$log" ]] || fail 2 "there is no log of ${1:-any training} in $logs; begin one with $root/scripts/runpod/train.sh"
name="$(basename "$log" .log)"
follow=()
if is_training "$logs/$name.process"; then
  read -r process <"$logs/$name.process"
  follow=(-F "--pid=$process")
else
  say "$name is not being trained now; the end of its log:"
fi
exec tail -n 40 ${follow[@]+"${follow[@]}"} "$log"
