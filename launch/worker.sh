#!/usr/bin/env bash
# The part that runs on a TPU's worker: tpu_vm.sh and queued_resource.sh call it by ssh.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: worker.sh install | start [--env KEY=VALUE]... -- ARGUMENTS OF ddrp | status | logs [--follow]
                 | stop | supervise ARGUMENTS OF ddrp

Runs on a TPU worker, where the checkout lies in BASE/src (BASE is ~/ddrp_jax), or before it is
installed in BASE/src.new:

  install    make BASE/venv and install the checkout into it
  start      run ddrp as the systemd unit 'ddrp', which outlives the ssh session
  status     one line: none, running, exited STATUS, or lost (its machine went down under it)
  logs       the end of BASE/run.log; with --follow also what is added to it
  stop       SIGTERM, on which ddrp saves a checkpoint; returns when the run has ended
  supervise  what the unit runs: ddrp, its log and its exit status

With --dry-run as first argument the commands are printed, not run.
HELP
}

CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BASE=$HOME/ddrp_jax
UNIT=ddrp
# A checkpoint of a large model takes a while to reach the bucket.
STOP_SECONDS=600
DRY_RUN=false

fail() {
  echo "worker $(hostname): error: $1" >&2
  exit 1
}

execute() {
  if $DRY_RUN; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# A unit that is still stopping counts as running: it may be saving its checkpoint.
running() {
  local query=(systemctl show --property=ActiveState --value "$UNIT")
  if $DRY_RUN; then
    execute "${query[@]}"
    return 1
  fi
  case $("${query[@]}" 2>/dev/null || true) in
    active | activating | deactivating | reloading) return 0 ;;
    *) return 1 ;;
  esac
}

find_python() {
  local python
  for python in python3.12 python3.11; do
    # Ubuntu's pythons lack ensurepip until their -venv package is there.
    if "$python" -c 'import ensurepip' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
}

install() {
  if running; then fail 'a run is going on; stop it before installing'; fi
  if $DRY_RUN || [[ -d $BASE/src.new ]]; then
    execute rm -rf "$BASE/src"
    execute mv "$BASE/src.new" "$BASE/src"
  fi
  local python apt
  python=$(find_python)
  if [[ -z $python ]]; then
    # A new VM updates itself, and holds the lock while it does.
    apt=(sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600)
    execute "${apt[@]}" install software-properties-common
    execute sudo add-apt-repository -y ppa:deadsnakes/ppa
    execute "${apt[@]}" install python3.11 python3.11-venv
    python=python3.11
  fi
  [[ -x $BASE/venv/bin/pip ]] || execute "$python" -m venv "$BASE/venv"
  cd "$BASE/src" 2>/dev/null || $DRY_RUN || fail "$BASE/src is not there"
  execute "$BASE/venv/bin/pip" --disable-pip-version-check --quiet install -c constraints.txt -e '.[tpu,gcs]'
  execute "$BASE/venv/bin/ddrp" --version
}

start() {
  local environment=()
  while (($#)); do
    case $1 in
      --env)
        environment+=("--setenv=$2")
        shift 2
        ;;
      --)
        shift
        break
        ;;
      *) fail "'$1': expected --env KEY=VALUE or --" ;;
    esac
  done
  $DRY_RUN || [[ -x $BASE/venv/bin/ddrp ]] || fail "ddrp is not installed here; run 'setup' first"
  if running; then fail "a run is already going on; 'stop' it first"; fi
  execute rm -f "$BASE/stop-requested"
  # The service manager's limit on locked memory is below what the TPU driver pins. In `mixed` mode
  # SIGTERM goes to the supervisor alone; it passes it on to ddrp, and the data workers live on until
  # the checkpoint is written. The same happens when the machine shuts down.
  execute sudo systemd-run "--unit=$UNIT" --collect "--uid=$(id -u)" "--gid=$(id -g)" \
    --property=KillMode=mixed "--property=TimeoutStopSec=$STOP_SECONDS" \
    --property=LimitMEMLOCK=infinity "${environment[@]}" \
    bash "$BASE/src/launch/worker.sh" supervise "$@"
}

supervise() {
  local child='' signalled status
  if $DRY_RUN; then
    execute "$BASE/venv/bin/ddrp" "$@"
    return
  fi
  exec >>"$BASE/run.log" 2>&1 </dev/null
  trap 'signalled=true; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM
  echo running >"$BASE/run.status"
  echo "=== $(date '+%F %T') $(hostname): ddrp $*"
  cd "$BASE/src"
  "$BASE/venv/bin/ddrp" "$@" &
  child=$!
  # A signal ends `wait` with the signal's status and not the child's, so ask again.
  while :; do
    signalled=false status=0
    wait "$child" || status=$?
    $signalled || break
  done
  echo "=== $(date '+%F %T') $(hostname): exit status $status"
  echo "exited $status" >"$BASE/run.status"
  exit "$status"
}

status() {
  local state=none
  if [[ -f $BASE/run.status ]]; then state=$(<"$BASE/run.status"); fi
  if running; then
    state=running
  elif [[ $state == running ]]; then
    state=lost
  fi
  if [[ $state != running && $state != none && -f $BASE/stop-requested ]]; then state+=' on request'; fi
  $DRY_RUN || echo "worker $(hostname): $state"
}

stop() {
  execute touch "$BASE/stop-requested"
  if running || $DRY_RUN; then execute sudo systemctl stop "$UNIT"; fi
  $DRY_RUN || status
}

logs() {
  local follow=()
  [[ ${1-} != --follow ]] || follow=(-F)
  execute tail -n 100 "${follow[@]}" "$BASE/run.log"
}

main() {
  if [[ ${1-} == --dry-run ]]; then
    DRY_RUN=true
    shift
  fi
  # On any other machine it would write beside somebody's checkout.
  if ! $DRY_RUN && [[ ${1-} != -* && $CHECKOUT != "$BASE"/src && $CHECKOUT != "$BASE"/src.new ]]; then
    fail "meant for a TPU worker, where the checkout is $BASE/src; this one is $CHECKOUT"
  fi
  case ${1-} in
    install | start | status | logs | stop | supervise) "$@" ;;
    --help | -h) usage ;;
    *)
      usage >&2
      exit 2
      ;;
  esac
}

main "$@"
