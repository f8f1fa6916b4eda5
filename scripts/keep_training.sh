#!/usr/bin/env bash
# Trains to the end, whatever ends a try: scripts/keep_training.sh --run DIR --recipe NAME [further arguments of fasttrain train]
#
# Begins the run in DIR once and resumes it ever after (`train --resume auto`). Made for a pod's start command, as the container's
# first process too: a signal is passed on to the training, which saves, and ends the loop.
#
#   ends on       0 done, 2 usage or recipe, 3 data, 4 machine, 6 disk (or another process is at work on the run), 7 diverged,
#                 130 Ctrl-C, and after a signal of its own
#   tries again   after all others, among them 1 a bug, 5 out of memory, 137 killed, 143 told to stop by someone else
#   gives up      after five tries without a checkpoint of a later step, with the code of the last one
#
# --max-hours counts the hours of all tries, those of former loops too, as --max-cost does their cost.
# --on-finish is carried out at the end of the loop, not of every try: after each of its ends but that by a signal (SIGTERM), and
# never where the run is in use by another process: nothing has ended then. A signal while it is under way ends it too.
#
#   FASTTRAIN=COMMAND          the fasttrain to use (default: that on PATH, else .venv/bin/fasttrain in the checkout)
#   FASTTRAIN_TRIES=5          tries without a later checkpoint, a whole number from 1
#   FASTTRAIN_RETRY_SECONDS=10 pause between two tries, such as 10 or 0.5
set -euo pipefail
# Each try is a process group of its own, with Ctrl-C as it was: what bash starts in the background ignores it otherwise
set -m

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
tries="${FASTTRAIN_TRIES:-5}"
pause="${FASTTRAIN_RETRY_SECONDS:-10}"
run=""
on_finish=""
arguments=()
child=""
signalled=""
signals=0
pending=""
finishing=""
in_use=""
# By which a training says that another process has its run, and the exit code of that
readonly in_use_code=75 storage_code=6

say() { printf 'keep_training: %s\n' "$*" >&2; }

refuse() {
  say "$2"
  exit "$1"
}

# What stands at the head of this file.
show_help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

find_fasttrain() {
  local found="${FASTTRAIN:-}"
  [[ -n "$found" ]] || found="$(command -v fasttrain || true)"
  [[ -n "$found" || ! -x "$root/.venv/bin/fasttrain" ]] || found="$root/.venv/bin/fasttrain"
  command -v "${found:-fasttrain}" >/dev/null ||
    refuse 4 "${found:-fasttrain} was not found; make it with $root/scripts/setup_env.sh, or name it with FASTTRAIN=/path/to/fasttrain"
  fasttrain="$found"
}

take_arguments() {
  while (($#)); do
    case "$1" in
      --run | --on-finish | --resume)
        (($# > 1)) || refuse 2 "$1 needs a value"
        take "$1" "$2"
        shift
        ;;
      --run=* | --on-finish=* | --resume=*) take "${1%%=*}" "${1#*=}" ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
  # A name that the shell would take for a number of its own, or never end by, is refused here and not after hours
  [[ "$tries" =~ ^[1-9][0-9]{0,5}$ ]] || refuse 2 "FASTTRAIN_TRIES=$tries: should be a whole number from 1 to 999999, such as 5"
  [[ "$pause" =~ ^[0-9]{1,6}(\.[0-9]{1,6})?$ ]] ||
    refuse 2 "FASTTRAIN_RETRY_SECONDS=$pause: should be seconds from 0 to 999999, such as 10"
  [[ -n "$run" ]] || refuse 2 "--run DIR is missing: the folder, on a disk that outlives the machine, in which the run is begun and resumed"
}

take() {
  case "$1" in
    --run)
      run="$2"
      # As `fasttrain train` tells it to --on-finish
      [[ -z "$run" || "$run" == /* ]] || run="$PWD/$run"
      ;;
    --on-finish)
      [[ "$2" =~ [^[:space:]] ]] || refuse 2 "--on-finish is empty; give it a command, or stop-pod"
      on_finish="$2"
      ;;
    --resume) [[ "$2" == auto ]] || refuse 2 "--resume $2: this script always resumes by itself (--resume auto)" ;;
  esac
}

# Before anything is trained: a machine that cannot be stopped would be found out when nobody watches
check_on_finish() {
  [[ "$on_finish" != stop-pod ]] || "$root/scripts/runpod/stop_pod.sh" --check || exit $?
}

# The latest step that a checkpoint was saved of, summed over the folds where there are some.
saved_steps() {
  local file step total=0
  for file in "$run"/events.jsonl "$run"/fold_*/events.jsonl; do
    [[ -f "$file" ]] || continue
    step="$(sed -n 's/.*"event": *"CheckpointSaved".*"step": *\([0-9][0-9]*\).*/\1/p' "$file" | sort -n | tail -n 1)"
    total=$((total + ${step:-0}))
  done
  printf '%s' "$total"
}

# To the training alone, which ends its workers itself; where it is about to begin, once there is one. Each signal once: a second
# one ends it at once. What --on-finish began is ended as a whole, and where it does not hear, two seconds later all the same.
# shellcheck disable=SC2329  # the traps call it
pass_on() {
  signalled="$1"
  signals=$((signals + 1))
  if [[ -n "$child" ]]; then signal_child "$1"; else pending="$1"; fi
}

# Of a process; a text that no other has where the system does not tell it.
command_line() { { tr '\0' '\n' <"/proc/$1/cmdline" || printf '%s' "$1"; } 2>/dev/null; }

# Until it is a program of its own the child is a copy of this shell, which keeps a signal to itself.
signal_child() {
  local looks=0
  while ((looks++ < 100)) && [[ "$(command_line "$$")" == "$(command_line "$child")" ]]; do sleep 0.02; done
  if [[ -n "$finishing" ]]; then
    kill -s TERM -- "-$child" 2>/dev/null || true
    { sleep 2 && kill -s KILL -- "-$child"; } >/dev/null 2>&1 &
  else
    kill -s "$1" "$child" 2>/dev/null || true
  fi
}

start() {
  "$@" </dev/null >&"${output:-1}" &
  child=$!
  [[ -z "$pending" ]] || signal_child "$pending"
  pending=""
}

# Waits for the child to its end, however many signals cut the wait short, and sets `code`.
wait_for_child() {
  local before answer
  code=127
  while :; do
    before="$signals"
    answer=0
    wait "$child" || answer=$?
    # 127: that the child has ended was told by the wait before this one
    [[ "$answer" == 127 ]] || code="$answer"
    [[ "$signals" != "$before" ]] || break
  done
  child=""
  # What a training that has only just begun makes of SIGUSR1
  [[ "$signalled" != USR1 || "$code" != 138 ]] || code=143
}

rest() {
  start sleep "$1"
  wait_for_child
}

is_final() {
  case "$1" in
    0 | 2 | 3 | 4 | 6 | 7 | 130) return 0 ;;
    *) return 1 ;;
  esac
}

# Runs the training again and again, and sets `code` to that of the last try.
keep_training() {
  local best now without=0
  best="$(saved_steps)"
  while [[ -z "$signalled" ]]; do
    FASTTRAIN_EXIT_IN_USE="$in_use_code" start "$fasttrain" train --resume auto --run "$run" ${arguments[@]+"${arguments[@]}"}
    wait_for_child
    if [[ "$code" == "$in_use_code" ]]; then
      in_use=1
      code="$storage_code"
      return 0
    fi
    [[ -z "$signalled" ]] && ! is_final "$code" || return 0
    now="$(saved_steps)"
    without=$((without + 1))
    if ((now > best)); then
      best="$now"
      without=0
    fi
    if ((without >= tries)); then
      say "giving up: $without tries in a row ended without a checkpoint of a later step, the last with exit code $code"
      return 0
    fi
    if ((without)); then
      say "exit code $code; trying again in $pause s ($without of $tries tries without a checkpoint of a later step)"
    else
      say "exit code $code after a checkpoint of a later step; trying again in $pause s"
    fi
    rest "$pause"
  done
}

finish() {
  local code=0 before output=2
  # What came after the last try's end has no try to end
  pending=""
  if [[ -n "$on_finish" && -n "$in_use" ]]; then
    say "--on-finish is left out: another process is at work on $run, and nothing has ended there"
    return 0
  fi
  # Whoever sent SIGTERM takes the machine away, and the run is to go on elsewhere
  if [[ -z "$on_finish" || "$signalled" == TERM || "$signalled" == USR1 ]]; then
    return 0
  fi
  if [[ "$1" == 130 ]]; then
    say "--on-finish follows in 5 s; Ctrl-C now leaves it out"
    before="$signals"
    rest 5
    [[ "$signals" == "$before" ]] || return 0
  fi
  # As `fasttrain train` does it: its output to stderr, its failure told, the exit code left as it is
  finishing=1
  if [[ "$on_finish" == stop-pod ]]; then
    start "$root/scripts/runpod/stop_pod.sh"
  else
    FASTTRAIN_EXIT_CODE="$1" FASTTRAIN_RUN="$run" start sh -c "$on_finish"
  fi
  wait_for_child
  ((code == 0)) || say "--on-finish failed (exit code $code): $on_finish"
}

main() {
  local code=0 last
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    show_help
    exit 0
  fi
  find_fasttrain
  take_arguments "$@"
  check_on_finish
  trap 'pass_on TERM' TERM HUP
  trap 'pass_on INT' INT
  trap 'pass_on USR1' USR1
  keep_training
  last="$code"
  finish "$last"
  exit "$last"
}

main "$@"
