"""The manifest of a checkpoint: what was written, so that damage is noticed when it is read."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from ddrp_jax.errors import DdrpError
from ddrp_jax.paths import files_below, is_remote, size_of, write_whole

FILE = "manifest.json"
_FORMAT = 2


class DamagedError(DdrpError):
    """A checkpoint whose files are not those that were written."""


def write(
    folder: Path, step: int, held_out_loss: float | None, evaluation_due: bool = False
) -> None:
    """Writes the manifest of a checkpoint's files, and puts all of them on the disk."""
    files = {}
    for path in files_below(folder):
        digest = _digest(path)
        # A rename may reach the disk before the data it names.
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"size": size_of(path), "sha256": digest}
    body = {"format": _FORMAT, "step": step, "held_out_loss": held_out_loss, "files": files}
    if evaluation_due:
        body["evaluation_due"] = True
    (folder / FILE).write_bytes(_sealed(body))
    sync(folder / FILE)


def settle(folder: Path, held_out_loss: float | None) -> None:
    """Replaces the manifest of a checkpoint whose evaluation was due by one with its loss."""
    body = read(folder)
    del body["evaluation_due"]
    body["held_out_loss"] = held_out_loss
    write_whole(folder / FILE, _sealed(body))


def read(path: Path) -> dict[str, Any]:
    """Returns the body of a checkpoint's manifest, after a look at its own checksum.

    Raises:
        DamagedError: it is missing, or not as it was written.
    """
    try:
        manifest = orjson.loads((path / FILE).read_bytes())
        body, digest = manifest["manifest"], manifest["sha256"]
    except FileNotFoundError:
        raise DamagedError(f"{path}: {FILE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path}: {FILE} cannot be read: {error}") from None
    if hashlib.sha256(to_json(body)).hexdigest() != digest:
        raise DamagedError(f"{path}: {FILE} has changed since it was written")
    if body["format"] != _FORMAT:
        raise DamagedError(f"{path}: format {body['format']}; this version reads {_FORMAT}")
    return body


def verify(path: Path) -> None:
    """Raises DamagedError unless every file of the checkpoint is as it was written."""
    files = read(path)["files"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for problem in pool.map(lambda item: _problem(path / item[0], item[1]), files.items()):
            if problem:
                raise DamagedError(f"{path}: {problem}")


def sync(path: Path) -> None:
    """Puts a file or folder on the disk; a bucket's objects are there once they are written."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(data: Any) -> bytes:
    """Returns JSON as every file of a checkpoint is written."""
    return orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _sealed(body: Mapping[str, Any]) -> bytes:
    return to_json({"sha256": hashlib.sha256(to_json(body)).hexdigest(), "manifest": body})


def _problem(path: Path, entry: Mapping[str, Any]) -> str | None:
    try:
        size = size_of(path)
        if size != entry["size"]:
            return f"{path.name} has {size} bytes, {entry['size']} were written"
        if _digest(path) != entry["sha256"]:
            return f"{path.name} has changed since it was written (SHA-256 differs)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
    return None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
