"""What may change when a run is resumed, and how a run's folder is kept for one process."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddrp_jax.config import RunConfig, as_dict, from_config_dict
from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.paths import is_remote

# The devices, the number of steps, what is logged, evaluated and saved, and how batches are made
# ahead: none of these changes what a step computes, but for the learning rate of a schedule that
# ends with its stage ("linear", "cosine"), which follows the new number of steps from then on.
MAY_CHANGE = (
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.dcn_data",
    "stages[*].steps",
    "train.log_every",
    "train.eval_every",
    "train.eval_rows",
    "train.eval_batch_size",
    "train.representations_every",
    "train.save_every",
    "train.keep_last",
    "train.keep_best",
    "train.prefetch",
    "train.workers",
    "train.tensorboard",
    "train.wandb",
)


def check_resume(saved: Mapping[str, Any], config: RunConfig, step: int) -> list[str]:
    """Checks that a run saved at `step` may go on with `config`.

    Args:
        saved: the checkpoint's config, as plain data.
        config: the resolved config of the new process.
        step: the checkpoint's step.

    Returns:
        What has changed, a line for each field.

    Raises:
        UsageError: a field differs that may not, or a stage would end before `step`; shows both
            values of every such field.
    """
    before = from_config_dict(type(config), saved, "the checkpoint's config")
    old, new = _leaves(as_dict(before)), _leaves(as_dict(config))
    begin, finished = 0, set()
    for index, stage in enumerate(before.stages):
        begin += stage.steps
        if begin <= step and index + 1 < len(before.stages):
            finished.add(f"stages[{index}].steps")
    changes = {
        path: f"config.{path}: {old.get(path, 'absent')!r} in the checkpoint, "
        f"{new.get(path, 'absent')!r} asked for"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    }
    problems = [
        change
        for path, change in changes.items()
        if re.sub(r"\[\d+\]", "[*]", path) not in MAY_CHANGE or path in finished
    ]
    if problems:
        raise UsageError(
            f"this run cannot be resumed (step {step}) with another config:\n  "
            + "\n  ".join(problems)
            + f"\nonly these may change: {', '.join(MAY_CHANGE)} (steps of a stage that is not "
            "over); for a new run from these parameters use --init with another --workdir"
        )
    if config.total_steps < step:
        raise UsageError(
            f"config.stages: {config.total_steps} steps asked for, but the run is at step {step}"
        )
    return list(changes.values())


@contextlib.contextmanager
def only_process(workdir: Path) -> Iterator[None]:
    """Keeps other processes from training in the same folder; a kill releases it.

    A bucket has no locks: there it keeps nobody away.

    Raises:
        DdrpError: another process does.
    """
    if is_remote(workdir):
        yield
        return
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DdrpError(
                f"{workdir}: another process is training there; wait for it, or name another "
                "--workdir"
            ) from None
        yield


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for key, item in items for name, leaf in _leaves(item, key).items()}
