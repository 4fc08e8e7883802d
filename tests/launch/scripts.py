"""Calls of the launch scripts as they are, for the tests beside it."""

import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SLICES = ("tpu_vm", "queued_resource")
WHERE = ["--project=my-project", "--zone=us-west4-a"]
SETTINGS = {
    "project": "my-project",
    "zone": "us-west4-a",
    "name": "base",
    "accelerator": "v5litepod-16",
    "bucket": "gs://my-bucket",
}
# Nothing of the outside may set a setting, and gcloud must not be needed.
CLEAN = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
SUBCOMMANDS = {
    "tpu_vm": "create setup run logs status stop delete watch",
    "queued_resource": "create setup run logs status stop delete watch",
    "gke": "create setup run logs status stop delete",
}
EVERY = [(kind, name) for kind, names in SUBCOMMANDS.items() for name in names.split()]


def launch(kind, *arguments, settings=SETTINGS, env=CLEAN, timeout=30):
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return subprocess.run(
        [LAUNCH / f"{kind}.sh", *arguments[:1], *flags, *arguments[1:]],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def dry(kind, *arguments, **keywords):
    """The commands of a dry run, each as its words."""
    done = launch(kind, arguments[0], "--dry-run", *arguments[1:], **keywords)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def ssh(command, worker="all"):
    return [
        *["gcloud", "compute", "tpus", "tpu-vm", "ssh", "base", *WHERE, f"--worker={worker}"],
        *[f"--command={command}", "--quiet"],
    ]


def commit():
    return subprocess.check_output(["git", "-C", ROOT, "rev-parse", "HEAD"], text=True).strip()


WORKER = "bash ddrp_jax/src/launch/worker.sh"
START = (
    f"{WORKER} start -- pretrain --config configs/ddrp_base.py --workdir gs://my-bucket/runs/base"
)
