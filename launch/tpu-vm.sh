#!/usr/bin/env bash
# Trains on a Cloud TPU slice, one process a host:
#
#   NAME=decoder ZONE=us-west4-a ACCELERATOR=v5litepod-256 RUNTIME=v2-alpha-tpuv5-lite \
#     WORKDIR=/mnt/shared/decoder launch/tpu-vm.sh --config.model=qwen3-8b --config.mesh.model=4
#
# Makes the slice if there is none of that name, copies this checkout to its hosts, installs it, and
# trains. Arguments go to `foliax train`. From the environment, besides NAME and ZONE:
#   ACCELERATOR, RUNTIME  type and software version of a slice that must be made
#   WORKDIR   on a file system that all hosts have mounted (Filestore, Cloud Storage FUSE)
#   JOB       what to train, default decoder:pod
#   RESTARTS  how often to start again after a host was lost or stopped, default 50
set -euo pipefail

: "${NAME:?name of the TPU}" "${ZONE:?its zone}" "${WORKDIR:?a folder that all hosts share}"
JOB=${JOB:-decoder:pod}
RESTARTS=${RESTARTS:-50}
CHECKOUT=$(cd "$(dirname "$0")/.." && pwd)

tpu() {
  local verb=$1
  shift
  gcloud compute tpus tpu-vm "$verb" "$@" --zone="$ZONE"
}

on_all_hosts() {
  tpu ssh "$NAME" --worker=all --command="$1"
}

make_slice() {
  tpu describe "$NAME" >/dev/null 2>&1 || tpu create "$NAME" \
    --accelerator-type="${ACCELERATOR:?type of the slice to make, e.g. v5litepod-256}" \
    --version="${RUNTIME:?its software, e.g. v2-alpha-tpuv5-lite}"
}

install() {
  # Images of Ubuntu 22.04 come with Python 3.10, and foliax needs 3.11.
  # shellcheck disable=SC2016 # expanded on the hosts
  tpu scp "$ARCHIVE" "$NAME:foliax.tar.gz" --worker=all && on_all_hosts 'set -e
    sudo apt-get update -qq && sudo apt-get install -y -qq python3.11-venv
    rm -rf foliax && mkdir foliax && tar -xzf foliax.tar.gz -C foliax
    python3.11 -m venv "$HOME/foliax-venv"
    "$HOME/foliax-venv/bin/pip" install -q "./foliax[tpu,experiments]"'
}

ARCHIVE=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$ARCHIVE"' EXIT
git -C "$CHECKOUT" archive --format=tar.gz -o "$ARCHIVE" HEAD

# Quoted for the shell of the hosts.
printf -v arguments ' %q' "$JOB" --distributed --workdir="$WORKDIR" "$@"
train="\$HOME/foliax-venv/bin/foliax train$arguments"

for ((attempt = 0; ; attempt++)); do
  code=0
  { make_slice && install && on_all_hosts "$train"; } || code=$?
  if [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || [ "$attempt" -ge "$RESTARTS" ]; then
    exit "$code"
  fi
  echo "stopped with exit code $code; starting again" >&2
  sleep "${PAUSE_SECONDS:-30}"
done
