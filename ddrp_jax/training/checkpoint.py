"""Checkpoints: one folder for each step, written in the background and checked when read.

A folder `<step>/` holds all that a run or a later command needs, so it can be copied elsewhere
alone:

    arrays/        parameters and optimiser state (orbax, in items: `params`, `optimizer`, and
                   `task_head` where a head other than the masked-LM one came with the model)
    config.json    the resolved config of the run
    progress.json  the data iterator's state, token counts, seconds spent
    tokenizer/     the tokenizer's files
    manifest.json  step, held-out loss, size and SHA-256 of every other file

It is written as `.saving-<step>/` and renamed at the end: a folder with a step's name is whole,
unless something happened to it later, which the manifest shows. A bucket has no such rename: there
it is written under its own name, and the manifest, which is written last, makes it whole. Of
several processes each writes its part of the arrays, and process 0 the rest when all have done so.
No other module reads or writes with orbax.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orjson

from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.paths import absolute, as_path, copy_tree, is_remote, remove_tree
from ddrp_jax.training import distributed, manifest
from ddrp_jax.training.manifest import DamagedError, verify

_SAVING = ".saving-"
_log = logging.getLogger(__name__)
# Orbax logs the traceback of every thread that an error passes through; the error reaches us too.
logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in str(record.msg))


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where `<step>/` folders live; the first save makes it.
        config: plain JSON data, stored with each checkpoint.
        tokenizer: has `save(folder)`.
        keep_last: newest checkpoints to keep.
        keep_best: checkpoints with the lowest held-out loss to keep as well.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: Mapping[str, Any],
        tokenizer: Any,
        keep_last: int,
        keep_best: int,
    ):
        self.folder = absolute(folder)  # orbax wants it so
        self._config = config
        self._tokenizer = tokenizer
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._damaged: set[Path] = set()
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def clean(self) -> None:
        """Removes what a killed process left of a save; process 0's to do."""
        if self.folder.exists():
            for leftover in self.folder.glob(f"{_SAVING}*"):
                remove_tree(leftover)

    def newest(self) -> Path | None:
        """Returns the newest good checkpoint, or None where there never was one.

        Process 0 looks for all, so that they go on from the same one.

        Raises:
            DdrpError: there are checkpoints, but none is good.
        """

        def name_of_newest() -> str | None:
            found = _newest_good(self.folder, self._damaged)
            return found.name if found else None

        name = distributed.on_main(name_of_newest)
        return self.folder / name if name else None

    def save(
        self,
        state: Any,
        *,
        step: int,
        progress: Mapping[str, Any],
        held_out_loss: float | None = None,
        evaluation_due: bool = False,
    ) -> None:
        """Starts to save; returns once the arrays are copied, so the state may be changed.

        Args:
            state: a pytree dataclass with a field `params`, and perhaps `task_head`.
            step: its number.
            progress: plain JSON data.
            held_out_loss: held-out loss of this very state, where it was measured.
            evaluation_due: whether it has still to be measured; `settle` says what came of it.

        Raises:
            DdrpError: the save before this one failed, or this one did at once.
        """
        from orbax.checkpoint import v1 as ocp

        self.wait()
        target = self.folder / str(step)
        staging = target if is_remote(target) else self.folder / f"{_SAVING}{step}"
        try:
            if distributed.is_main():
                if is_remote(staging) and staging.exists():  # a save that was killed
                    remove_tree(staging)
                staging.mkdir(parents=True)
            response = ocp.save_checkpointables_async(staging / "arrays", _items(state))
        except Exception as error:
            raise self._failed(staging, error) from error
        self._pending = self._executor.submit(
            self._finish, staging, response, step, dict(progress), held_out_loss, evaluation_due
        )

    def settle(self, step: int, held_out_loss: float | None) -> None:
        """Adds the held-out loss that was due when a checkpoint was saved; process 0's to do."""
        manifest.settle(self.folder / str(step), held_out_loss)

    def check(self) -> None:
        """Raises the error of a save that failed in the background."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is on the disk, and raises its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the last save and ends the background thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def _finish(
        self,
        staging: Path,
        response: Any,
        step: int,
        progress: Any,
        held_out_loss: float | None,
        evaluation_due: bool,
    ) -> None:
        try:
            response.result()  # in process 0 too, all processes have written their part now
            if not distributed.is_main():
                return
            (staging / "config.json").write_bytes(manifest.to_json(self._config))
            (staging / "progress.json").write_bytes(manifest.to_json(progress))
            _save_tokenizer(self._tokenizer, staging / "tokenizer")
            manifest.write(staging, step, held_out_loss, evaluation_due)
            target = self.folder / str(step)
            if staging != target:
                if target.exists():  # found damaged, or it would have been resumed from
                    remove_tree(target)
                staging.rename(target)
                manifest.sync(self.folder)
            self._damaged.discard(target)
            self._prune()
        except Exception as error:
            raise self._failed(staging, error) from error

    def _prune(self) -> None:
        good: list[Path] = []
        losses: dict[Path, float] = {}
        for path in _step_folders(self.folder):
            try:
                loss = manifest.read(path)["held_out_loss"]
            except DamagedError:
                continue  # not ours to delete, and not to be counted as kept
            if path not in self._damaged:
                good.append(path)
                if loss is not None:
                    losses[path] = loss
        best = sorted(losses, key=lambda path: losses[path])[: self._keep_best]
        for path in good[self._keep_last :]:
            if path in best:
                continue
            # Out of the way first, so that a kill in between leaves no half of a checkpoint.
            if is_remote(path):
                (path / manifest.FILE).unlink()
                remove_tree(path)
            else:
                doomed = self.folder / f"{_SAVING}{path.name}-old"
                path.rename(doomed)
                remove_tree(doomed)

    def _failed(self, staging: Path, error: Exception) -> DdrpError:
        if distributed.is_main() and staging.exists():
            with contextlib.suppress(OSError):
                remove_tree(staging)
        step = staging.name.removeprefix(_SAVING)
        if _is_disk_full(error):
            kept = ", ".join(path.name for path in _step_folders(self.folder)) or "none"
            return DdrpError(
                f"disk full while saving the checkpoint of step {step} to {self.folder}; free "
                f"some space and run the same command again (checkpoints there: {kept})"
            )
        return DdrpError(f"could not save the checkpoint of step {step} to {self.folder}: {error}")


def save_alone(
    folder: Path,
    state: Any,
    *,
    config: Mapping[str, Any],
    tokenizer: Any,
    step: int,
    progress: Mapping[str, Any],
) -> None:
    """Writes one checkpoint that belongs to no run.

    Args:
        folder: becomes the checkpoint's folder; it exists and is empty.
        state, step, progress: as `Checkpoints.save` takes them.
        config, tokenizer: as `Checkpoints` does.
    """
    checkpoints = Checkpoints(folder, config=config, tokenizer=tokenizer, keep_last=1, keep_best=0)
    try:
        checkpoints.save(state, step=step, progress=progress)
    finally:
        checkpoints.close()
    for path in (folder / str(step)).iterdir():
        path.rename(folder / path.name)
    (folder / str(step)).rmdir()


def find_checkpoint(path: str | Path) -> Path:
    """Returns the folder of the checkpoint that `path` names, verified.

    Args:
        path: a run's folder (its newest good checkpoint), or one checkpoint's folder, also one
            copied elsewhere.

    Raises:
        UsageError: there is no checkpoint.
        DamagedError: the named checkpoint is damaged.
        DdrpError: the run has checkpoints, but none is good.
    """
    path = absolute(as_path(path))
    if is_checkpoint(path):
        verify(path)
        return path
    for folder in (path / "checkpoints", path):
        if _step_folders(folder) and (newest := _newest_good(folder, set())):
            return newest
    problem = "no checkpoint there" if path.is_dir() else "no such folder"
    raise UsageError(
        f"checkpoint '{path}': {problem}; name a run's folder (--workdir of 'ddrp pretrain') or "
        "one of its checkpoints/<step> folders"
    )


def find_best(path: str | Path) -> Path:
    """Returns the checkpoint of a run with the lowest held-out loss, the newest if none has one.

    Args and raises as for `find_checkpoint`; one checkpoint's own folder is taken as it is.
    """
    newest = find_checkpoint(path)
    if newest == absolute(as_path(path)):
        return newest
    losses: dict[Path, float] = {}
    for folder in _step_folders(newest.parent):
        try:
            loss = manifest.read(folder)["held_out_loss"]
            if loss is not None:
                verify(folder)
                losses[folder] = loss
        except DamagedError as error:
            _log.warning("damaged checkpoint skipped: %s", error)
    return min(losses, key=lambda folder: losses[folder]) if losses else newest


def has_checkpoints(folder: Path) -> bool:
    """Returns whether a folder of checkpoints has any, good or damaged."""
    return bool(_step_folders(folder))


def is_checkpoint(path: Path) -> bool:
    """Returns whether `path` is one checkpoint's folder (good or damaged)."""
    return (path / manifest.FILE).is_file() or (path / "arrays").is_dir()


def read_config(path: Path) -> dict[str, Any]:
    """Returns the config stored with a checkpoint, as plain data."""
    return orjson.loads((path / "config.json").read_bytes())


def read_progress(path: Path) -> dict[str, Any]:
    """Returns the progress stored with a checkpoint."""
    return orjson.loads((path / "progress.json").read_bytes())


def read_loss(path: Path) -> float | None:
    """Returns the held-out loss measured at a checkpoint's step, if it was."""
    return manifest.read(path)["held_out_loss"]


def is_evaluation_due(path: Path) -> bool:
    """Returns whether a checkpoint's state was to be measured and was not, for lack of time."""
    return manifest.read(path).get("evaluation_due", False)


def parameter_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and type of each parameter in a checkpoint, by name ("a/b/c")."""
    return {name: (leaf.shape, str(leaf.dtype)) for name, leaf in _metadata(path, "params").items()}


def task_head_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array of a task's head by name; none where there is no head."""
    return {name: leaf.shape for name, leaf in _metadata(path, "task_head").items()}


def restore(path: Path, abstract_state: Any) -> Any:
    """Reads a checkpoint's state.

    Args:
        path: one checkpoint's folder, verified.
        abstract_state: shapes, types and shardings wanted; the shardings may differ from those
            that were saved.

    Raises:
        DdrpError: names or shapes differ.
    """
    items = _items(abstract_state)
    return _rebuilt(abstract_state, _load(path, items))


def restore_params(path: Path, abstract_params: Any) -> Any:
    """Reads a checkpoint's parameters alone, as `restore` does."""
    loaded = _load(path, {"params": _named(abstract_params)})["params"]
    return _from_named(abstract_params, loaded)


def restore_array(path: Path, name: str, item: str = "params") -> np.ndarray:
    """Reads one array alone, for those who cannot hold all of them.

    Args:
        path: one checkpoint's folder, verified.
        name: as `parameter_shapes` or `task_head_shapes` has it.
        item: "params" or "task_head".
    """
    from orbax.checkpoint import v1 as ocp

    leaf = _metadata(path, item)[name]
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        wanted = {item: {name: np.empty(leaf.shape, leaf.dtype)}}
        return ocp.load_checkpointables(path / "arrays", wanted)[item][name]


def _load(path: Path, wanted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    from orbax.checkpoint import v1 as ocp

    for item, leaves in wanted.items():
        _check_shapes(path, leaves, _metadata(path, item))
    return ocp.load_checkpointables(path / "arrays", wanted)


def _check_shapes(path: Path, wanted: dict[str, Any], saved: dict[str, Any]) -> None:
    problems = [f"{name}: missing in the checkpoint" for name in wanted if name not in saved]
    problems += [f"{name}: not in this model" for name in saved if name not in wanted]
    problems += [
        f"{name}: {tuple(saved[name].shape)} in the checkpoint, {tuple(leaf.shape)} in this model"
        for name, leaf in wanted.items()
        if name in saved and tuple(saved[name].shape) != tuple(leaf.shape)
    ]
    if problems:
        raise DdrpError(f"{path} does not fit this config:\n  " + "\n  ".join(problems))


def _metadata(path: Path, item: str) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    return ocp.checkpointables_metadata(path / "arrays").metadata.get(item) or {}


def _items(state: Any) -> dict[str, dict[str, Any]]:
    """Splits a state into what later commands read and what only training needs."""
    items: dict[str, dict[str, Any]] = {"params": {}, "task_head": {}, "optimizer": {}}
    for name, leaf in _named(state).items():
        field, _, rest = name.partition("/")
        if field in ("params", "task_head"):
            items[field][rest] = leaf
        else:
            items["optimizer"][name] = leaf
    return {item: leaves for item, leaves in items.items() if leaves}


def _rebuilt(like: Any, items: dict[str, dict[str, Any]]) -> Any:
    params = {f"params/{name}": leaf for name, leaf in items["params"].items()}
    return _from_named(like, params | items["optimizer"])


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _from_named(like: Any, named: dict[str, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in _named(like)])


def _step_folders(folder: Path) -> list[Path]:
    """Returns everything with a step's name, newest first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if path.name.isdecimal()]
    if is_remote(folder):
        named = [path for path in named if (path / manifest.FILE).exists()]
    return sorted(named, key=lambda path: int(path.name), reverse=True)


def _newest_good(folder: Path, damaged: set[Path]) -> Path | None:
    """Returns the newest good checkpoint; adds those found damaged to `damaged`."""
    found = _step_folders(folder)
    for path in found:
        try:
            verify(path)
            return path
        except DamagedError as error:
            damaged.add(path)
            _log.warning("damaged checkpoint skipped: %s", error)
    if found:
        raise DdrpError(
            f"{folder}: none of its {len(found)} checkpoints is usable "
            f"({', '.join(path.name for path in found)}); to start afresh, name another --workdir "
            "or remove this folder"
        )
    return None


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    if not is_remote(folder):
        tokenizer.save(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        local = Path(temporary) / "tokenizer"
        tokenizer.save(local)
        copy_tree(local, folder)


def _is_disk_full(error: BaseException) -> bool:
    """Returns whether a full disk, quota or file-size limit is behind an error.

    Orbax and tensorstore report it as a ValueError with the system's words.
    """
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return any(
        getattr(cause, "errno", None) in codes
        or any(os.strerror(code) in str(cause) for code in codes)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
