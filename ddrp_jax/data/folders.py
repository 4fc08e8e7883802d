"""Output folders that appear whole or not at all."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ddrp_jax.errors import DdrpError, UsageError


@contextlib.contextmanager
def whole_folder(output: Path, *, marker: str, overwrite: bool) -> Iterator[Path]:
    """Gives a working folder beside `output` that takes its name when the block ends well.

    A block that raises, or a process that is killed, leaves `output` as it was; a leftover
    working folder (`<output>.partial`) is cleared by the next run.

    Args:
        output: the folder to make.
        marker: a file that every finished folder of this kind holds. Only a folder that has it,
            or an empty one, is ever replaced.
        overwrite: whether a finished folder may be replaced.

    Raises:
        UsageError: `output` exists and may not be replaced.
        DdrpError: the disk is full, or the folder cannot be written.
    """
    check_replaceable(output, marker=marker, overwrite=overwrite)
    working = output.with_name(output.name + ".partial")
    shutil.rmtree(working, ignore_errors=True)
    try:
        with _reporting(output):
            working.mkdir(parents=True)
        # Other failures in the block are those of what it reads.
        with _reporting(output, only=(errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            yield working
        with _reporting(output):
            _sync(working)
            _replace(working, output)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def check_replaceable(output: Path, *, marker: str, overwrite: bool) -> None:
    """Raises UsageError unless `output` is free, empty, or finished and to be overwritten."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError(f"{output}: a file of that name exists; name a folder")
    if not any(output.iterdir()):
        return
    if not (output / marker).exists():
        raise UsageError(
            f"{output}: holds other files (no {marker} there), so it is not replaced; "
            "name a new folder"
        )
    if not overwrite:
        raise UsageError(f"{output}: already finished; pass --overwrite to replace it")


@contextlib.contextmanager
def _reporting(output: Path, only: tuple[int, ...] = ()) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if only and error.errno not in only:
            raise
        raise DdrpError(f"cannot write {output}: {error.strerror}") from error


def _sync(folder: Path) -> None:
    """Puts every file on the disk, so that the rename cannot outlive its contents."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(working: Path, output: Path) -> None:
    if not output.exists():
        working.rename(output)
        return
    old = output.with_name(output.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    output.rename(old)
    working.rename(output)
    shutil.rmtree(old)
