#!/usr/bin/env bash
# On a worker: make it ready. Called by tpu/setup.sh, which sets the variables.
#
#   worker_setup.sh install    below ~/oarjax: bin/uv, venv/ (Python, the package), bucket/ (mounted); src/ was sent
#   worker_setup.sh check      with all workers at the same time: one shared folder, all chips
#
# The last line, "oarjax-worker N: ok", says that all of it succeeded.
set -Eeuo pipefail

base="$HOME/oarjax"
attributes=http://metadata.google.internal/computeMetadata/v1/instance/attributes
number="$(curl -sSf -H 'Metadata-Flavor: Google' "$attributes/agent-worker-number")"
number=$((number + ${OARJAX_FIRST_WORKER:-0})) # among the workers of all slices

step() { echo "oarjax-worker $number: $*"; }
trap 'step "FAILED in line $LINENO: $BASH_COMMAND"' ERR

install_uv() {
  if [[ "$("$base/bin/uv" --version 2>/dev/null || true)" == "uv $UV_VERSION"* ]]; then return; fi
  step "uv $UV_VERSION"
  curl -LsSf "https://astral.sh/uv/$UV_VERSION/install.sh" |
    env UV_INSTALL_DIR="$base/bin" UV_NO_MODIFY_PATH=1 sh
}

install_package() { # a new environment each time: the same versions on every worker, nothing left over
  step "Python $PYTHON_VERSION, oarjax[$EXTRAS], jax $JAX_VERSION, packages until $PACKAGES_UNTIL"
  "$base/bin/uv" venv --quiet --clear --managed-python --python "$PYTHON_VERSION" "$base/venv"
  "$base/bin/uv" pip install --quiet --python "$base/venv/bin/python" --exclude-newer "$PACKAGES_UNTIL" \
    --reinstall-package oarjax "oarjax[$EXTRAS] @ file://$base/src" "jax==$JAX_VERSION"
}

install_gcsfuse() { # as in Google's installation page; a machine that has just started may still hold the lock of apt
  if command -v gcsfuse >/dev/null; then return; fi
  step "gcsfuse"
  local key=/usr/share/keyrings/cloud.google.asc
  curl -sSf https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee "$key" >/dev/null
  echo "deb [signed-by=$key] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -c -s) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo apt-get update --quiet
  sudo apt-get install --quiet --yes -o DPkg::Lock::Timeout=600 gcsfuse
}

use_large_pages() { # JAX asks for it: the TPU's runtime starts and ends sooner
  local setting=/sys/kernel/mm/transparent_hugepage/enabled
  if [[ "$(cat "$setting" 2>/dev/null)" != "[always]"* ]] && ! sudo tee "$setting" <<<always >/dev/null; then
    step "note: $setting cannot be set to always; TPUs will start and end more slowly"
  fi
}

mount_bucket() { # metadata is never cached: on large TPU hosts the default is for ever, and hosts would not see each
  # other's files. Folders may be renamed whatever is in them (an export is renamed when it is complete).
  mkdir -p "$base/bucket"
  if mountpoint -q "$base/bucket"; then return; fi
  step "mounting gs://$BUCKET"
  # shellcheck disable=SC2086  # flags are separate words
  gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
    --rename-dir-limit=200000 $GCSFUSE_FLAGS "$BUCKET" "$base/bucket"
}

check_shared() { # each worker leaves a file and waits for everybody else's: the folder has to be one and the same
  local folder="$base/bucket/tpu-check/$TPU_NAME" other missing
  mkdir -p "$folder"
  echo "$CHECK" >"$folder/$number"
  for ((i = 0; i < 24; i++)); do
    missing=()
    for ((other = 0; other < WORKERS; other++)); do
      [[ "$(cat "$folder/$other" 2>/dev/null || true)" == "$CHECK" ]] || missing+=("$other")
    done
    if ((${#missing[@]} == 0)); then return; fi
    sleep "${CHECK_SECONDS:-5}"
  done
  step "does not see what worker ${missing[*]} wrote to gs://$BUCKET/tpu-check/$TPU_NAME"
  return 1
}

check_chips() { # all workers at the same time, as JAX needs it
  local join=""
  if ((WORKERS > 1)); then join="jax.distributed.initialize(); "; fi
  step "$(timeout 900 "$base/venv/bin/python" -c "import jax; ${join}print('JAX', jax.__version__, 'has',
    jax.local_device_count(), 'of', jax.device_count(), jax.devices()[0].device_kind)")"
}

case "$1" in
  install)
    install_uv
    install_package
    install_gcsfuse
    use_large_pages
    mount_bucket
    find "$HOME" -maxdepth 1 -name 'oarjax-*.tar.gz' -delete
    ;;
  check)
    check_shared
    check_chips
    ;;
esac
step ok
