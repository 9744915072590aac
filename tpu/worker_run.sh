#!/usr/bin/env bash
# On a worker: start, follow or stop a run, or say that none is going on. Called by tpu/run.sh and tpu/logs.sh.
#
#   worker_run.sh start RUN COMMIT MAX_RESTARTS CONFIG [argument of oarjax train...]
#   worker_run.sh accept RUN COMMIT MAX_RESTARTS CONFIG   oarjax accept instead of oarjax train
#   worker_run.sh follow RUN
#   worker_run.sh stop RUN
#   worker_run.sh idle RUN
#
# The run's folder is in the mounted bucket, one for all workers. The log is written to the local disk and copied there.
set -euo pipefail

base="$HOME/oarjax"
attributes=http://metadata.google.internal/computeMetadata/v1/instance/attributes
number="$(curl -sSf -H 'Metadata-Flavor: Google' "$attributes/agent-worker-number")"
number=$((number + ${OARJAX_FIRST_WORKER:-0})) # among the workers of all slices
action="$1" run="$2"
here="$base/runs/$run"
shared="$base/bucket/runs/$run"

tell() { echo "oarjax-worker $number: $*"; }
fail() { tell "FAILED: $*"; exit 1; }
alive() { [[ -f $here/pid ]] && kill -0 "$(<"$here/pid")" 2>/dev/null; }

accept() { # as start
  work=accept start "$@"
}

start() { # commit, then what `loop` takes
  local commit="$1" i
  shift
  # First: only who says that a run is going on keeps tpu/run.sh --delete-after from deleting the machine.
  if alive; then
    tell "runs already"
    tell ok
    return
  fi
  flock --nonblock "$base/lock" true || fail "another run is going on here: $(cat "$base/lock")"
  [[ -x $base/venv/bin/oarjax ]] || fail "oarjax is not installed here: tpu/setup.sh"
  # Without the mount the run would be written to this machine's disk, and lost with it.
  mountpoint -q "$base/bucket" || fail "the bucket is not mounted here: tpu/setup.sh"
  [[ -f $base/src/$2 ]] || fail "there is no $2 in the checkout that was sent: commit it, then tpu/setup.sh"
  if [[ -n $commit && $commit != "$(cat "$base/src/COMMIT" 2>/dev/null)" ]]; then
    tell "note: this worker has commit $(cat "$base/src/COMMIT" 2>/dev/null), yours is $commit; tpu/setup.sh sends it"
  fi
  mkdir -p "$here"
  rm -f "$here/stop" "$here/pid"
  if [[ -f $HOME/oarjax-environment ]]; then mv "$HOME/oarjax-environment" "$base/environment" && chmod 600 "$base/environment"; fi
  work="${work:-train}" setsid bash "$0" loop "$run" "$@" </dev/null >>"$here/log" 2>&1 &
  for ((i = 0; i < 600; i++)); do
    if [[ -f $here/pid ]]; then
      tell ok
      return
    fi
    sleep 0.1
  done
  fail "it did not start: $(tail -n 5 "$here/log")"
}

loop() { # restarts at most, config, arguments: train until it is done, fails or is stopped; again after 75, or a signal
  local left="$1" config="$2" code child keeper before idle=0
  shift 2
  exec 9>>"$base/lock"
  flock --nonblock 9
  echo "$run" >"$base/lock"
  # When the machine goes down, oarjax is told as well. It must not be told twice: the second time, it ends at once.
  trap 'touch "$here/stop"' TERM INT
  exec 8<"$base/bucket"  # gcsfuse is told too, and would unmount under the last checkpoint if nobody held the folder
  cd "$base/src"
  if [[ -f $base/environment ]]; then # tokens of the hub and of trackers, from tpu/run.sh
    set -a
    # shellcheck source=/dev/null
    source "$base/environment"
    set +a
  fi
  note running
  keep 9>&- &
  keeper=$!
  rm -f "$here/child"
  while :; do
    before="$(checkpoints)"
    if [[ ${work:-train} == accept ]]; then
      "$base/venv/bin/oarjax" accept --device tpu --out "$shared/accept/worker-$number.json" \
        --folder "$shared/accept/files" &
    else
      # Compiled programs outlive the machine: the next one begins to train within minutes. An argument may say otherwise.
      "$base/venv/bin/oarjax" train "$config" run_dir="$shared" compilation_cache="$base/bucket/compiled" "$@" &
    fi
    child=$!
    echo "$child" >"$here/child"
    echo $$ >"$here/pid"
    code=0
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends `wait` before the child has ended
      code=0
      wait "$child" || code=$?
    done
    if [[ -e $here/stop ]]; then break; fi
    if [[ $code != 75 ]] && { ((code < 128)) || [[ ${work:-train} == accept ]]; }; then break; fi
    if [[ $(checkpoints) == "$before" ]]; then ((++idle)); else idle=0; fi
    if ((idle >= ${IDLE_ENDS:-5})); then
      tell "oarjax ended $idle times in a row without a new checkpoint: it is not started again"
      break
    fi
    if ((left-- <= 0)); then break; fi
    local why="stopped, resumable"
    if ((code != 75)); then why="ended by a signal, or with a lost worker"; fi
    tell "oarjax ended with $code ($why): starting it again, $left more restart(s) allowed"
    sleep "${PAUSE:-10}" || true
    if [[ -e $here/stop ]]; then break; fi
  done
  kill "$keeper" || true
  tell "the run ended here with exit code $code"
  save || true
  note "$code"
}

checkpoints() { # their names, those of the warm start too
  ls "$shared/checkpoints" "$shared/sft" 2>/dev/null || true
}

note() { # exit code or "running": for tpu/run.sh and tpu/status.sh, which may come when this machine is gone
  mkdir -p "$shared/tpu"
  echo "worker $number: $1" >"$shared/tpu/worker-$number.exit"
}

save() { # what is on this machine only, into the bucket
  mkdir -p "$shared/logs"
  cp "$here/log" "$shared/logs/worker-$number.log"
}

keep() { # every minute: the log; and files that grow, which gcsfuse uploads when they are closed or synced
  while sleep "${KEEP_SECONDS:-60}" && kill -0 $$ 2>/dev/null; do
    save || true
    if [[ $number == 0 ]]; then sync "$shared"/*.jsonl "$shared"/tensorboard/* 2>/dev/null || true; fi
  done
}

follow() {
  [[ -f $here/log ]] || fail "run $run has not been started on this worker: tpu/run.sh"
  if alive; then
    tail -n 200 -F "$here/log" --pid="$(<"$here/pid")" --sleep-interval="${TAIL_SECONDS:-1}"
  else
    tail -n 200 "$here/log"
  fi
}

stop() { # oarjax writes a checkpoint and ends with 75; there is no restart
  local i
  if alive; then
    touch "$here/stop"
    kill -TERM "$(<"$here/child")" 2>/dev/null || true
    for ((i = 0; i < 3000; i++)); do
      if ! alive; then break; fi
      sleep 0.1
    done
  fi
  if alive; then fail "still busy after 5 minutes"; fi
  tell ok
}

idle() { # a run holds the lock as long as one of its processes lives, whatever became of the one that writes exit codes
  if alive; then fail "it runs here"; fi
  flock --nonblock "$base/lock" true || fail "a run is going on here: $(cat "$base/lock")"
  tell ok
}

case "$action" in
  start | accept | loop | follow | stop | idle) "$action" "${@:3}" ;;
  *) fail "unknown action $action" ;;
esac
