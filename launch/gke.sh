#!/usr/bin/env bash
# A GKE cluster with TPU nodes, by way of xpk. GKE itself relaunches a run that lost its nodes.
set -euo pipefail

PROG=launch/gke.sh
SUBCOMMANDS='create setup run logs status stop delete'
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/lib.sh
. "$HERE/lib.sh"

usage() {
  cat <<HELP
usage: $PROG SUBCOMMAND [flags] [-- arguments of 'ddrp pretrain']

Trains on a GKE cluster made by xpk ('pip install xpk'); kubectl shows the logs.

subcommands:
  create   make a cluster with a pool of TPU nodes
  setup    build an image of the current commit with Cloud Build
  run      start 'ddrp pretrain' on all nodes; GKE relaunches it after a preemption, and not
           where it failed by itself (exit status 1 or 2)
  logs     follow the run's log on one worker
  status   tell the state of the run
  stop     SIGTERM to the run: it saves a checkpoint and ends; its entry is removed
  delete   delete the cluster with its nodes; the bucket is left alone

$(common_flags)

Of GKE alone:
  --cluster NAME           CLUSTER: the cluster, if not of the run's name
  --image IMAGE            IMAGE, if not REGION-docker.pkg.dev/PROJECT/ddrp/ddrp-jax:COMMIT
  --slices N               how many slices of the accelerator (1)

example:
  $PROG run --project my-project --zone us-west4-a --name ddrp-base \\
      --accelerator v5litepod-16 --bucket gs://my-bucket --max-relaunches 50
HELP
}

main() {
  read_arguments "$@"
  require PROJECT ZONE NAME
  CLUSTER=${CLUSTER:-$NAME}
  REGION=${ZONE%-*}
  WHERE=("--cluster=$CLUSTER" "--project=$PROJECT" "--zone=$ZONE")
  case $SUBCOMMAND in
    create) require ACCELERATOR SLICES && create ;;
    setup) setup ;;
    run) require ACCELERATOR WORKDIR MAX_RELAUNCHES SLICES && start ;;
    logs) require WORKER && logs ;;
    status) execute xpk workload list "${WHERE[@]}" "--filter-by-job=$NAME" ;;
    stop) execute xpk workload delete "${WHERE[@]}" "--workload=$NAME" --force ;;
    delete) execute xpk cluster delete "${WHERE[@]}" --force ;;
  esac
}

create() {
  local flag capacity=--on-demand
  if $SPOT; then capacity=--spot; fi
  for flag in "${CREATE_FLAGS[@]}"; do
    if [[ $flag == --reservation* || $flag == --flex ]]; then capacity=; fi
  done
  execute xpk cluster create "${WHERE[@]}" "--tpu-type=$ACCELERATOR" "--num-slices=$SLICES" \
    ${capacity:+"$capacity"} "${CREATE_FLAGS[@]}"
}

choose_image() {
  name_archive
  IMAGE=${IMAGE:-$REGION-docker.pkg.dev/$PROJECT/ddrp/ddrp-jax:${COMMIT:0:12}}
}

setup() {
  choose_image
  # Cloud Build looks for it at the top of what it is sent.
  pack "--add-file=launch/Dockerfile"
  execute gcloud builds submit "$ARCHIVE" "--project=$PROJECT" "--tag=$IMAGE"
}

start() {
  local pair environment=()
  choose_image
  for pair in "${ENVIRONMENT[@]}"; do environment+=("--env=$pair"); done
  # `exec`: xpk passes SIGTERM to the process it started, which is then ddrp and not a shell.
  execute xpk workload create "${WHERE[@]}" "--workload=$NAME" "--tpu-type=$ACCELERATOR" \
    "--num-slices=$SLICES" "--docker-image=$IMAGE" "--max-restarts=$MAX_RELAUNCHES" \
    --termination-grace-period-seconds=300 "${environment[@]}" \
    "--command=exec $(quote ddrp pretrain --config "$CONFIG" --workdir "$WORKDIR" "${EXTRA[@]}")"
}

logs() {
  local selector=xpk.google.com/workload=$NAME follow=()
  if $FOLLOW; then follow=(--follow); fi
  if [[ $WORKER != all ]]; then selector+=,batch.kubernetes.io/job-completion-index=$WORKER; fi
  execute gcloud container clusters get-credentials "$CLUSTER" "--project=$PROJECT" \
    "--location=$REGION"
  execute kubectl logs "--selector=$selector" --tail=100 --prefix --max-log-requests=256 "${follow[@]}"
}

main "$@"
