#!/usr/bin/env bash
# Make every worker of the TPU ready: Python by uv, this checkout with its extras, the bucket as a folder.
#
#   tpu/setup.sh [options]
#
# Sends what is committed in this checkout (git archive HEAD); tpu/worker_setup.sh does the rest on each worker. Can be
# run again at any time when no run is going on: after a change of the code, or when a worker failed.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ATTEMPTS=3  # a machine that has just started may refuse the first connections

pack() { # the committed checkout, named by its commit so that a worker cannot unpack an old one
  commit="$(git -C "$CHECKOUT" rev-parse --short=12 HEAD 2>/dev/null)" ||
    die "$CHECKOUT is no git checkout with a commit: these scripts send what is committed"
  if [[ -n "$(git -C "$CHECKOUT" status --porcelain --untracked-files=no)" ]]; then
    say "WARNING: uncommitted changes in $CHECKOUT are not sent"
  fi
  tarball="oarjax-$commit.tar.gz"
  run git -C "$CHECKOUT" archive --format=tar.gz --output="$SCRATCH/$tarball" HEAD
}

unpack() { # the command that replaces a worker's checkout, unless it is in use
  echo "mkdir -p oarjax && if ! flock --nonblock oarjax/lock true; then" \
    "echo 'a run is going on here: tpu/run.sh --stop first'; exit 1; fi;" \
    "rm -rf oarjax/src && mkdir oarjax/src && tar -xzf $tarball -C oarjax/src && echo $commit >oarjax/src/COMMIT"
}

worker() { # install or check: the command for each worker, with what it has to know
  local settings=(BUCKET="$BUCKET" TPU_NAME="$TPU_NAME" WORKERS="$WORKERS" CHECK="$TPU_NAME-$RANDOM$RANDOM"
    UV_VERSION="$UV_VERSION" PYTHON_VERSION="$PYTHON_VERSION" JAX_VERSION="$JAX_VERSION"
    PACKAGES_UNTIL="$PACKAGES_UNTIL" EXTRAS="$EXTRAS" GCSFUSE_FLAGS="$GCSFUSE_FLAGS")
  echo "env$(printf ' %q' "${settings[@]}") bash oarjax/src/tpu/worker_setup.sh $1"
}

load "$@"
no_more_arguments
need_config
need_machine
pack
for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
  say "setting up $WORKERS worker(s) of $TPU_NAME, attempt $attempt of $ATTEMPTS"
  if to_workers "$SCRATCH/$tarball" && on_workers installing "$(unpack) && $(worker install)" && on_workers checking "$(worker check)"; then
    say "ready. Next: tpu/run.sh"
    exit 0
  fi
  if ((attempt < ATTEMPTS)); then sleep "$POLL_SECONDS"; fi
done
say "setup did not succeed. Look at one worker with" >&2
say "  gcloud compute tpus tpu-vm ssh $TPU_NAME ${WHERE[*]} --worker=N" >&2
say "and run tpu/setup.sh again; or give the machine back with tpu/delete.sh and take another." >&2
exit 1
