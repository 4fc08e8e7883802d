"""The script that runs on a TPU's workers: real processes under a stand-in for systemd."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time

import pytest
from scripts import CLEAN, LAUNCH, WORKER

# A service manager with one unit.
SYSTEMD_RUN = r"""#!/usr/bin/env bash
while [[ $1 == --* ]]; do
  case $1 in --setenv=*) export "${1#--setenv=}" ;; esac
  shift
done
setsid "$@" &
echo $! >"$HOME/unit"
"""
SYSTEMCTL = r"""#!/usr/bin/env bash
alive() { [[ -f $HOME/unit ]] && kill -0 "$(<"$HOME/unit")" 2>/dev/null; }
case $1 in
  show) if alive; then echo active; else echo inactive; fi ;;
  stop) if alive; then kill -TERM "$(<"$HOME/unit")"; while alive; do sleep 0.02; done; fi ;;
esac
"""
SUDO = '#!/usr/bin/env bash\nexec "$@"\n'
DDRP = r"""#!/usr/bin/env bash
trap 'sleep 0.3; echo saved; exit 143' TERM
printf '<%s>' "$@" "$A"; echo
[[ $1 != fail ]] || exit 2
touch "$HOME/started"
while :; do sleep 0.02; done
"""


@pytest.fixture
def worker(tmp_path):
    base = tmp_path / "ddrp_jax"
    (base / "src").mkdir(parents=True)
    shutil.copytree(LAUNCH, base / "src" / "launch")
    for path, text in {
        tmp_path / "bin" / "systemd-run": SYSTEMD_RUN,
        tmp_path / "bin" / "systemctl": SYSTEMCTL,
        tmp_path / "bin" / "sudo": SUDO,
        base / "venv" / "bin" / "ddrp": DDRP,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def call(*arguments):
        # Through a shell and from the home folder, as ssh does it.
        return subprocess.run(
            ["bash", "-c", shlex.join([*WORKER.split(), *arguments])],
            cwd=tmp_path,
            env={"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{CLEAN['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=(tmp_path / "out").open("w"),
            stderr=subprocess.STDOUT,
            timeout=30,
        ).returncode, (tmp_path / "out").read_text()

    call.home = tmp_path
    call.base = base
    yield call
    unit = tmp_path / "unit"
    if unit.exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(unit.read_text()), signal.SIGKILL)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state(worker):
    status, said = worker("status")
    assert status == 0
    return said.split(": ", 1)[1].strip()


def test_a_run_outlives_its_caller_and_saves_when_stopped(worker):
    assert state(worker) == "none"
    status, said = worker("start", "--env", "A=it's b", "--", "pretrain", "--x=a 'b'")
    assert status == 0, said
    until((worker.home / "started").exists)
    assert state(worker) == "running"
    status, said = worker("start", "--", "pretrain")
    assert status == 1
    assert "already going on" in said
    status, said = worker("install")
    assert status == 1
    assert "stop it" in said

    status, said = worker("stop")
    assert status == 0
    assert said.strip().endswith("exited 143 on request")
    _, log = worker("logs")
    assert "<pretrain><--x=a 'b'><it's b>" in log
    assert log.index("saved") < log.index("exit status 143")


def test_a_signal_from_elsewhere_is_no_request_to_stop(worker):
    # Nor is one that was made before the run was started.
    worker("stop")
    worker("start", "--", "pretrain")
    until((worker.home / "started").exists)
    os.kill(int((worker.home / "unit").read_text()), signal.SIGTERM)
    until(lambda: state(worker) != "running")
    assert state(worker) == "exited 143"


def test_a_machine_that_went_down_is_told_from_an_exit(worker):
    worker("start", "--", "pretrain")
    until((worker.home / "started").exists)
    os.killpg(int((worker.home / "unit").read_text()), signal.SIGKILL)
    until(lambda: state(worker) != "running")
    assert state(worker) == "lost"


def test_an_exit_status_is_kept(worker):
    worker("start", "--", "fail")
    until(lambda: state(worker) not in ("running", "none"))
    assert state(worker) == "exited 2"


def test_start_without_setup(worker):
    (worker.base / "venv" / "bin" / "ddrp").unlink()
    status, said = worker("start", "--", "pretrain")
    assert status == 1
    assert "run 'setup' first" in said


def test_a_checkout_elsewhere_is_left_alone(worker):
    done = subprocess.run(
        ["bash", LAUNCH / "worker.sh", "install"],
        env=CLEAN | {"HOME": str(worker.home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "meant for a TPU worker" in done.stderr
