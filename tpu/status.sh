#!/usr/bin/env bash
# What is there, what is billed, and how the run stands.
#
#   tpu/status.sh [options]
#
# Lists every TPU and queue entry of the project in the zone, then the run's last words in the bucket, and what
# `oarjax status` says of it: iteration, reward, speed, time left, chip-hours so far, last checkpoint.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

progress() { # by worker 0 where the machine runs, else by an oarjax that is installed here, from copies of four files
  local copy="$SCRATCH/run" name
  if [[ $machine == ACTIVE ]]; then
    run gcloud compute tpus tpu-vm ssh "${NODES[0]}" "${WHERE[@]}" --worker=0 \
      --command="oarjax/venv/bin/oarjax status oarjax/bucket/runs/$(printf %q "$RUN")" && return
    say "worker 0 does not answer"
  fi
  mkdir -p "$copy"
  for name in config.yaml metrics.jsonl checkpoints.json inputs.json; do
    if ask gcloud storage cat "$SHARED/$name"; then echo "$ANSWER" >"$copy/$name"; fi
  done
  if [[ $DRY_RUN == yes ]]; then return; fi
  if [[ ! -s $copy/config.yaml ]]; then
    say "no run in $SHARED yet"
  elif command -v oarjax >/dev/null; then
    oarjax status "$copy"
  else
    say "last line of metrics.jsonl (install oarjax here for more): $(tail -n 1 "$copy/metrics.jsonl" 2>/dev/null)"
  fi
}

load "$@"
no_more_arguments
find_state ACTIVE
machine="$STATE"
say "all entries in the queue of $ZONE:"
run gcloud compute tpus queued-resources list "${WHERE[@]}" || true
say "all machines in $ZONE, billed while they are READY:"
run gcloud compute tpus tpu-vm list "${WHERE[@]}" || true
say "run $RUN, exit codes (0 done, 75 stopped and resumable, running, others are errors):"
if ask gcloud storage cat "$SHARED/tpu/worker-*.exit"; then echo "${ANSWER}"; else say "nothing in $SHARED/tpu yet"; fi
say "run $RUN, progress:"
progress
