"""Watching a run: relaunches and their bounds, against a stand-in for the cloud.

The stand-in is a program called `gcloud` that keeps the state of one TPU in a folder and writes
down how it was called. The scripts run as they are.
"""

import pytest
from scripts import CLEAN, SLICES, launch

# It takes what the workers answer to `status` line by line from a file; where a line says so, the
# TPU is taken away.
CLOUD = r"""#!/usr/bin/env bash
cd "$CLOUD"
printf '%s\n' "$*" >>calls
case "$*" in
  *queued-resources\ create*) echo WAITING_FOR_RESOURCES >request; echo READY >node ;;
  *queued-resources\ describe*)
    [[ -f request ]] || { echo 'ERROR: NOT_FOUND: Resource was not found' >&2; exit 1; }
    cat request
    [[ $(<request) != WAITING* ]] || echo ACTIVE >request ;;
  *queued-resources\ delete*) rm -f request node ;;
  *tpu-vm\ create*) [[ ! -f full ]] || { echo 'no capacity' >&2; exit 1; }; echo READY >node ;;
  *tpu-vm\ describe*)
    [[ ! -f offline ]] || { echo 'ERROR: could not reach the service' >&2; exit 1; }
    [[ -f node ]] || { echo 'ERROR: NOT_FOUND: Resource was not found' >&2; exit 1; }
    cat node ;;
  *tpu-vm\ delete*) rm -f node ;;
  *worker.sh\ status*)
    answer=$(sed -n 1p answers); sed -i 1d answers
    case $answer in
      PREEMPTED) echo PREEMPTED >node; [[ ! -f request ]] || echo SUSPENDED >request; exit 255 ;;
      UNREACHABLE) exit 255 ;;
      *) for state in ${answer//,/ }; do echo "worker w-0: ${state//_/ }"; done ;;
    esac ;;
esac
"""


@pytest.fixture
def cloud(tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gcloud"
    program.write_text(CLOUD)
    program.chmod(0o755)

    def watch(kind, answers, *arguments):
        """Watches while the workers answer so; returns the process and the kinds of calls made."""
        (tmp_path / "answers").write_text("\n".join(answers) + "\n")
        environment = CLEAN | {
            "PATH": f"{tmp_path / 'bin'}:{CLEAN['PATH']}",
            "CLOUD": str(tmp_path),
            "TMPDIR": str(tmp_path),
        }
        done = launch(kind, "watch", "--poll=0", "--spot", *arguments, env=environment)
        calls = (tmp_path / "calls").read_text().splitlines()
        return done, [step for step in map(step_of, calls) if step]

    watch.folder = tmp_path
    return watch


def step_of(call):
    for step in ("create", "delete", "scp", "install", "start"):
        if f" {step} " in f"{call} ":
            return step
    return None


LAUNCHED = ["create", "scp", "install", "start"]
RUNNING = "running,running"
DONE = "exited_0,exited_0"


@pytest.mark.parametrize("kind", SLICES)
def test_watch_launches_and_sees_the_end(cloud, kind):
    done, steps = cloud(kind, ["none,none", RUNNING, DONE])
    assert done.returncode == 0, done.stderr
    assert steps == LAUNCHED
    assert "the run is done: gs://my-bucket/runs/base" in done.stderr
    assert f"launch/{kind}.sh delete" in done.stderr


@pytest.mark.parametrize("kind", SLICES)
def test_watch_relaunches_after_a_preemption(cloud, kind):
    answers = ["none", RUNNING, "PREEMPTED", "none", RUNNING, "PREEMPTED", "none", DONE]
    done, steps = cloud(kind, answers, "--", "--config.train.seed=it's 1")
    assert done.returncode == 0, done.stderr
    assert steps == [*LAUNCHED, *["delete", *LAUNCHED] * 2]
    assert "the TPU was taken away; relaunch 2 of at most 100" in done.stderr
    starts = [
        line for line in (cloud.folder / "calls").read_text().splitlines() if " start -- " in line
    ]
    assert len(starts) == 3
    assert len(set(starts)) == 1
    assert "--config.train.seed=it" in starts[0]


def test_watch_resumes_a_run_that_was_ended_from_outside(cloud):
    answers = ["none", "exited_143,exited_143", RUNNING, "lost,exited_1", RUNNING, DONE]
    done, steps = cloud("tpu_vm", answers)
    assert done.returncode == 0, done.stderr
    assert steps == [*LAUNCHED, "start", "start"]


def test_watch_does_not_relaunch_a_refused_config(cloud):
    done, steps = cloud("tpu_vm", ["none", "exited_2,exited_1"])
    assert done.returncode == 2
    assert steps == LAUNCHED
    assert "refused the request" in done.stderr
    assert "logs --no-follow" in done.stderr


def test_watch_does_not_relaunch_a_run_that_fails_by_itself(cloud):
    done, steps = cloud("tpu_vm", ["none", RUNNING, *["exited_1,exited_1"] * 3])
    assert done.returncode == 1
    assert steps == LAUNCHED
    assert "failed by itself (2 x exited 1)" in done.stderr


def test_a_failure_that_a_preemption_explains_is_relaunched(cloud):
    answers = ["none", RUNNING, "exited_1,exited_255", "PREEMPTED", "none", DONE]
    done, steps = cloud("tpu_vm", answers)
    assert done.returncode == 0, done.stderr
    assert steps == [*LAUNCHED, "delete", *LAUNCHED]


def test_watch_ends_where_the_run_was_stopped_on_request(cloud):
    stopped = "exited_143_on_request"
    done, steps = cloud("tpu_vm", ["none", f"{stopped},running", f"{stopped},{stopped}"])
    assert done.returncode == 0, done.stderr
    assert steps == LAUNCHED
    assert "stopped on request" in done.stderr


def test_relaunches_are_bounded(cloud):
    done, steps = cloud("tpu_vm", ["none", "PREEMPTED"] * 4, "--max-relaunches=2")
    assert done.returncode == 1
    assert steps.count("create") == 3
    assert "--max-relaunches 2 is used up" in done.stderr


def test_no_capacity_at_first_is_an_error_and_later_a_wait(cloud):
    (cloud.folder / "full").touch()
    done, steps = cloud("tpu_vm", [])
    assert done.returncode == 1
    assert steps == ["create"]
    assert "no capacity" in done.stderr
    assert "queued_resource.sh" in done.stderr

    (cloud.folder / "node").write_text("PREEMPTED\n")
    done, steps = cloud("tpu_vm", [], "--max-relaunches=4")
    assert done.returncode == 1
    assert steps == ["create", "delete", "create", "create", "create", "create"]


def test_an_unreachable_service_is_not_taken_for_a_lost_tpu(cloud):
    (cloud.folder / "node").write_text("READY\n")
    (cloud.folder / "offline").touch()
    done, steps = cloud("tpu_vm", [])
    assert done.returncode == 1
    assert steps == []
    assert "10 times in a row" in done.stderr


def test_watch_outlasts_a_short_silence(cloud):
    answers = ["none", RUNNING, *["UNREACHABLE"] * 5, RUNNING, *["UNREACHABLE"] * 5, DONE]
    done, steps = cloud("tpu_vm", answers)
    assert done.returncode == 0, done.stderr
    assert steps == LAUNCHED
