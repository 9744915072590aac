#!/usr/bin/env bash
# Start the run on all workers and follow it to its end; or stop it.
#
#   tpu/run.sh [--stop | --accept | --no-follow | --watch | --delete-after] [options] [-- argument of oarjax train...]
#
#   --stop            ask the run to write a checkpoint and end
#   --no-follow       return when it has started; tpu/logs.sh follows
#   --watch           do not give up while the network or worker 0 is out of reach: ask on until the run has ended
#   --delete-after    as --watch, and delete the TPU when the run has ended, well or not (works only while this command
#                     lives), or when it could not be started. A run that may be going on is never deleted.
#
#   --accept          run `oarjax accept` on every worker instead: a report per worker in the run's folder
#
# HF_TOKEN and every WANDB_... of this shell go to the workers, in a file that only their user can read.
#
# The same command on a run that was stopped goes on with it. Exit code: 0 done, 75 stopped (tpu/run.sh goes
# on), 76 machine gone (tpu/resume.sh goes on), 1 failed. Ctrl-C stops the following, not the run.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TRIES=10    # connections in a row that may fail
LONGEST=15  # pauses of POLL_SECONDS between two questions of a watch, at most

worker() { # what worker_run.sh is to do: the command for a worker
  echo "bash oarjax/src/tpu/worker_run.sh$(printf ' %q' "$@")"
}

judge() { # how the run stands, in VERDICT: complete, stopped, preempted, running or failed; in EXITS the workers' codes
  find_state ACTIVE
  case "$STATE" in
    ACTIVE) ;;
    UNKNOWN) VERDICT=running && return ;;
    *) VERDICT=preempted && return ;;
  esac
  ask gcloud storage cat "$SHARED/tpu/worker-*.exit" || true
  EXITS="$ANSWER"
  local codes # of this machine's workers, each once; a larger one may have left more files
  codes="$(awk -F '[ :]+' -v count="$WORKERS" '$2 < count { print $3 }' <<<"$ANSWER" | sort -u)"
  if grep -qvxE '0|75|running|' <<<"$codes"; then
    VERDICT=failed
  elif [[ -z $codes || $codes == *running* ]]; then
    VERDICT=running
  elif [[ $codes == 0 ]]; then
    VERDICT=complete
  else
    VERDICT=stopped
  fi
}

unused() { # from what the workers said when they were to start: was no run going on before?
  # One that answers anything else ran nothing, and no run goes on without it.
  if grep -qE "oarjax-worker [0-9]+: (runs already|FAILED: another run)" "$SCRATCH/said"; then return 1; fi
  [[ $GIVE_BACK == yes ]] || grep -qE "^oarjax-worker [0-9]+: " "$SCRATCH/said"
}

idle() { # do all workers say that nothing runs on them? Then nobody is left to write an exit code
  on_workers "looking for the run" "$(worker idle "$RUN")" >/dev/null 2>&1
}

follow() { # until the run ends or the machine goes; a connection that breaks is taken up again
  # One that lasted is no failure, however many there are in days. After TRIES failures in a row a watch goes on with
  # longer and longer pauses: what cannot be reached may well be training.
  local tries=0 began news="" before i
  while :; do
    began=$SECONDS
    # Without questions of its own, ssh waits for hours on a connection whose other end vanished.
    on_worker 0 --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4 "$(worker follow "$RUN")" || true
    if [[ $DRY_RUN == yes ]]; then VERDICT=unknown && return; fi
    if ((SECONDS - began >= STEADY_SECONDS)); then tries=0 news=""; fi
    judge
    if [[ $VERDICT == running ]] && ((++tries >= TRIES)) && idle; then
      judge # it may have ended meanwhile
      if [[ $VERDICT == running ]]; then
        VERDICT=failed EXITS+=$'\n'"but no worker runs it any more: killed (out of memory?), or the bucket was lost"
      fi
    fi
    if [[ $VERDICT == complete || $VERDICT == preempted ]]; then return; fi
    # A machine that is being taken away is called ACTIVE for a while after its run has ended.
    if [[ $VERDICT != running ]]; then
      if [[ $PROVISIONING =~ ^(spot|flex-start)$ ]] && wait_for "PREEMPTED|SUSPENDED|SUSPENDING|DELETING|FAILED|NONE" "$GRACE_SECONDS"; then
        VERDICT=preempted
      fi
      return
    fi
    if ((tries < TRIES)); then
      say "the log broke off, the run has not ended: following again"
      sleep "$POLL_SECONDS"
      continue
    fi
    if [[ $watch == no ]]; then return; fi
    before="$news" news="$STATE; ${EXITS//$'\n'/, }"
    if [[ $STATE == UNKNOWN ]]; then news="UNKNOWN; gcloud: $PROBLEM"; fi
    if [[ $news != "$before" ]]; then
      say "$(date +%H:%M:%S) STILL RUNNING, as far as known, but its log cannot be followed. $TPU_NAME: $news"
      say "watching on, with pauses of up to $LONGEST times $POLL_SECONDS seconds; nothing is deleted meanwhile"
    fi
    for ((i = TRIES; i <= tries && i < TRIES + LONGEST; i++)); do sleep "$POLL_SECONDS"; done
  done
}

report() { # the verdict, what to do, and the exit code
  case "$VERDICT" in
    unknown)
      say "nothing was started; a real run is followed to its end, and the verdict comes from gcloud storage cat" \
        "$SHARED/tpu/worker-*.exit"
      return 0
      ;;
    complete)
      say "DONE: run $RUN is complete, in $SHARED"
      return 0
      ;;
    stopped)
      say "STOPPED: the run ended with 75 (a checkpoint is written). tpu/run.sh goes on with it on this machine."
      return 75
      ;;
    preempted)
      say "PREEMPTED: the machine is gone ($STATE). tpu/resume.sh gets another and goes on from the last checkpoint."
      return 76
      ;;
    running)
      say "STILL RUNNING, as far as known, but its log cannot be followed: tpu/status.sh, then tpu/logs.sh"
      return 1
      ;;
    *)
      say "FAILED: exit codes by worker (0 done, 75 stopped):"
      echo "$EXITS"
      say "Why is at the end of the log: tpu/logs.sh --saved --worker N. When it is mended: tpu/setup.sh, tpu/run.sh"
      return 1
      ;;
  esac
}

send_environment() { # the variables that reach trackers and the hub, never on a command line
  local names name
  names="$(compgen -e | grep -xE 'HF_TOKEN|WANDB_[A-Z0-9_]+' || true)"
  if [[ -z $names ]]; then return; fi
  (umask 077 && for name in $names; do printf '%s=%q\n' "$name" "${!name}"; done >"$SCRATCH/oarjax-environment")
  say "to the workers: ${names//$'\n'/ }"
  to_workers "$SCRATCH/oarjax-environment" ||
    die "the workers did not get these variables; unset them, or try again"
}

end() { # report, give the machine back if asked to, leave
  local code=0
  report || code=$?
  if [[ $after == delete && $VERDICT == running ]]; then
    say "NOT DELETED: it may still train, and is still billed. tpu/status.sh looks, tpu/delete.sh deletes." >&2
  elif [[ $after == delete ]]; then
    give_back
  fi
  exit "$code"
}

before=() overrides=()
while (($#)) && [[ $1 != -- ]]; do before+=("$1") && shift; done
if (($#)); then shift && overrides=("$@"); fi
load "${before[@]}"
what=start action=start after=stay watch=no VERDICT=running EXITS=""
for argument in "${ARGS[@]}"; do
  case "$argument" in
    --stop) what=stop ;;
    --no-follow) after=leave ;;
    --watch) watch=yes ;;
    --delete-after) after=delete watch=yes ;;
    --accept) action=accept ;;
    *) die "unknown argument: $argument; arguments of oarjax train come behind --; see --help" ;;
  esac
done
if [[ $what == start ]]; then need_config; fi
# tpu/resume.sh knows that it has just made the machine.
if [[ $after == delete && ${OARJAX_TPU_FRESH:-} == yes ]]; then GIVE_BACK=yes; fi
need_machine
slices=()
if ((SLICES > 1)) && [[ $action == start ]]; then slices=("mesh.slice=$SLICES"); fi

if [[ $what == stop ]]; then
  on_workers "stopping the run" "$(worker stop "$RUN")" || die "some workers may still train: tpu/status.sh"
  say "stopped; tpu/run.sh goes on with it"
  exit 0
fi

commit="$(git -C "$CHECKOUT" rev-parse --short=12 HEAD 2>/dev/null || true)"
say "run $RUN: $CONFIG on $WORKERS worker(s), into $SHARED"
send_environment
if ! on_workers "starting the run" \
  "$(worker "$action" "$RUN" "$commit" "$MAX_RESTARTS" "$CONFIG" device=tpu "${slices[@]}" "${OVERRIDES[@]}" "${overrides[@]}")"; then
  if [[ $after == delete ]]; then
    GIVE_BACK="$(unused && echo yes || echo no)"
    if [[ $GIVE_BACK == yes ]]; then die "the run needs all workers"; fi
    say "NOT DELETED: a run may be going on there, by what the workers said above, if any did." >&2
  fi
  die "the run needs all workers, and those that started wait for the others. When the cause is removed: tpu/run.sh" \
    "again (it starts the missing ones), or tpu/run.sh --stop."
fi
GIVE_BACK=no
if [[ $after == leave ]]; then
  say "started. tpu/logs.sh follows it."
  exit 0
fi
follow
end
