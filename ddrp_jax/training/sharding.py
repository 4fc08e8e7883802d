"""The mesh, and the one table that maps a model's axis names to it."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ddrp_jax.config import MeshConfig, StageConfig
from ddrp_jax.errors import UsageError

# Logical axis -> mesh axis. Parameters live split over `fsdp` along the model's width and over
# `tensor` along heads, hidden units and vocabulary; rows of a batch over `data` and `fsdp`.
AXES = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor", "layers": None}
BATCH = PartitionSpec(("data", "fsdp"))


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of axes (data, fsdp, tensor) over all devices.

    Raises:
        UsageError: the sizes do not multiply out to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    given = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: len(devices) // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise UsageError(
            f"config.mesh: {shown} is not the number of devices, {len(devices)}; "
            "set one axis to -1 to take what is left"
        )
    # Auto, not Explicit: under explicit axes stock lookups and row-parallel products raise.
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def check_batch(stage: StageConfig, mesh: Mesh) -> None:
    """Raises UsageError where a microbatch does not divide over the mesh's data axes."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = stage.batch_size // stage.accumulation
    if rows % ways:
        raise UsageError(
            f"stage '{stage.name}': batch_size={stage.batch_size} in {stage.accumulation} "
            f"microbatches gives {rows} rows, which do not divide over data x fsdp = {ways} "
            "devices; change batch_size, accumulation or the mesh"
        )


def parameter_shardings(abstract: Any, mesh: Mesh) -> Any:
    """Returns a sharding for each parameter of an abstract nnx state, by its axis names.

    An axis that the mesh does not divide evenly stays whole.
    """

    def sharding(variable: nnx.Variable) -> NamedSharding:
        names = variable.get_metadata().get("out_sharding") or ()
        shape = variable.get_value().shape
        spec = [AXES[name] if name is not None else None for name in names]
        spec = [
            axis if axis is not None and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(spec, shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(sharding, abstract, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a value that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: rows over the data axes."""
    return NamedSharding(mesh, BATCH)
