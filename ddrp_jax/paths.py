"""Local folders, and folders in a bucket (`gs://...`), by the methods of `pathlib.Path`.

A bucket has no rename in one move, no appending and no locks. Whoever needs one of these asks
`is_remote` and says how it does without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from ddrp_jax.errors import UsageError

# Scheme -> the package that reads it, and the extra that brings it.
_SCHEMES = {"gs": ("gcsfs", "gcs")}


def as_path(path: str | Path) -> Path:
    """Returns a path on the disk, or in a bucket where it begins with `gs://`.

    Raises:
        UsageError: an unknown scheme, or what it needs is not installed.
    """
    text = os.fspath(path)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Path(path)
    if scheme not in _SCHEMES:
        raise UsageError(f"{text!r}: expected a path on the disk or gs://BUCKET/...")
    package, extra = _SCHEMES[scheme]
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"{text!r}: {package} is not installed; run pip install 'ddrp-jax[{extra}]'"
        )
    from etils import epath

    return cast(Path, epath.Path(text))


def local_path(text: str) -> Path:
    """Returns a path on the disk, for what is read or written there alone.

    Raises:
        UsageError: it is somewhere else.
    """
    if "://" in text:
        raise UsageError(
            f"{text!r}: expected a path on this machine's disk; "
            "'gcloud storage cp --recursive' copies to and from a bucket"
        )
    return Path(text)


def local_copy(path: str | Path, index: str) -> Path:
    """Returns a folder on the disk: the one that is named, or a copy of one in a bucket.

    The copy is kept in the user's cache folder and made again when the index has changed.

    Args:
        path: a folder that is finished once it has its index.
        index: that file's name. A bucket's folder without it is returned as it is.
    """
    source = as_path(path)
    if not is_remote(source) or not (source / index).exists():
        return source
    identity = f"{source}\n".encode() + (source / index).read_bytes()
    copy = cache_folder() / "copies" / hashlib.sha256(identity).hexdigest()[:16]
    if not copy.exists():
        print(f"copying {source} to {copy}", file=sys.stderr, flush=True)
        staging = copy.with_name(f".{copy.name}.{os.getpid()}")
        copy_tree(source, staging)
        try:
            staging.rename(copy)
        except OSError:  # another process was faster
            shutil.rmtree(staging)
    return copy


def cache_folder() -> Path:
    """Returns where this user's copies of things are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "ddrp_jax"


def is_remote(path: Path) -> bool:
    """Returns whether a path lies in a bucket."""
    return not isinstance(path, Path)


def absolute(path: Path) -> Path:
    """Returns a path from the root, without following links."""
    return path if is_remote(path) else path.absolute()


def remove_tree(path: Path) -> None:
    """Removes a folder with all that is in it."""
    if is_remote(path):
        cast(Any, path).rmtree(missing_ok=True)
    else:
        shutil.rmtree(path)


def size_of(path: Path) -> int:
    """Returns the bytes of a file."""
    stat = path.stat()
    return cast(Any, stat).length if is_remote(path) else stat.st_size


def files_below(path: Path) -> Iterator[Path]:
    """Returns every file in a folder and the folders in it, sorted."""
    for child in sorted(path.iterdir()):
        if child.is_dir():
            yield from files_below(child)
        else:
            yield child


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    if is_remote(path):  # an object is replaced in one move
        path.write_bytes(content)
        return
    staging = path.with_name(f"{path.name}.tmp")
    with staging.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)


def copy_tree(source: Path, target: Path) -> None:
    """Copies a folder between the disk and a bucket, or within either."""
    for file in files_below(source):
        copy = target / file.relative_to(source).as_posix()
        copy.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as old, copy.open("wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)
