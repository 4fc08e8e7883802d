"""The mesh, and the one table that maps a model's axis names to it."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
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
        UsageError: the sizes do not multiply out to the number of devices, or their slices to
            `dcn_data`.
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
    types = (AxisType.Auto,) * 3
    if _slices(devices) > 1 or config.dcn_data > 1:
        _check_slices(config, sizes, devices)
    if sizes["fsdp"] * sizes["tensor"] == 1:
        # A reduction over all devices knows no order, so rows can follow that of the processes:
        # a row's dropout then does not depend on how many processes feed the batch.
        devices = sorted(devices, key=lambda device: (device.process_index, device.id))
        return Mesh(
            np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=types
        )
    if config.dcn_data > 1:
        return Mesh(_across_slices(config, sizes, devices), tuple(sizes), axis_types=types)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def _check_slices(config: MeshConfig, sizes: dict[str, int], devices: list[jax.Device]) -> None:
    slices, kind = _slices(devices), "slices"
    if slices == 1:  # GPUs and CPUs know of none
        slices, kind = len({device.process_index for device in devices}), "processes"
    if config.dcn_data != slices:
        raise UsageError(
            f"config.mesh.dcn_data={config.dcn_data}: the {len(devices)} devices are in {slices} "
            f"{kind}; set it to {slices}"
        )
    if sizes["data"] % slices:
        raise UsageError(
            f"config.mesh: data={sizes['data']} does not divide over dcn_data={slices} slices; "
            f"fsdp x tensor = {sizes['fsdp'] * sizes['tensor']} may not exceed the devices of one "
            f"slice, {len(devices) // slices}"
        )


def _across_slices(
    config: MeshConfig, sizes: dict[str, int], devices: list[jax.Device]
) -> np.ndarray:
    """Returns the devices [data, fsdp, tensor] with only the data axis reaching across slices."""
    from jax.experimental import mesh_utils

    within = (sizes["data"] // config.dcn_data, sizes["fsdp"], sizes["tensor"])
    return mesh_utils.create_hybrid_device_mesh(
        within,
        (config.dcn_data, 1, 1),
        devices=devices,
        process_is_granule=_slices(devices) == 1,
    )


def _slices(devices: list[jax.Device]) -> int:
    """Returns how many TPU slices the devices are in."""
    if devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in devices})


def row_share(mesh: Mesh) -> tuple[int, int]:
    """Returns which share of a batch's rows this process feeds, and of how many.

    Processes that the tensor axis joins feed the same rows.

    Raises:
        UsageError: the devices of a process do not make a share like those of the others.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    places = mesh.devices.reshape(ways, -1)
    shares: dict[int, set[int]] = {}
    for way, device in np.ndenumerate(places):
        shares.setdefault(device.process_index, set()).add(way[0])
    distinct = sorted({tuple(sorted(share)) for share in shares.values()})
    if sum(map(len, distinct)) != ways or len({len(share) for share in distinct}) != 1:
        raise UsageError(
            f"config.mesh: tensor={mesh.shape['tensor']} splits the devices of a process unevenly; "
            f"make it a divisor or a multiple of the {jax.local_device_count()} devices of one"
        )
    return distinct.index(tuple(sorted(shares[jax.process_index()]))), len(distinct)


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
