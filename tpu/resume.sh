#!/usr/bin/env bash
# Go on with a run, whatever became of its machine: replace a preempted TPU, set it up, start the run where it was.
#
#   tpu/resume.sh [--times N] [--delete-after] [options] [-- argument of oarjax train...]
#
#   --times N         replace the machine by itself, up to N times, when it is taken away again (default 0)
#   --delete-after    delete the TPU when the run has ended, well or not, or when a machine could not be set up; not
#                     when this command is interrupted, nor where a run may be going on
#
# Use the same settings and arguments as with tpu/run.sh. With --times this command has to stay alive: in tmux, or on a
# small VM of its own.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

step() { # script, arguments: as part of this one, which says at its end what is billed
  OARJAX_TPU_INNER=yes "$HERE/$1" "${PASS[@]}" "${@:2}"
}

replace() { # remove a machine that was taken away; fresh=no if there is one that runs
  fresh=yes
  find_state SUSPENDED
  case "$STATE" in
    ACTIVE) fresh=no ;;
    PREEMPTED | SUSPENDED | SUSPENDING | FAILED | DELETING)
      say "$TPU_NAME was taken away ($STATE): removing what is left, then requesting another"
      step delete.sh --yes
      ;;
    UNKNOWN) die "gcloud cannot say whether $TPU_NAME is there, so nothing was done: $PROBLEM" ;;
    STRAY) die "there is a machine '$TPU_NAME' that the queue does not know of: tpu/delete.sh" ;;
  esac
}

renew() { # request a machine and set it up; 76 if it was taken away meanwhile
  : >"$SCRATCH/setup"
  if step create.sh && step setup.sh 2>&1 | tee "$SCRATCH/setup"; then return 0; fi
  # A worker's words, not the command that has them too:
  if sed '/^+ /d' "$SCRATCH/setup" | grep "a run is going on here" >/dev/null; then GIVE_BACK=no; fi
  find_state SUSPENDED
  case "$STATE" in PREEMPTED | SUSPENDED | SUSPENDING) return 76 ;; esac
  return 1
}

before=() overrides=()
while (($#)) && [[ $1 != -- ]]; do before+=("$1") && shift; done
if (($#)); then overrides=("$@"); fi
load "${before[@]}"
times=0 ending=()
set -- "${ARGS[@]}"
while (($#)); do
  case "$1" in
    --times)
      [[ ${2:-} =~ ^[0-9]+$ ]] || die "--times: expected a number, got '${2:-}'"
      times="$2"
      shift
      ;;
    --delete-after) ending+=(--delete-after) ;;
    *) die "unknown argument: $1; arguments of oarjax train come behind --; see --help" ;;
  esac
  shift
done
if ((times > 0)); then ending+=(--watch); fi
need_config

while :; do
  replace
  code=0
  if [[ $fresh == yes ]]; then
    if [[ ${ending[*]} == *--delete-after* ]]; then GIVE_BACK=yes; fi
    renew || code=$?
  fi
  if ((code == 0)); then
    GIVE_BACK=no # from here on tpu/run.sh knows better
    OARJAX_TPU_FRESH="$fresh" step run.sh "${ending[@]}" "${overrides[@]}" || code=$?
  fi
  # Only a machine that was taken away is replaced: a run that was stopped on purpose stays stopped.
  if [[ $code != 76 ]] || ((times-- <= 0)); then exit "$code"; fi
  say "preempted; going on, $times more time(s) after this"
done
