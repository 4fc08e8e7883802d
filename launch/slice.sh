# shellcheck shell=bash
# The settings come from lib.sh.
# shellcheck disable=SC2153
# What a TPU VM and a queued resource share: both end in one TPU whose workers are reached by ssh.
# To be sourced after lib.sh by a script that defines request, wait_until_ready, capacity_state and
# remove.

slice_usage() {
  cat <<HELP
usage: $PROG SUBCOMMAND [flags] [-- arguments of 'ddrp pretrain']

$1

subcommands:
  create   $2
  setup    send the current commit to every worker and install it there
  run      start 'ddrp pretrain' on all workers; it outlives this shell
  logs     follow the run's log on one worker
  status   tell the state of the TPU and of the run on each worker
  stop     SIGTERM to the run on all workers: it saves a checkpoint and ends
  delete   give the TPU back, with its disks; the bucket is left alone
  watch    keep the run alive: create, set up and run where that is missing, and again after a
           preemption, until the run is done, is stopped, or fails by itself

$(common_flags)

Of a TPU alone:
  --runtime-version V      RUNTIME_VERSION: the VM's software (by the accelerator's generation)
  --poll SECONDS           how often 'watch' and 'create' look (60)

example:
  $PROG watch --spot --project my-project --zone us-west4-a --name ddrp-base \\
      --accelerator v5litepod-16 --bucket gs://my-bucket
HELP
}

main() {
  read_arguments "$@"
  require PROJECT ZONE NAME
  WHERE=("--project=$PROJECT" "--zone=$ZONE")
  case $SUBCOMMAND in
    create)
      require ACCELERATOR POLL
      request && wait_until_ready
      ;;
    setup) name_archive && pack && setup ;;
    run) require WORKDIR && start ;;
    logs) require WORKER && logs ;;
    status) require POLL && status ;;
    stop) on_workers all "$REMOTE stop" ;;
    delete) remove ;;
    watch)
      require ACCELERATOR WORKDIR MAX_RELAUNCHES POLL
      watch
      ;;
  esac
}

# ---- on the workers ------------------------------------------------------------------------------

REMOTE='bash ddrp_jax/src/launch/worker.sh'
REMOTE_STATUS="if [ -d ddrp_jax/src ]; then $REMOTE status; else echo 'worker: none'; fi"

on_workers() {
  local worker=$1 command=$2
  shift 2
  execute gcloud compute tpus tpu-vm ssh "$NAME" "${WHERE[@]}" "--worker=$worker" \
    "--command=$command" --quiet "$@"
}

# Sends the packed commit and installs it.
setup() {
  local new=ddrp_jax/src.new
  execute gcloud compute tpus tpu-vm scp "$ARCHIVE" "$NAME:ddrp_jax.tar.gz" "${WHERE[@]}" \
    --worker=all --quiet &&
    on_workers all "rm -rf $new && mkdir -p $new && tar -xzf ddrp_jax.tar.gz -C $new && bash $new/launch/worker.sh install"
}

start() {
  local pair environment=()
  for pair in "${ENVIRONMENT[@]}"; do environment+=(--env "$pair"); done
  on_workers all "$REMOTE start $(quote "${environment[@]}" -- pretrain --config "$CONFIG" --workdir "$WORKDIR" "${EXTRA[@]}")"
}

logs() {
  # A terminal at the other end, so that an interrupt here ends the reader there.
  if ! $FOLLOW || [[ $WORKER == all ]]; then
    on_workers "$WORKER" "$REMOTE logs"
  else
    on_workers "$WORKER" "$REMOTE logs --follow" --ssh-flag=-t
  fi
}

status() {
  capacity_state
  $DRY_RUN || printf 'TPU %s: %s%s\n' "$NAME" "$STATE" "${DETAIL:+ ($DETAIL)}"
  if $DRY_RUN || [[ $STATE == ready ]]; then on_workers all "$REMOTE_STATUS"; fi
}

# ---- the state of the TPU ------------------------------------------------------------------------

STATE='' DETAIL=''

# Sets DETAIL to what the service says. Status 1 where that is nothing, with STATE: absent, or unknown
# where the question itself failed, which must not pass for a TPU that is gone.
describe() {
  local kind=$1 format=$2 command
  command=(gcloud compute tpus "$kind" describe "$NAME" "${WHERE[@]}" "--format=value($format)")
  if $DRY_RUN; then
    execute "${command[@]}"
    return 1
  fi
  need_program gcloud
  DETAIL=$("${command[@]}" 2>&1) && return
  STATE=unknown
  [[ $DETAIL != *NOT_FOUND* && $DETAIL != *"was not found"* ]] || STATE=absent DETAIL=
  return 1
}

# Sets STATE of the TPU VM: absent, pending, ready, gone (taken away) or unknown.
node_state() {
  describe tpu-vm state || return 0
  case $DETAIL in
    READY) STATE=ready ;;
    PREEMPTED | TERMINATED | STOPPED) STATE=gone ;;
    CREATING | STARTING | RESTARTING | REIMAGING | REPAIRING | STOPPING | DELETING) STATE=pending ;;
    *) STATE=unknown ;;
  esac
}

# Sets JOB from what the workers say: running, refused, stopped, none, resumable, failed, done, or
# unreachable where they say nothing.
job_state() {
  local states
  need_program gcloud
  if ! states=$(gcloud compute tpus tpu-vm ssh "$NAME" "${WHERE[@]}" --worker=all \
    "--command=$REMOTE_STATUS" --quiet 2>&1); then
    JOB=unreachable JOB_DETAIL=$(tail -n 1 <<<"$states")
    return
  fi
  states=$(sed -n 's/^worker[^:]*: //p' <<<"$states")
  JOB_DETAIL=$(sort <<<"$states" | uniq -c | sed 's/^ *\([0-9]*\) /\1 x /' | paste -sd, -)
  if [[ -z $states ]]; then
    JOB=unreachable JOB_DETAIL='no worker answered'
  elif grep -qxE running <<<"$states"; then
    JOB=running
  elif grep -qxE 'exited 2' <<<"$states"; then
    # ddrp says so of a request that cannot be right, and would say it again.
    JOB=refused
  elif grep -qxE '.* on request' <<<"$states"; then
    JOB=stopped
  elif grep -qxE none <<<"$states"; then
    JOB=none
  elif grep -qxE 'exited 143|lost' <<<"$states"; then
    JOB=resumable
  elif grep -qxE 'exited [1-9][0-9]*' <<<"$states"; then
    JOB=failed
  else
    JOB='done'
  fi
}

# ---- watching ------------------------------------------------------------------------------------

TROUBLES_IN_A_ROW=10
# A worker can lose its peers minutes before the service says that the TPU was taken away.
LOOKS_AT_A_FAILURE=3
STILL_COSTS="the TPU still costs money until '$PROG delete'"

watch() {
  name_archive
  if $DRY_RUN; then
    show_watch
    return
  fi
  trap 'note "no longer watching; the run itself goes on ($PROG stop ends it)"; exit 130' INT
  RELAUNCHES=0 TROUBLES=0
  local seen='' now granted=false failures=0
  while :; do
    capacity_state
    JOB='' JOB_DETAIL=''
    [[ $STATE != ready ]] || job_state
    now="TPU $STATE${DETAIL:+ ($DETAIL)}${JOB:+, run $JOB${JOB_DETAIL:+ ($JOB_DETAIL)}}"
    [[ $now == "$seen" ]] || note "$(date '+%F %T') $now"
    seen=$now
    [[ $STATE == absent || $STATE == unknown ]] || granted=true
    [[ $JOB == failed ]] || failures=0
    case $STATE-$JOB in
      absent-)
        if request; then
          granted=true
        elif $granted; then
          # A TPU VM is refused at once where capacity is short, so to ask again is to wait.
          count_relaunch 'the TPU was not granted'
        else
          fail 'the TPU was not granted, for the reason above; where capacity is short, launch/queued_resource.sh waits in line'
        fi
        ;;
      gone-)
        count_relaunch 'the TPU was taken away'
        if remove; then continue; fi
        trouble 'what is left of it could not be deleted'
        ;;
      failed-)
        trouble 'the request for a TPU failed'
        if remove; then continue; fi
        ;;
      pending-) ;;
      ready-running) TROUBLES=0 ;;
      ready-none)
        if ! { pack && setup && start; }; then trouble 'the run could not be set up and started'; fi
        ;;
      ready-resumable)
        count_relaunch 'the run was ended from outside, and goes on from its last checkpoint'
        start || trouble 'the run could not be started'
        ;;
      ready-done)
        note "the run is done: $WORKDIR; $STILL_COSTS"
        return 0
        ;;
      ready-stopped)
        note "the run was stopped on request; '$PROG run' lets it go on; $STILL_COSTS"
        return 0
        ;;
      ready-refused)
        refuse "ddrp refused the request ($JOB_DETAIL) and would again; '$PROG logs --no-follow' tells why; $STILL_COSTS"
        ;;
      ready-failed)
        if ((++failures >= LOOKS_AT_A_FAILURE)); then
          fail "the run failed by itself ($JOB_DETAIL), so it is not relaunched; '$PROG logs --no-follow' tells why; $STILL_COSTS"
        fi
        ;;
      *) trouble "no clear answer${JOB_DETAIL:+: $JOB_DETAIL}" ;;
    esac
    sleep "$POLL"
  done
}

count_relaunch() {
  ((++RELAUNCHES <= MAX_RELAUNCHES)) ||
    fail "$1, and --max-relaunches $MAX_RELAUNCHES is used up; watch again to go on from the last checkpoint"
  note "$1; relaunch $RELAUNCHES of at most $MAX_RELAUNCHES"
}

trouble() {
  ((++TROUBLES < TROUBLES_IN_A_ROW)) || fail "$1, $TROUBLES times in a row; see launch/README.md, troubleshooting"
  note "$1; trying again ($TROUBLES of $TROUBLES_IN_A_ROW)"
}

show_watch() {
  echo '# where there is no TPU'
  request
  echo "# every $POLL s"
  capacity_state
  on_workers all "$REMOTE_STATUS"
  echo '# when the TPU is ready and nothing was started on it'
  pack
  setup
  start
  echo "# after a preemption, at most $MAX_RELAUNCHES times; then as where there is no TPU"
  remove
  echo '# after exit status 143, or a restart of a machine'
  start
}
