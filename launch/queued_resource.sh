#!/usr/bin/env bash
# One TPU VM by way of a queued resource: the request waits in line until there is capacity.
set -euo pipefail

PROG=launch/queued_resource.sh
SUBCOMMANDS='create setup run logs status stop delete watch'
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/lib.sh
. "$HERE/lib.sh"
# shellcheck source=launch/slice.sh
. "$HERE/slice.sh"

usage() {
  slice_usage "Trains on a TPU VM that a queued resource waits for; both have the name --name." \
    "ask for the TPU, and wait for it (an interrupt leaves the request in line; 'status' looks)"
}

request() {
  local spot=()
  if $SPOT; then spot=(--spot); fi
  execute gcloud compute tpus queued-resources create "$NAME" "${WHERE[@]}" "--node-id=$NAME" \
    "--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME_VERSION" "${spot[@]}" \
    "${CREATE_FLAGS[@]}"
}

wait_until_ready() {
  local seen=
  while :; do
    capacity_state
    if $DRY_RUN || [[ $STATE == ready ]]; then return; fi
    [[ $DETAIL == "$seen" ]] || note "$(date '+%F %T') ${DETAIL:-$STATE}"
    seen=$DETAIL
    [[ $STATE == pending ]] || fail "the request is $STATE${DETAIL:+ ($DETAIL)}; '$PROG delete' takes it back"
    sleep "$POLL"
  done
}

capacity_state() {
  describe queued-resources state.state || return 0
  case $DETAIL in
    # A node can be taken away before its request says so.
    ACTIVE)
      node_state
      [[ $STATE != absent ]] || STATE=gone DETAIL='no node'
      ;;
    SUSPENDED) STATE=gone ;;
    FAILED) STATE=failed ;;
    CREATING | ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING | SUSPENDING | DELETING) STATE=pending ;;
    *) STATE=unknown ;;
  esac
}

# With --force the TPU goes too.
remove() {
  execute gcloud compute tpus queued-resources delete "$NAME" "${WHERE[@]}" --force --quiet
}

main "$@"
