# shellcheck shell=bash
# shellcheck disable=SC2034  # used by the scripts that source this
# What the scripts in this folder share. They source it; it does nothing by itself.
#
# A command that changes something goes through `run`, a question through `ask`: --dry-run prints both and does neither.
# However a script ends, `goodbye` says whether a machine is billed.
set -euo pipefail

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "tpu: bash 4.4 or newer is needed, this is $BASH_VERSION (macOS: brew install bash; or use Cloud Shell)" >&2
  exit 2
fi

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
CHECKOUT="$(dirname "$HERE")"
SCRATCH="$(mktemp -d)"
DRY_RUN=no
USED=no      # yes: this script has asked about a machine, so its end has to say what is billed
STATE=NONE   # see find_state
GIVE_BACK=no # yes: --delete-after was given and nothing runs on the machine, so a failure deletes it
WORKERS=0 # of all slices
EACH=0    # of one
export CLOUDSDK_CORE_DISABLE_PROMPTS=1  # a question nobody answers would hang a script while the machine costs money
exec 3>&1    # commands are shown here, also where standard output is caught

say() { if [[ $DRY_RUN == yes ]]; then echo "tpu: (dry run) $*"; else echo "tpu: $*"; fi; }
die() { echo "tpu: $*" >&2; exit 1; }

# Options and settings -------------------------------------------------------------------------------------------------

usage() { # a script's help is its first comment
  awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
  cat <<'TEXT'

Options of every script:
  --settings FILE    default: tpu/settings.env
  --project P  --zone Z  --name N  --accelerator A  --slices N  --runtime R  --bucket B  --run R  --config C
                     instead of the setting of that name
  --spot, --on-demand, --reserved, --flex-start
  --dry-run          print every command, do nothing
  --help
TEXT
}

load() { # a script's arguments: settings into variables, options that all scripts know into PASS, the others into ARGS
  local settings="$HERE/settings.env" given=() assignment
  ARGS=() PASS=()
  while (($#)); do
    case "$1" in
      --help | -h) usage; exit 0 ;;
      --dry-run) DRY_RUN=yes; PASS+=("$1") ;;
      --spot | --on-demand | --reserved | --flex-start) given+=("PROVISIONING=${1#--}"); PASS+=("$1") ;;
      --settings | --project | --zone | --name | --accelerator | --slices | --runtime | --bucket | --run | --config)
        (($# > 1)) || die "$1 needs a value; see --help"
        case "$1" in
          --settings) settings="$2" ;;
          --name) given+=("TPU_NAME=$2") ;;
          *) assignment="${1#--}"; given+=("${assignment^^}=$2") ;;
        esac
        PASS+=("$1" "$2")
        shift
        ;;
      *) ARGS+=("$1") ;;
    esac
    shift
  done
  [[ -f $settings ]] || die "no settings in $settings: cp tpu/settings.example.env tpu/settings.env, then fill it in"
  # What an older settings file may not have:
  SERVICE_ACCOUNT="" RUNTIME="" SLICES=1 PROVISIONING=on-demand MAX_DURATION=7d AUTOCHECKPOINT=no VALID_UNTIL="" OVERRIDES=() MAX_RESTARTS=20 EXTRAS=tpu,log,hub
  DISK_GB=80 GCSFUSE_FLAGS="" POLL_SECONDS=20 GRACE_SECONDS=120 DELETE_SECONDS=600 STEADY_SECONDS=60
  unset SPOT
  # shellcheck source=settings.example.env
  source "$settings"
  [[ -z ${SPOT:-} ]] || die "$settings: SPOT is not read: write PROVISIONING=spot, or on-demand, reserved, flex-start"
  for assignment in "${given[@]}"; do declare -g "$assignment"; done
  BUCKET="${BUCKET#gs://}" BUCKET="${BUCKET%/}"
  check_settings "$settings"
  WHERE=(--project="$PROJECT" --zone="$ZONE")
  SHARED="gs://$BUCKET/runs/$RUN"
  NODES=("$TPU_NAME") MACHINES="$ACCELERATOR" # of several slices one each, as the queue names them
  if ((SLICES > 1)); then
    MACHINES="$SLICES x $ACCELERATOR"
    for ((NODE = 0; NODE < SLICES; NODE++)); do NODES[NODE]="$TPU_NAME-$NODE"; done
  fi
  if [[ $DRY_RUN == no ]]; then
    command -v gcloud >/dev/null || die "gcloud is not installed: https://cloud.google.com/sdk/docs/install"
  fi
}

check_settings() { # where they are from: each has the form that the commands need
  local name pattern
  while read -r name pattern; do
    [[ ${!name:-} =~ ^$pattern$ ]] || die "$1: $name: expected $pattern, got '${!name:-}'"
  done <<'TABLE'
PROJECT [a-z][a-z0-9:.-]+
ZONE [a-z]+-[a-z0-9]+-[a-z0-9]+
BUCKET [a-z0-9][a-z0-9._-]+
TPU_NAME [a-z]([a-z0-9-]*[a-z0-9])?
ACCELERATOR [a-z0-9]+-[0-9]+
SLICES [1-9][0-9]*
PROVISIONING spot|on-demand|reserved|flex-start
MAX_DURATION [0-9]+[smhd]
AUTOCHECKPOINT yes|no
RUN [A-Za-z0-9][A-Za-z0-9._-]*
CONFIG .+\.yaml
MAX_RESTARTS [0-9]+
DISK_GB [0-9]+
POLL_SECONDS [0-9.]+
TABLE
}

need_config() { # go on only with a config that is here: the workers get what this checkout has
  [[ -f $CHECKOUT/$CONFIG ]] || die "there is no $CONFIG in $CHECKOUT: CONFIG, or --config, is a path from there"
}

no_more_arguments() { ((${#ARGS[@]} == 0)) || die "unknown argument: ${ARGS[*]}; see --help"; }

# Commands -------------------------------------------------------------------------------------------------------------

show() { # command...: as it could be typed
  local word line=+
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:=@,+-]+$ ]]; then line+=" $word"; else line+=" ${word@Q}"; fi
  done
  echo "$line" >&3
}

run() { # command...: show it and do it
  show "$@"
  [[ $DRY_RUN == yes ]] || "$@"
}

ask() { # command...: a question that changes nothing; its answer in ANSWER, its complaint in PROBLEM
  local code=0
  ANSWER="" PROBLEM=""
  if [[ $DRY_RUN == yes ]]; then
    show "$@"
    return 0
  fi
  ANSWER="$("$@" 2>"$SCRATCH/problem")" || code=$?
  PROBLEM="$(<"$SCRATCH/problem")"
  return "$code"
}

# The machine ----------------------------------------------------------------------------------------------------------

find_state() { # state to assume with --dry-run: what there is of the machine, in STATE
  # The queue's own: WAITING_FOR_RESOURCES ACCEPTED CREATING PROVISIONING ACTIVE SUSPENDING SUSPENDED FAILED DELETING.
  # Ours: NONE, PREEMPTED (ACTIVE in the queue, but the machine is gone), STRAY (a machine without a queue entry),
  # UNKNOWN (gcloud could not say).
  USED=yes
  if ask gcloud compute tpus queued-resources describe "$TPU_NAME" "${WHERE[@]}" '--format=value(state.state)'; then
    STATE="${ANSWER:-UNKNOWN}"
  elif [[ $PROBLEM == *NOT_FOUND* ]]; then
    STATE=NONE
  else
    STATE=UNKNOWN
  fi
  if [[ $DRY_RUN == yes ]]; then STATE="$1"; fi
  if [[ $STATE != ACTIVE && $STATE != NONE ]]; then return; fi
  local node
  for node in "${NODES[@]}"; do # a run needs all of them: the first that is gone decides
    if ask gcloud compute tpus tpu-vm describe "$node" "${WHERE[@]}" '--format=value(state)'; then
      if [[ $DRY_RUN == yes ]]; then continue; fi
      case "$STATE $ANSWER" in
        "ACTIVE PREEMPTED" | "ACTIVE TERMINATED" | "ACTIVE STOPPED") STATE=PREEMPTED ;;
        NONE*) STATE=STRAY ;;
      esac
    elif [[ $PROBLEM != *NOT_FOUND* ]]; then
      STATE=UNKNOWN
    elif [[ $STATE == ACTIVE ]]; then
      STATE=PREEMPTED
    fi
    if [[ $STATE != ACTIVE && $STATE != NONE ]]; then return; fi
  done
}

wait_for() { # states as a pattern (A|B), seconds: ask again and again; fails when the time is over
  local end=$((SECONDS + $2)) before=""
  while :; do
    find_state "${1%%|*}"
    if [[ $STATE != "$before" ]]; then say "$(date +%H:%M:%S) $TPU_NAME: $STATE"; fi
    before="$STATE"
    if [[ $STATE =~ ^($1)$ ]]; then return 0; fi
    if ((SECONDS >= end)); then return 1; fi
    sleep "$POLL_SECONDS"
  done
}

need_machine() { # go on only with a machine that runs; counts its workers
  find_state ACTIVE
  case "$STATE" in
    ACTIVE) ;;
    NONE) die "there is no TPU '$TPU_NAME' in $ZONE: tpu/create.sh makes one" ;;
    PREEMPTED | SUSPENDED | SUSPENDING | FAILED) die "$TPU_NAME was taken away ($STATE): tpu/resume.sh gets another" ;;
    UNKNOWN) die "gcloud cannot say what state $TPU_NAME is in: $PROBLEM" ;;
    STRAY) die "there is a machine '$TPU_NAME' that the queue does not know of: tpu/delete.sh" ;;
    *) die "$TPU_NAME is $STATE, not ready yet: tpu/create.sh waits for it" ;;
  esac
  ask gcloud compute tpus tpu-vm describe "${NODES[0]}" "${WHERE[@]}" '--flatten=networkEndpoints[]' \
    '--format=value(networkEndpoints.ipAddress)' || die "gcloud cannot list the workers of $TPU_NAME: $PROBLEM"
  EACH="$(grep -c . <<<"$ANSWER" || true)" # slices are alike
  if [[ $DRY_RUN == yes ]]; then EACH=1; fi
  WORKERS=$((EACH * SLICES))
  ((WORKERS > 0)) || die "gcloud lists no workers of $TPU_NAME; look at tpu/status.sh"
}

on_node() { # node, command: with what tells a worker of one of several slices its number among all
  if ((SLICES > 1)); then echo "export OARJAX_FIRST_WORKER=$(($1 * EACH)); $2"; else echo "$2"; fi
}

everywhere() { # command: on all workers of all slices at once; fails where one of the connections does
  local node jobs=() code=0
  if ((SLICES == 1)); then # in front, where Ctrl-C reaches it
    run gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${WHERE[@]}" --worker=all --command="$1"
    return
  fi
  for node in "${!NODES[@]}"; do
    run gcloud compute tpus tpu-vm ssh "${NODES[node]}" "${WHERE[@]}" --worker=all --command="$(on_node "$node" "$1")" &
    jobs+=("$!")
  done
  for node in "${jobs[@]}"; do wait "$node" || code=$?; done
  return "$code"
}

on_worker() { # number among all, options of ssh, command
  local node=$(($1 / EACH))
  run gcloud compute tpus tpu-vm ssh "${NODES[node]}" "${WHERE[@]}" --worker="$(($1 % EACH))" "${@:2:$#-2}" \
    --command="$(on_node "$node" "${!#}")"
}

to_workers() { # file: into the home of every worker
  local node
  for node in "${NODES[@]}"; do
    run gcloud compute tpus tpu-vm scp "$1" "$node:" "${WHERE[@]}" --worker=all || return
  done
}

on_workers() { # what it is, command: run it on all workers; each has to print "oarjax-worker N: ok" when it is done
  # gcloud's exit code is not enough: it does not say which worker failed, and a worker out of reach may not show in it.
  local code=0 worker failed=()
  everywhere "$2" 2>&1 | tee "$SCRATCH/said" || code=$?
  if [[ $DRY_RUN == yes ]]; then return; fi
  for ((worker = 0; worker < WORKERS; worker++)); do
    grep -q "^oarjax-worker $worker: ok" "$SCRATCH/said" || failed+=("$worker")
  done
  if ((${#failed[@]} == 0)); then return; fi
  say "FAILED: $1 on worker ${failed[*]} (of 0 to $((WORKERS - 1))); gcloud ended with $code, its output is above" >&2
  return 1
}

# What is billed -------------------------------------------------------------------------------------------------------

tell_bill() { # say what STATE costs, and how to stop that
  local machine="TPU $MACHINES '$TPU_NAME' in $ZONE"
  case "$STATE" in
    ACTIVE | STRAY)
      say "BILLED: $machine is there and costs money until it is deleted, whether or not it trains."
      say "        Stop paying: tpu/delete.sh --name $TPU_NAME --zone $ZONE"
      ;;
    WAITING_FOR_RESOURCES | ACCEPTED | CREATING | PROVISIONING)
      say "BILLED AS SOON AS IT STARTS: $machine is $STATE, and starts whether or not anybody waits for it."
      say "        Withdraw it: tpu/delete.sh --name $TPU_NAME --zone $ZONE"
      ;;
    PREEMPTED | SUSPENDED | FAILED)
      say "NOT BILLED: the machine of $machine is gone ($STATE). Its entry in the queue still counts against the quota:"
      say "        tpu/resume.sh replaces it and goes on with the run, tpu/delete.sh removes it."
      ;;
    SUSPENDING | DELETING) say "BILLED UNTIL GONE: $machine is $STATE. See that it goes: tpu/status.sh" ;;
    NONE) say "NOT BILLED: there is no TPU '$TPU_NAME' in $ZONE. (What lies in gs://$BUCKET is billed as storage.)" ;;
    *)
      say "MAYBE BILLED: gcloud could not say whether $machine is there: ${PROBLEM:-no reason given}"
      say "        Look at https://console.cloud.google.com/compute/tpus?project=$PROJECT"
      ;;
  esac
}

give_back() { # delete the machine, because --delete-after was given
  OARJAX_TPU_INNER=yes "$HERE/delete.sh" "${PASS[@]}" --yes || say "NOT DELETED, see above" >&2
}

goodbye() { # runs when a script ends, for whatever reason
  local code=$?
  trap - EXIT INT TERM
  set +e
  if [[ $GIVE_BACK == yes && $DRY_RUN == no ]] && ((code > 0 && code < 128)); then # not when interrupted
    find_state NONE
    if [[ $STATE != NONE ]]; then
      say "no run was started: $TPU_NAME is deleted, because of --delete-after"
      give_back
    fi
  fi
  # With OARJAX_TPU_INNER a script was called by another one, which says it.
  if [[ $USED == yes && $DRY_RUN == no && -z ${OARJAX_TPU_INNER:-} ]]; then
    find_state NONE
    tell_bill
  fi
  rm -rf "$SCRATCH"
  exit "$code"
}
trap goodbye EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
