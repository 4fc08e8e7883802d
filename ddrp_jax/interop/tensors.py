"""Weight files of published models: safetensors (one or several) and PyTorch's own, read lazily.

Tensors come as float32, which holds every float16 and bfloat16 value. safetensors is read and
written here with NumPy: the library's NumPy side knows no bfloat16, scrambles arrays that are not
contiguous, and takes all tensors at once where an export wants one at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ddrp_jax.errors import DdrpError, UsageError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_WEIGHTS = "pytorch_model.bin"

_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_OTHER_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2}
_SIZES = (
    {name: np.dtype(dtype).itemsize for name, dtype in _TYPES.items()}
    | _OTHER_SIZES
    | {"I32": 4, "U32": 4, "I64": 8, "U64": 8}
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that is still on the disk.

    Attributes:
        shape: its shape.
        dtype: the file's name of its type.
        read: returns it as a float32 array, which may be a read-only view of the file.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def open_weights(folder: Path) -> dict[str, Tensor]:
    """Finds the tensors of a model folder by name.

    Raises:
        UsageError: there are no weights, or only PyTorch's and torch is not installed.
        DdrpError: a file is damaged, or an index names one that is not there.
    """
    if (folder / WEIGHTS).exists():
        return _open_safetensors(folder / WEIGHTS)
    if (folder / INDEX).exists():
        return _open_sharded(folder)
    if (folder / TORCH_WEIGHTS).exists():
        return _open_torch(folder / TORCH_WEIGHTS)
    raise UsageError(
        f"{folder}: no weights there; expected {WEIGHTS}, {INDEX} with its files, or "
        f"{TORCH_WEIGHTS}"
    )


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise DdrpError(f"{path}: truncated, {size} bytes do not hold its header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DdrpError(f"{path}: not a safetensors file: {error}") from None
    data = 8 + length
    promised = data + max((end for *_, end in entries.values()), default=0)
    if promised > size:
        raise DdrpError(f"{path}: truncated, {size} bytes of {promised}")
    for name, (dtype, shape, begin, end) in entries.items():
        if dtype not in _SIZES or not 0 <= begin <= end == begin + math.prod(shape) * _SIZES[dtype]:
            raise DdrpError(f"{path}: damaged, {name} is {dtype} {list(shape)} in {end - begin} B")
    return {
        name: Tensor(shape, dtype, _mapped(path, name, dtype, shape, data + begin))
        for name, (dtype, shape, begin, _) in entries.items()
    }


def _mapped(
    path: Path, name: str, dtype: str, shape: tuple[int, ...], offset: int
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        if dtype not in _TYPES:
            raise DdrpError(f"{path}: {name} is of type {dtype}, expected {', '.join(_TYPES)}")
        if 0 in shape:
            return np.zeros(shape, np.float32)
        stored = np.memmap(path, np.uint8, "r", offset, math.prod(shape) * _SIZES[dtype])
        return stored.view(_TYPES[dtype]).reshape(shape).astype(np.float32, copy=False)

    return read


def _open_sharded(folder: Path) -> dict[str, Tensor]:
    try:
        places = dict(json.loads((folder / INDEX).read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise DdrpError(f"{folder / INDEX}: not an index of safetensors: {error!r}") from None
    shards = {}
    for file in sorted(set(places.values())):
        # An index may come from anyone: it names files beside itself and no others.
        if Path(file).name != file or not (folder / file).is_file():
            raise DdrpError(f"{folder / INDEX}: names {file!r}, which is not there")
        shards[file] = _open_safetensors(folder / file)
    lost = [f"{name} in {file}" for name, file in places.items() if name not in shards[file]]
    if lost:
        raise DdrpError(f"{folder / INDEX}: names tensors that are not there: {', '.join(lost)}")
    return {name: shards[file][name] for name, file in places.items()}


def _open_torch(path: Path) -> dict[str, Tensor]:
    try:
        import torch
    except ImportError:
        raise UsageError(
            f"{path}: reading it needs torch, which is not installed; 'pip install torch', or "
            f"save the model as {WEIGHTS}"
        ) from None
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises anything
        raise DdrpError(f"{path}: not a file of tensors alone: {error}") from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors.values()
    ):
        raise DdrpError(f"{path}: expected a mapping of names to tensors")
    return {
        str(name): Tensor(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            functools.partial(_as_float32, tensor),
        )
        for name, tensor in tensors.items()
    }


def _as_float32(tensor: Any) -> np.ndarray:
    return tensor.detach().float().numpy()


DTYPES: dict[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float16": ("F16", np.float16),
}


def write_safetensors(
    path: Path,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
    dtype: str,
) -> None:
    """Writes tensors one at a time, so that no more than one is held in memory.

    Args:
        path: the file.
        shapes: name and shape of each, in order.
        arrays: float32 arrays in the same order.
        dtype: a name in `DTYPES`.

    Raises:
        UsageError: a value does not fit the type.
    """
    code, kind = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes:
        begin, end = end, end + math.prod(shape) * np.dtype(kind).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), array in zip(shapes, arrays, strict=True):
            assert array.shape == shape, (name, array.shape, shape)
            file.write(_converted(name, array, dtype, kind).data)


def _converted(name: str, array: np.ndarray, dtype: str, kind: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(array, kind)
    if dtype == "float16" and not np.isfinite(stored).all() and np.isfinite(array).all():
        raise UsageError(
            f"--dtype=float16: {name} holds {np.abs(array).max():.3g}, beyond its largest number, "
            "65504; use bfloat16"
        )
    return stored.reshape(-1).view(np.uint8)
