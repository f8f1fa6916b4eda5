#!/usr/bin/env bash
# Sends a run to another machine: scripts/runpod/send_results.sh [NAME]      (default: the newest run)
#
# Packs what the run left (all but lock and half-written files) and offers it with `runpodctl send`, which prints the command that
# takes it on the other machine. FASTTRAIN_SEND=ARCHIVE keeps the archive there and sends nothing.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pod_settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/pod_settings.sh"
help_if_asked "$@"

run="$(run_named "${1:-}")"
name="$(basename "$run")"
archive="${FASTTRAIN_SEND:-}"
if [[ -z "$archive" ]]; then
  need_runpodctl "pack the run with FASTTRAIN_SEND=/path/$name.tar.gz $0 and take it with scp"
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' EXIT
  archive="$folder/$name.tar.gz"
fi
[[ ! -e "$archive" ]] || fail 2 "$archive is there already; choose another name"
tar -C "$(dirname "$run")" --exclude=run.lock --exclude='.*.part' -czf "$archive" "$name" ||
  fail 6 "the run could not be packed into $archive (the reason stands above)"
say "$run is packed: $(du -h "$archive" | cut -f 1)"
[[ -n "${FASTTRAIN_SEND:-}" ]] || runpodctl send "$archive"
