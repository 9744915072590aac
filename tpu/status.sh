#!/usr/bin/env bash
# What is there, what is billed, and how the run stands.
#
#   tpu/status.sh [options]
#
# Lists every TPU and queue entry of the project in the zone, then the run's last words in the bucket.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

load "$@"
no_more_arguments
find_state ACTIVE
say "all entries in the queue of $ZONE:"
run gcloud compute tpus queued-resources list "${WHERE[@]}" || true
say "all machines in $ZONE, billed while they are READY:"
run gcloud compute tpus tpu-vm list "${WHERE[@]}" || true
say "run $RUN, exit codes (0 done, 75 stopped and resumable, running, others are errors):"
if ask gcloud storage cat "$SHARED/tpu/worker-*.exit"; then echo "${ANSWER}"; else say "nothing in $SHARED/tpu yet"; fi
