#!/usr/bin/env bash
# Request a TPU, spot, on demand, reserved or flex-start, and wait until it runs.
#
#   tpu/create.sh [--no-wait] [--any-bucket] [--any-disk] [options]
#
#   --no-wait       leave the request in the queue; the same command without it waits
#   --any-bucket    accept a bucket without hierarchical namespace (a finished export is then copied, not renamed)
#   --any-disk      request the machine although its boot disk is too small for the run, by docs/plans.md
#
# Checks the bucket and what the run needs of a worker's disk, then asks for a queued resource. Billing starts when it
# becomes ACTIVE and ends with tpu/delete.sh. Interrupting the wait does not withdraw the request.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

runtime() { # the runtime version for an accelerator
  case "$1" in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    v4-*) echo tpu-ubuntu2204-base ;;
    *) return 1 ;;
  esac
}

order() { # topology as oarjax plan has it, v5e-64 or v5e:8x8 (chips): what gcloud calls it
  local family="${1%%[-:]*}" size="${1#*[-:]}"
  if [[ $1 == *:* ]]; then
    size=$((${size//x/*}))
    if [[ $family == v5p || $family == v4 ]]; then size=$((size * 2)); fi # these names count cores
  fi
  echo "${family/#v5e/v5litepod}-$size"
}

check_topology() { # the config says which machine it was planned for, in a line "plan: {topology: v5e-64}" or below
  local topology
  topology="$(awk '/^[^ #]/ { plan = /^plan:/ }
    plan && match($0, /topology: *[^ ,}]+/) { print substr($0, RSTART, RLENGTH); exit }' "$CHECKOUT/$CONFIG")"
  topology="${topology#topology:}" topology="${topology//[\"\' ]/}"
  if [[ ! $topology =~ ^v[0-9]+[a-z]*(-[0-9]+|:[0-9]+(x[0-9]+)*)$ ]]; then return; fi
  if [[ $(order "$topology") != "$ACCELERATOR" ]]; then
    say "WARNING: $CONFIG is planned for $topology, which gcloud calls $(order "$topology"). This requests $ACCELERATOR."
  fi
}

check_bucket() { # before anything is billed: a run without a place for its checkpoints is worth nothing
  local region="${ZONE%-*}" place tree
  ask gcloud storage buckets describe "gs://$BUCKET" --project="$PROJECT" \
    '--format=value[separator=" "](location,hierarchical_namespace.enabled)' ||
    die "bucket gs://$BUCKET: $PROBLEM. Make it as in tpu/README.md, step 4. Nothing was requested."
  read -r place tree <<<"$ANSWER" || true
  if [[ $DRY_RUN == yes ]]; then return; fi
  if [[ ${tree,,} != true && $any_bucket == no ]]; then
    die "bucket gs://$BUCKET has no hierarchical namespace, as far as gcloud says. A flat one cannot rename a" \
      "finished export, but copies it file by file. Make another as in tpu/README.md, step 4, or use" \
      "--any-bucket. Nothing was requested."
  fi
  if [[ ${place,,} != "$region" ]]; then
    say "WARNING: gs://$BUCKET is in $place, the TPU in $region: slower, and traffic between regions is billed."
  fi
}

check_disk() { # by the table "What the runs need" of docs/plans.md: weights, and what else a worker's disk must hold
  local weights disk needed
  read -r weights disk < <(awk -F '|' -v config=" $CONFIG " \
    '$2 == config && NF == 10 { print $7, $8; exit }' "$CHECKOUT/docs/plans.md" 2>/dev/null) || return 0
  if [[ ! "$weights $disk" =~ ^[0-9]+\ [0-9]+$ ]]; then return; fi
  needed=$((disk + weights))
  if [[ " ${OVERRIDES[*]} " == *" policy.path="* ]]; then needed="$disk"; fi # in a folder, such as the bucket's
  if ((needed <= DISK_GB)); then return; fi
  if [[ $any_disk == yes ]]; then
    say "WARNING: $CONFIG needs about $needed GB of every worker's disk, which has about $DISK_GB GB of room."
    return
  fi
  die "$CONFIG needs about $needed GB of every worker's disk, $weights GB of it the policy's files, and a boot disk" \
    "has about $DISK_GB GB of room (DISK_GB). Put the files into the bucket once, which all workers read:" \
    "gcloud storage cp --recursive FOLDER gs://$BUCKET/models, and OVERRIDES=(policy.path=../bucket/models/FOLDER)" \
    "in the settings; or --any-disk. Nothing was requested."
}

explain() { # gcloud's words: what they mean and what to do
  case "${1,,}" in
    *quota* | *resource_exhausted*)
      say "REFUSED: quota. Project $PROJECT may not have $ACCELERATOR ($PROVISIONING) in $ZONE. Try, in this order:"
      say "  - remove old entries, failed and suspended ones count too: tpu/status.sh lists them, tpu/delete.sh --name"
      say "  - another zone, or another kind (--spot, --on-demand, --reserved, --flex-start: spot and flex-start share a quota)"
      say "  - ask for more: https://console.cloud.google.com/iam-admin/quotas?project=$PROJECT (service Cloud TPU API;"
      say "    v5litepod-1, -4 and -8 come from the 'serving' quotas of v5e)"
      ;;
    *permission_denied* | *"has not been used"* | *forbidden*)
      say "REFUSED: permission. Is the API on (gcloud services enable tpu.googleapis.com --project=$PROJECT)? Do you"
      say "  have roles/tpu.admin, and roles/iam.serviceAccountUser on ${SERVICE_ACCOUNT:-the default service account}?"
      ;;
    *capacity* | *stockout*)
      say "REFUSED: no free machines of this kind in $ZONE now. Another zone, --spot, --flex-start (it waits), or try again later."
      ;;
    *accelerator*type* | *"runtime version"* | *runtime_version* | *invalid_argument*)
      say "REFUSED: $ACCELERATOR with runtime $RUNTIME is not offered in $ZONE. What is:"
      say "  gcloud compute tpus accelerator-types list --zone=$ZONE --project=$PROJECT"
      say "  gcloud compute tpus tpu-vm versions list --zone=$ZONE --project=$PROJECT"
      ;;
    *) say "REFUSED: see gcloud's words above." ;;
  esac
}

request() {
  local nodes=(--node-id="$TPU_NAME")
  if ((SLICES > 1)); then nodes=(--node-count="$SLICES" --node-prefix="$TPU_NAME"); fi
  local track=() # flex-start and automatic checkpoints are options of gcloud alpha only
  if [[ $PROVISIONING == flex-start || $AUTOCHECKPOINT == yes ]]; then track=(alpha); fi
  local command=(gcloud "${track[@]}" compute tpus queued-resources create "$TPU_NAME" "${WHERE[@]}" "${nodes[@]}"
    --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME"
    --scopes=https://www.googleapis.com/auth/cloud-platform)
  case "$PROVISIONING" in
    spot) command+=(--spot) ;;
    reserved) command+=(--reserved) ;;
    flex-start) command+=(--provisioning-model=flex-start --max-run-duration="$MAX_DURATION") ;;
  esac
  if [[ $AUTOCHECKPOINT == yes ]]; then command+=(--autocheckpoint-enabled); fi
  if [[ -n $SERVICE_ACCOUNT ]]; then command+=(--service-account="$SERVICE_ACCOUNT"); fi
  if [[ -n $VALID_UNTIL ]]; then command+=(--valid-until-duration="$VALID_UNTIL"); fi
  local code=0
  run "${command[@]}" 2>"$SCRATCH/words" || code=$?
  cat "$SCRATCH/words" >&2
  if ((code == 0)); then return; fi
  explain "$(<"$SCRATCH/words")" >&2
  exit 1
}

failed() { # the queue gave up: say why, and remove the entry, which would count against the quota
  ask gcloud compute tpus queued-resources describe "$TPU_NAME" "${WHERE[@]}" \
    '--format=value(state.failedData.error.message)' || true
  echo "${ANSWER:-$PROBLEM}" >&2
  explain "$ANSWER" >&2
  run gcloud compute tpus queued-resources delete "$TPU_NAME" "${WHERE[@]}" --force --quiet || true
  exit 1
}

load "$@"
wait=yes any_bucket=no any_disk=no
for argument in "${ARGS[@]}"; do
  case "$argument" in
    --no-wait) wait=no ;;
    --any-bucket) any_bucket=yes ;;
    --any-disk) any_disk=yes ;;
    *) die "unknown argument: $argument; see --help" ;;
  esac
done
if [[ $ACCELERATOR == v5e-* ]]; then die "ACCELERATOR: gcloud calls it ${ACCELERATOR/#v5e/v5litepod}"; fi
need_config
if [[ -z $RUNTIME ]]; then
  RUNTIME="$(runtime "$ACCELERATOR")" || die "no runtime version known for $ACCELERATOR: set RUNTIME in the settings"
fi

find_state NONE
case "$STATE" in
  NONE)
    check_bucket
    check_topology
    check_disk
    say "requesting $MACHINES '$TPU_NAME' in $ZONE ($PROVISIONING), runtime $RUNTIME"
    request
    ;;
  ACTIVE) say "$TPU_NAME runs already" && exit 0 ;;
  WAITING_FOR_RESOURCES | ACCEPTED | CREATING | PROVISIONING) say "$TPU_NAME was requested before" ;;
  UNKNOWN) die "gcloud cannot say whether $TPU_NAME is there, so nothing was requested: $PROBLEM" ;;
  STRAY) die "there is a machine '$TPU_NAME' that the queue does not know of: tpu/delete.sh" ;;
  *) die "$TPU_NAME is $STATE: tpu/resume.sh replaces it and goes on with the run, tpu/delete.sh removes it" ;;
esac
if [[ $wait == no ]]; then exit 0; fi

say "waiting; minutes or days, as there is room. Ctrl-C leaves the request in the queue."
wait_for "ACTIVE|FAILED|SUSPENDED|SUSPENDING|PREEMPTED|NONE" 31536000
case "$STATE" in
  ACTIVE) say "$TPU_NAME runs. Next: tpu/setup.sh" ;;
  FAILED) failed ;;
  *) die "$TPU_NAME came and went ($STATE): tpu/resume.sh tries again" ;;
esac
