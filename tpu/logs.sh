#!/usr/bin/env bash
# Follow the log of the run on one worker, or print what of it is in the bucket.
#
#   tpu/logs.sh [--worker N] [--saved] [options]
#
#   --worker N    default 0, which reports for all
#   --saved       the copy in the bucket (at most a minute old; there when the machine is gone)
#
# Ends when the run ends. Ctrl-C stops the following, not the run.

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

load "$@"
worker=0 saved=no
set -- "${ARGS[@]}"
while (($#)); do
  case "$1" in
    --worker)
      [[ ${2:-} =~ ^[0-9]+$ ]] || die "--worker: expected a number, got '${2:-}'"
      worker="$2"
      shift
      ;;
    --saved) saved=yes ;;
    *) die "unknown argument: $1; see --help" ;;
  esac
  shift
done

if [[ $saved == yes ]]; then
  run gcloud storage cat "$SHARED/logs/worker-$worker.log" || die "no such log in the bucket (yet)"
  exit 0
fi
need_machine
on_worker "$worker" "bash oarjax/src/tpu/worker_run.sh follow $(printf %q "$RUN")" ||
  die "the log broke off; if the machine is gone, tpu/logs.sh --saved prints the copy in the bucket"
