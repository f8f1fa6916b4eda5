#!/usr/bin/env bash
# Finds the fastest setting for this GPU: scripts/runpod/tune.sh --recipe NAME [further arguments of fasttrain tune]
#
# Trains nothing; `train.sh --recipe NAME --tuned` uses what was found, which is kept on the volume.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pod_settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/pod_settings.sh"

need_fasttrain
cd "$volume"
exec fasttrain tune --no-train "$@"
