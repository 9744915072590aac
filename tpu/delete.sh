#!/usr/bin/env bash
# Delete the TPU and its entry in the queue, and see that they are gone. What is in the bucket stays.
#
#   tpu/delete.sh [--yes] [options]
#
#   --yes    do not ask
#
# A run that is going on is cut off; for a last checkpoint: tpu/run.sh --stop first.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

load "$@"
sure=no
for argument in "${ARGS[@]}"; do
  [[ $argument == --yes ]] || die "unknown argument: $argument; see --help"
  sure=yes
done

find_state ACTIVE
if [[ $STATE == NONE ]]; then exit 0; fi
if [[ $sure == no && $DRY_RUN == no ]]; then
  [[ -t 0 ]] || die "nobody here to ask: use --yes. Nothing was deleted."
  read -r -p "Delete TPU '$TPU_NAME' ($STATE) in $ZONE? [y/N] " answer
  [[ $answer == [yY]* ]] || die "nothing was deleted"
fi

if [[ $STATE != STRAY ]]; then
  run gcloud compute tpus queued-resources delete "$TPU_NAME" "${WHERE[@]}" --force --quiet || true
  wait_for "NONE|STRAY" "$DELETE_SECONDS" || true
fi
if [[ $STATE == STRAY ]]; then # a machine that the queue does not know of
  for node in "${NODES[@]}"; do run gcloud compute tpus tpu-vm delete "$node" "${WHERE[@]}" --quiet || true; done
  wait_for NONE "$DELETE_SECONDS" || true
fi
if [[ $DRY_RUN == no && $STATE != NONE ]]; then
  die "NOT DELETED: $TPU_NAME is still $STATE. Run tpu/delete.sh again, or delete it by hand:" \
    "https://console.cloud.google.com/compute/tpus?project=$PROJECT"
fi
say "$TPU_NAME is gone; the run is in $SHARED"
