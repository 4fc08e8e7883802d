# shellcheck shell=bash
# The settings are read by the scripts that source this, SUBCOMMANDS comes from them, and lists of
# plain words are meant to be split.
# shellcheck disable=SC2034,SC2153,SC2086
# What the launch scripts share: settings, messages, and commands that are shown or run.
# To be sourced by a script that has set PROG, SUBCOMMANDS and usage().

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "$PROG: error: bash $BASH_VERSION is too old; install 4.4 or newer (macOS: brew install bash)" >&2
  exit 1
fi

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DRY_RUN=false
SPOT=false
FOLLOW=true
CONFIG=configs/ddrp_base.py
WORKDIR=
CLUSTER=${CLUSTER:-}
IMAGE=${IMAGE:-}
WORKER=0
SLICES=1
MAX_RELAUNCHES=100
POLL=60
ENVIRONMENT=()
CREATE_FLAGS=()
EXTRA=()
: "${PROJECT:=}" "${ZONE:=}" "${NAME:=}" "${ACCELERATOR:=}" "${RUNTIME_VERSION:=}" "${BUCKET:=}"

note() { printf '%s: %s\n' "$PROG" "$1" >&2; }

fail() {
  note "error: $1"
  exit 1
}

# A request that cannot be right, as opposed to one that failed.
refuse() {
  note "error: $1"
  exit 2
}

# The end of a message about an unknown word: the known one it resembles, or all of them.
suggest() {
  local word=$1 known
  shift
  for known in "$@"; do
    if [[ ${known:0:5} == "${word:0:5}" || $known == "$word"* ]]; then
      echo "did you mean '$known'?"
      return
    fi
  done
  echo "known: $*"
}

# Words as one line that a shell reads back as the same words.
quote() {
  local word line=
  for word in "$@"; do
    if [[ ! $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      word=\'${word//\'/\'\\\'\'}\'
    fi
    line+=" $word"
  done
  printf '%s\n' "${line:1}"
}

# The one place where a command is run: with --dry-run it is printed instead.
execute() {
  if $DRY_RUN; then
    quote "$@"
    return
  fi
  need_program "$1"
  printf '+ %s\n' "$(quote "$@")" >&2
  "$@"
}

need_program() {
  command -v "$1" >/dev/null && return
  case $1 in
    gcloud) fail "gcloud is not on the PATH; install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), or add --dry-run to see the commands alone" ;;
    xpk) fail "xpk is not on the PATH; install it with 'pip install xpk', or add --dry-run to see the commands alone" ;;
    kubectl) fail "kubectl is not on the PATH; install it with 'gcloud components install kubectl gke-gcloud-auth-plugin'" ;;
    *) fail "$1 is not on the PATH" ;;
  esac
}

# ---- settings ----------------------------------------------------------------------------------

common_flags() {
  cat <<'HELP'
settings, by flag or environment variable:
  --project ID             PROJECT: the Google Cloud project
  --zone ZONE              ZONE, for example us-west4-a
  --name NAME              NAME: what the TPU and its run are called
  --accelerator TYPE       ACCELERATOR, for example v5litepod-16 (v5e-16 means the same)
  --bucket gs://BUCKET     BUCKET: the run is kept in gs://BUCKET/runs/NAME

flags:
  --spot                   spot capacity: cheaper, and taken away without much notice
  --config FILE            the config to train by (configs/ddrp_base.py)
  --workdir gs://PATH      the run's folder, if not gs://BUCKET/runs/NAME
  --env KEY=VALUE          an environment variable of the run (may be repeated)
  --worker N|all           whose log to show (0)
  --no-follow              show the end of the log and return
  --max-relaunches N       give up after so many relaunches (100)
  --create-flag FLAG       one more flag of the create command (may be repeated),
                           for example --create-flag=--network=my-network
  --dry-run                print the commands, one a line, ready to paste; run nothing
  --help                   this text

What follows '--' goes to 'ddrp pretrain', for example -- --config.train.seed=1
HELP
}

# Reads SUBCOMMAND and the settings from the command line.
read_arguments() {
  local argument
  SUBCOMMAND=
  for argument in "$@"; do
    case $argument in
      --) break ;;
      --help | -h) usage && exit 0 ;;
    esac
  done
  while (($#)); do
    argument=$1
    shift
    case $argument in
      --)
        EXTRA=("$@")
        break
        ;;
      --dry-run) DRY_RUN=true ;;
      --spot) SPOT=true ;;
      --no-follow) FOLLOW=false ;;
      --*)
        if [[ $argument == *=* ]]; then
          set_setting "${argument%%=*}" "${argument#*=}"
        else
          set_setting "$argument" "${1-}"
          shift
        fi
        ;;
      -*) unknown_flag "$argument" ;;
      *)
        [[ -z $SUBCOMMAND ]] || refuse "'$argument': unexpected after '$SUBCOMMAND'; arguments of 'ddrp pretrain' go after '--'"
        SUBCOMMAND=$argument
        ;;
    esac
  done
  [[ -n $SUBCOMMAND ]] || refuse "say what to do: one of ${SUBCOMMANDS// /, }; see '$PROG --help'"
  [[ " $SUBCOMMANDS " == *" $SUBCOMMAND "* ]] ||
    refuse "'$SUBCOMMAND': there is no such subcommand; $(suggest "$SUBCOMMAND" $SUBCOMMANDS)"
}

SWITCHES='--spot --no-follow --dry-run --help'
SETTINGS='--project --zone --name --accelerator --runtime-version --bucket --config --workdir --worker'
SETTINGS+=' --env --create-flag --max-relaunches --poll --cluster --image --slices'

unknown_flag() { refuse "$1: there is no such flag; $(suggest "$1" $SETTINGS $SWITCHES)"; }

set_setting() {
  [[ " $SETTINGS " == *" $1 "* ]] || unknown_flag "$1"
  [[ -n $2 ]] || refuse "$1: its value is missing"
  case $1 in
    --project) PROJECT=$2 ;;
    --zone) ZONE=$2 ;;
    --name) NAME=$2 ;;
    --accelerator) ACCELERATOR=$2 ;;
    --runtime-version) RUNTIME_VERSION=$2 ;;
    --bucket) BUCKET=$2 ;;
    --config) CONFIG=$2 ;;
    --workdir) WORKDIR=$2 ;;
    --worker) WORKER=$2 ;;
    --env) ENVIRONMENT+=("$2") ;;
    --create-flag) CREATE_FLAGS+=("$2") ;;
    --max-relaunches) MAX_RELAUNCHES=$2 ;;
    --poll) POLL=$2 ;;
    --cluster) CLUSTER=$2 ;;
    --image) IMAGE=$2 ;;
    --slices) SLICES=$2 ;;
  esac
}

# Refuses a missing or malformed one of the named settings; the others are not looked at.
require() {
  local setting
  for setting in "$@"; do
    case $setting in
      PROJECT) check_setting --project PROJECT 'my-project-123' '^[a-z][-a-z0-9.:]*$' ;;
      ZONE) check_setting --zone ZONE 'us-west4-a' '^[a-z]+-[a-z]+[0-9]+-[a-z0-9]+$' ;;
      NAME) check_setting --name NAME 'ddrp-base' '^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$' ;;
      ACCELERATOR)
        check_setting --accelerator ACCELERATOR 'v5litepod-16' '.'
        check_accelerator
        ;;
      WORKDIR) check_workdir ;;
      WORKER) check_setting --worker WORKER '0 or all' '^([0-9]+|all)$' ;;
      MAX_RELAUNCHES) check_setting --max-relaunches MAX_RELAUNCHES '100' '^[0-9]+$' ;;
      POLL) check_setting --poll POLL '60 (seconds)' '^[0-9]+$' ;;
      SLICES) check_setting --slices SLICES '2' '^[1-9][0-9]*$' ;;
    esac
  done
}

check_setting() {
  local flag=$1 variable=$2 example=$3 pattern=$4 value
  value=${!variable}
  [[ -n $value ]] || refuse "$flag (or $variable in the environment) is missing; for example $flag $example"
  [[ $value =~ $pattern ]] || refuse "$flag='$value': not of the form expected; for example $flag $example"
}

check_workdir() {
  if [[ -z $WORKDIR ]]; then
    check_setting --bucket BUCKET 'gs://my-bucket' '^gs://[^/]+(/.*)?$'
    WORKDIR=${BUCKET%/}/runs/$NAME
  fi
  # Every worker has a disk of its own, and a new TPU starts with an empty one.
  check_setting --workdir WORKDIR 'gs://my-bucket/runs/ddrp-base' '^gs://[^/]+/.+$'
  [[ $CONFIG == *:* || -f $ROOT/$CONFIG ]] ||
    refuse "--config='$CONFIG': there is no such file in the checkout; for example --config configs/ddrp_base.py"
  local pair
  for pair in "${ENVIRONMENT[@]}"; do
    [[ $pair =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || refuse "--env='$pair': expected KEY=VALUE"
  done
}

check_accelerator() {
  ACCELERATOR=${ACCELERATOR/#v5e-/v5litepod-}
  local generation=${ACCELERATOR%-*} size=${ACCELERATOR##*-} runtime
  local sizes='1 4 8 16 32 64 128 256'
  case $generation in
    v5litepod) runtime=v2-alpha-tpuv5-lite ;;
    v6e) runtime=v2-alpha-tpuv6e ;;
    v5p) runtime=v2-alpha-tpuv5 ;;
    v4) runtime=tpu-ubuntu2204-base ;;
    *) unknown_accelerator ;;
  esac
  case $generation in
    v5litepod | v6e) [[ " $sizes " == *" $size "* ]] || unknown_accelerator ;;
    # These count TensorCores, eight a host.
    *) if [[ ! $size =~ ^[1-9][0-9]*$ ]] || ((size % 8)); then unknown_accelerator; fi ;;
  esac
  : "${RUNTIME_VERSION:=$runtime}"
}

unknown_accelerator() {
  refuse "--accelerator='$ACCELERATOR': not a type we know; known: v5litepod-N (or v5e-N) and v6e-N with N chips of 1, 4, 8, 16, 32, 64, 128, 256; v5p-N and v4-N with N cores, a multiple of 8"
}

# ---- what is sent ------------------------------------------------------------------------------

# Sets ARCHIVE: the current commit, packed. The commit is fixed here, so that a relaunch days later
# runs the code that the run was started with.
name_archive() {
  COMMIT=$(git -C "$ROOT" rev-parse --verify --quiet HEAD) ||
    fail "$ROOT is not a git checkout; clone the repository, so that a run knows its commit"
  ARCHIVE=${TMPDIR:-/tmp}/ddrp_jax-${COMMIT:0:12}.tar.gz
  local changed
  changed=$(git -C "$ROOT" status --porcelain | wc -l)
  if ((changed)); then
    note "warning: $((changed)) uncommitted changes are not sent (see 'git status'); commit ${COMMIT:0:12} is"
  fi
}

pack() { execute git -C "$ROOT" archive --format=tar.gz "--output=$ARCHIVE" "$@" "$COMMIT"; }
