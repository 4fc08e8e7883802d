#!/usr/bin/env bash
# One TPU VM (a slice of any size), created at once or not at all.
set -euo pipefail

PROG=launch/tpu_vm.sh
SUBCOMMANDS='create setup run logs status stop delete watch'
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/lib.sh
. "$HERE/lib.sh"
# shellcheck source=launch/slice.sh
. "$HERE/slice.sh"

usage() {
  slice_usage "Trains on a TPU VM. Where capacity is scarce, queued_resource.sh waits in line instead." \
    "ask for the TPU; it is there, or refused, within minutes"
}

request() {
  local spot=()
  if $SPOT; then spot=(--spot); fi
  execute gcloud compute tpus tpu-vm create "$NAME" "${WHERE[@]}" \
    "--accelerator-type=$ACCELERATOR" "--version=$RUNTIME_VERSION" "${spot[@]}" "${CREATE_FLAGS[@]}"
}

# `create` returns when the TPU is there.
wait_until_ready() { :; }

capacity_state() { node_state; }

remove() { execute gcloud compute tpus tpu-vm delete "$NAME" "${WHERE[@]}" --quiet; }

main "$@"
