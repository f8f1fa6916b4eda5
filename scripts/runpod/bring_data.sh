#!/usr/bin/env bash
# Brings a data set onto the pod's volume: scripts/runpod/bring_data.sh fetch NAME     or     … receive CODE [NAME]
#
#   fetch NAME            a set of the Medical Segmentation Decathlon (spleen, hippocampus, heart, brain-tumor), as `fasttrain data
#                         fetch` does: goes on where it broke off, checks the sum, does nothing where the set is there already
#   receive CODE [NAME]   what `runpodctl send FOLDER` offers on another machine, where CODE is printed; it lands in the folder of
#                         all data sets (FASTTRAIN_DATA), and does nothing where NAME is there already
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pod_settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/pod_settings.sh"
help_if_asked "$@"

case "${1:-}" in
  fetch)
    (($# == 2)) || fail 2 "fetch needs the name of a set: $0 fetch hippocampus"
    need_fasttrain
    fasttrain data fetch "$2"
    ;;
  receive)
    (($# == 2 || $# == 3)) || fail 2 "receive needs the code that runpodctl send printed: $0 receive CODE [NAME]"
    if [[ -n "${3:-}" && -e "$FASTTRAIN_DATA/$3" ]]; then
      say "$FASTTRAIN_DATA/$3 is there already"
      exit 0
    fi
    need_runpodctl "copy the data to $FASTTRAIN_DATA with scp or rsync"
    mkdir -p "$FASTTRAIN_DATA"
    # Beside its place, so that a transfer that broke off is never taken for the set
    part="$(mktemp -d "$FASTTRAIN_DATA/.receiving.XXXXXX")"
    trap 'rm -rf "$part"' EXIT
    (cd "$part" && runpodctl receive "$2") || fail 1 "runpodctl receive failed (its reason stands above); send it anew for a new code"
    [[ -n "$(ls -A "$part")" ]] || fail 1 "runpodctl receive brought nothing; send it anew for a new code"
    [[ -z "${3:-}" || -e "$part/$3" ]] || fail 2 "what came is $(ls -A "$part"), not $3; send the folder $3, or give its name"
    for came in "$part"/* "$part"/.[!.]*; do
      [[ -e "$came" ]] || continue
      [[ ! -e "$FASTTRAIN_DATA/${came##*/}" ]] || fail 2 "$FASTTRAIN_DATA/${came##*/} is there already; move it away first"
      mv "$came" "$FASTTRAIN_DATA/"
      say "$FASTTRAIN_DATA/${came##*/} is there"
    done
    ;;
  *) fail 2 "give fetch NAME, or receive CODE [NAME]" ;;
esac
