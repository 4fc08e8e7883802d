"""Compiles the real training step for TPUs that are not there, and tells what it would cost.

The TPU compiler (`libtpu`) runs on any machine. It says how much memory a step takes and how many
cycles each operation; a large bf16 product compiled for the same chip tells how long a cycle is,
since it runs at nearly the published peak.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ddrp_jax.config import Config, DefinitionConfig, RunConfig, StageConfig
from ddrp_jax.data.masking import predictions_of
from ddrp_jax.errors import DdrpError, UsageError, nearest
from ddrp_jax.planning import costs, hlo, kernels

INSTALL = "pip install 'ddrp-jax[tpu-plan]'"
# Slices that can be had, by generation: Google Cloud's tables of supported shapes.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
    *("8x8x8", "8x8x16", "8x16x16", "16x16x16"),
)
SLICES = {"v4": _CUBES, "v5e": _FLAT, "v5p": _CUBES, "v6e": _FLAT}
# The product that gives a cycle's length: the size that runs nearest to the peak differs.
_PRODUCT_SIZES = (4096, 16384)
_DAY = 24 * 3600.0


def prepare_environment() -> None:
    """Lets libtpu compile on a machine without TPUs; call it before jax is imported.

    Raises:
        DdrpError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise DdrpError(f"libtpu, the TPU compiler, is not installed; run {INSTALL}")
    # The plan never runs a step: without these libtpu would take a lock that keeps others out,
    # and ask a metadata server what machine this is.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Programs for chips that are not there are written to a cache but cannot be read from it.
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def check_topology(name: str) -> tuple[str, str]:
    """Splits "v5e:16x16" into the generation and the slice.

    Raises:
        UsageError: not one of `SLICES`.
    """
    generation, _, shape = name.partition(":")
    if shape in SLICES.get(generation, ()):
        return generation, shape
    if generation in SLICES:
        known = [f"{generation}:{shape}" for shape in SLICES[generation]]
    else:
        known = [f"{chip}:{shape}" for chip, shapes in SLICES.items() for shape in shapes]
    raise UsageError(
        f"topology {name!r} is not known{nearest(name, known)}; known: {', '.join(known)}"
    )


def devices_of(name: str) -> list[Any]:
    """Returns the devices of a topology ("v5e:4x4"), one for each chip; nothing runs on them."""
    from jax.experimental import topologies

    generation, shape = check_topology(name)
    sizes = [int(size) for size in shape.split("x")]
    host = [min(size, 2) for size in sizes]
    return list(
        topologies.get_topology_desc(
            platform="tpu",
            topology_name=name,
            chips_per_host_bounds=(*host, *[1] * (3 - len(host))),
            # The two cores of a v4 or v5p chip work as one device, as they do by default there.
            chip_config_name="megacore" if generation in ("v4", "v5p") else "default",
        ).devices
    )


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What one stage of a run costs on one topology.

    Attributes:
        name, length, batch_size, steps: the stage's.
        rows_per_chip: rows of one step on one chip.
        fits: whether the compiler found room for it; without, only `memory` and `advice` tell more.
        memory: bytes on one chip by kind; "total" is all of it, "available" what the chip has.
        advice: what to change where it does not fit.
        flops: products of one step on one chip, as compiled.
        model_flops: what the model asks for (`training.hardware.stage_flops`), on one chip.
        traffic: bytes of HBM read and written in one step on one chip.
        megacycles: the compiler's estimate for one step, and the schedules of Pallas kernels.
        compute_seconds: the same in seconds.
        communication_seconds: of the collectives, as if nothing overlapped them and all links of a
            chip were full: the least they take one after the other.
        step_seconds: both together.
        tokens_per_second: over all chips, padding included.
        mfu: model FLOPs by the peak of `step_seconds`.
        tokens: of the whole stage.
        days, chip_hours: of the whole stage.
        collectives: kind, axes, group, bytes and count of each exchange in one step.
        uncounted: what is not in the estimate, in words.
        compile_seconds: the compiler's time.
    """

    name: str
    length: int
    batch_size: int
    steps: int
    rows_per_chip: float
    fits: bool
    memory: dict[str, int]
    advice: tuple[str, ...] = ()
    flops: float = 0.0
    model_flops: float = 0.0
    traffic: int = 0
    megacycles: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    tokens: int = 0
    days: float = 0.0
    chip_hours: float = 0.0
    collectives: tuple[costs.Collective, ...] = ()
    uncounted: tuple[str, ...] = ()
    compile_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run costs on one topology; totals are None where a stage does not fit."""

    topology: str
    chips: int
    mesh: dict[str, int]
    stages: tuple[StagePlan, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage does."""
        return all(stage.fits for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Of all stages."""
        return sum(stage.tokens for stage in self.stages)

    @property
    def days(self) -> float | None:
        """Of all stages."""
        return sum(stage.days for stage in self.stages) if self.fits else None

    @property
    def chip_hours(self) -> float | None:
        """Of all stages."""
        return sum(stage.chip_hours for stage in self.stages) if self.fits else None


def check(
    config: RunConfig, topology: str, stage_names: Sequence[str] = ()
) -> tuple[list[int], Any]:
    """Finds what cannot be right before anything compiles.

    Args:
        config: a run.
        topology: "v5e:16x16"; one of `SLICES`.
        stage_names: the stages to plan; all of them if empty.

    Returns:
        The indices of those stages, and the mesh.

    Raises:
        UsageError: an unknown topology or stage, a mesh that does not multiply out, a batch that
            does not divide.
    """
    from ddrp_jax.training import sharding

    names = [stage.name for stage in config.stages]
    for name in stage_names:
        if name not in names:
            raise UsageError(f"stage {name!r}: the config has {', '.join(names)}")
    mesh = sharding.make_mesh(config.mesh, devices_of(topology))
    chosen = [i for i, name in enumerate(names) if not stage_names or name in stage_names]
    for index in chosen:
        sharding.check_batch(config.stages[index], mesh)
    return chosen, mesh


def make_plan(config: RunConfig, topology: str, stage_names: Sequence[str] = ()) -> Plan:
    """Compiles the step of every stage for a topology and measures it.

    Args:
        config: a run whose vocabulary is known.
        topology: "v5e:16x16"; one of `SLICES`.
        stage_names: the stages to plan; all of them if empty.

    Raises:
        UsageError: as `check`.
    """
    generation, _ = check_topology(topology)
    chosen, mesh = check(config, topology, stage_names)
    trainings = [build(config, index, mesh) for index in chosen]
    # The compiler works on one core at a time.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        plans = pool.map(
            lambda index, training: _plan_stage(
                config, config.stages[index], training, mesh, generation
            ),
            chosen,
            trainings,
        )
        return Plan(topology, mesh.size, dict(mesh.shape), tuple(plans))


def with_rows_per_chip(config: RunConfig, topology: str, rows: int) -> RunConfig:
    """Returns the config with `rows` of a step on each chip, and steps for the same tokens."""
    from ddrp_jax.training import sharding

    mesh = sharding.make_mesh(config.mesh, devices_of(topology))
    batch = rows * mesh.shape["data"] * mesh.shape["fsdp"]
    stages = tuple(
        dataclasses.replace(
            stage,
            batch_size=batch,
            steps=max(round(stage.steps * stage.batch_size / batch), 1),
            accumulation=stage.accumulation if batch % stage.accumulation == 0 else 1,
        )
        for stage in config.stages
    )
    return dataclasses.replace(config, stages=stages)


def abstract_batch(config: RunConfig, stage: StageConfig, place: Any) -> dict[str, Any]:
    """Returns the shapes, types and sharding of a batch, as the run's pipeline makes it."""
    import jax

    places = (stage.batch_size, stage.length)
    shapes = dict.fromkeys(("input_ids", "segment_ids", "positions"), (places, "int32"))
    if isinstance(config, Config):
        columns = (stage.batch_size, predictions_of(config.masking, stage.length))
        shapes |= dict.fromkeys(("predict_positions", "predict_ids"), (columns, "int32"))
        shapes["predict_weights"] = (columns, "float32")
    else:
        if decoder_length := decoder_length_of(config, stage):
            places = (stage.batch_size, decoder_length)
            names = ("decoder_ids", "decoder_segment_ids", "decoder_positions")
            shapes |= dict.fromkeys(names, (places, "int32"))
        shapes["target_ids"] = (places, "int32")
        shapes |= dict.fromkeys(("target_weights", "slot_weights"), (places, "float32"))
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for name, (shape, dtype) in shapes.items()
    }


def decoder_length_of(config: RunConfig, stage: StageConfig) -> int:
    """Returns the tokens of a row of the decoder's input, 0 without a decoder.

    The examples decide it; a quarter of the row is more than those of an English dictionary need.
    """
    return stage.length // 4 if config.model.decoder.num_layers else 0


def build(config: RunConfig, stage_index: int, mesh: Any) -> Any:
    """Returns the compiled functions of a stage, as the run makes them."""
    from ddrp_jax.training.step import build_training

    if not isinstance(config, DefinitionConfig):
        return build_training(config, stage_index, mesh)
    from ddrp_jax.definitions.reconstruct import objective

    return build_training(config, stage_index, mesh, objective(config))


def compile_step(config: RunConfig, stage: StageConfig, training: Any) -> Any:
    """Compiles the training step of a stage; `jax.errors.JaxRuntimeError` where it does not fit."""
    batch = abstract_batch(config, stage, training.batch_sharding)
    return training.train_step.lower(training.abstract_state, batch).compile()


def _plan_stage(
    config: RunConfig, stage: StageConfig, training: Any, mesh: Any, generation: str
) -> StagePlan:
    import jax

    from ddrp_jax.training.hardware import CHIPS, stage_flops

    chip, chips = CHIPS[generation], mesh.size
    state = training.abstract_state
    memory = {
        "parameters": shard_bytes(state.params),
        "optimizer": shard_bytes(state.opt_state),
        "batch": shard_bytes(abstract_batch(config, stage, training.batch_sharding)),
    }
    rows = stage.batch_size / (mesh.shape["data"] * mesh.shape["fsdp"])
    common: dict[str, Any] = {
        "name": stage.name,
        "length": stage.length,
        "batch_size": stage.batch_size,
        "steps": stage.steps,
        "rows_per_chip": rows,
        "tokens": stage.steps * stage.batch_size * stage.length,
    }
    begun = time.monotonic()
    try:
        compiled = compile_step(config, stage, training)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        memory |= _needed(str(error), chip.memory)
        return StagePlan(
            fits=False,
            memory=memory,
            advice=tuple(_advice(config, stage, memory, rows, mesh)),
            compile_seconds=time.monotonic() - begun,
            **common,
        )
    compile_seconds = time.monotonic() - begun
    cost = costs.cost(hlo.parse(compiled.as_text()), mesh.shape)
    flops = stage_flops(config, stage, decoder_length_of(config, stage)) / chips
    in_kernels, uncounted = kernel_cycles(cost, generation)
    cycles = cost.cycles + in_kernels
    compute = cycles * cycle_seconds(generation)
    communication = sum(
        exchange_seconds(exchange, chip.link_bandwidth) for exchange in cost.collectives
    )
    tokens_per_second = stage.batch_size * stage.length / (compute + communication)
    seconds = common["tokens"] / tokens_per_second
    return StagePlan(
        fits=True,
        memory=memory | _measured_memory(compiled.memory_analysis(), memory, chip.memory),
        flops=cost.flops,
        model_flops=flops,
        traffic=cost.traffic,
        megacycles=cycles / 1e6,
        compute_seconds=compute,
        communication_seconds=communication,
        step_seconds=compute + communication,
        tokens_per_second=tokens_per_second,
        mfu=flops / (compute + communication) / chip.peak_flops,
        days=seconds / _DAY,
        chip_hours=seconds / 3600 * chips,
        collectives=cost.collectives,
        uncounted=uncounted,
        compile_seconds=compile_seconds,
        **common,
    )


def shard_bytes(tree: Any) -> int:
    """Returns the bytes of one device's share of a tree of abstract arrays."""
    import jax

    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _measured_memory(stats: Any, memory: dict[str, int], available: float) -> dict[str, int]:
    """Returns the compiler's account of a program: all that `memory` does not name yet."""
    kinds = {
        # Tiles are padded, above all those of small arrays.
        "padding": max(stats.argument_size_in_bytes - sum(memory.values()), 0),
        "temporaries": stats.temp_size_in_bytes,
        "output": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "program": stats.generated_code_size_in_bytes,
    }
    total = sum(memory.values()) + sum(kinds.values())
    return kinds | {"total": total, "available": int(available)}


def _needed(message: str, available: float) -> dict[str, int]:
    """Reads the compiler's message that a program does not fit."""
    sizes = [
        int(float(number) * {"K": 2**10, "M": 2**20, "G": 2**30}[unit])
        for number, unit in re.findall(r"([\d.]+)([KMG])\b", message)
    ]
    total = sizes[0] if sizes else 0
    return {"total": total, "available": sizes[1] if len(sizes) > 1 else int(available)}


def _advice(
    config: RunConfig, stage: StageConfig, memory: dict[str, int], rows: float, mesh: Any
) -> list[str]:
    """Returns what would make a stage fit, with the numbers that can be told without compiling."""
    state = memory["parameters"] + memory["optimizer"]
    room = memory["available"] - state
    activations = max(memory["total"] - state, 1)
    model, advice = config.model, []
    microrows = rows / stage.accumulation
    if model.remat != "full":
        kept = model.num_layers * int(microrows) * stage.length * model.hidden_size
        kept *= 2 if model.dtype == "bfloat16" else 4
        choices = "dots or full" if model.remat == "none" else "full"
        advice.append(
            f"--config.model.remat={choices}: with full the backward pass keeps the layers' inputs "
            f"alone, {kept / 1e9:.1f} GB, and computes the rest again"
        )
    fitting = int(microrows * max(room, 0) / activations)
    if fitting >= 1:
        factor = math.ceil(microrows / fitting)
        while rows % (stage.accumulation * factor):
            factor += 1
        advice.append(
            f"about {fitting} rows at a time fit on a chip, not {microrows:.10g}: "
            f"accumulation={stage.accumulation * factor} keeps the batch, or set "
            f"batch_size={fitting * stage.accumulation * int(stage.batch_size / rows)}"
        )
    if mesh.shape["fsdp"] == 1 and mesh.shape["data"] > 1:
        ways = mesh.shape["data"]
        advice.append(
            f"--config.mesh.fsdp={ways}: parameters and moments, {state / 1e9:.1f} GB on every "
            f"chip, would take {state / ways / 1e9:.2f} GB"
        )
    return advice


def kernel_cycles(cost: costs.Cost, generation: str) -> tuple[int, tuple[str, ...]]:
    """Returns the cycles of a step's Pallas kernels, and notes on all that no cycles tell of."""
    total, notes = 0, []
    for kernel in cost.kernels:
        found = kernels.schedule(kernel, _smallest(generation))
        label = f"Pallas kernel {kernel.name}, run {kernel.count} times"
        if found is None:
            notes.append(f"{label}: the compiler gives neither an estimate nor a schedule")
            continue
        total += kernel.count * found.cycles
        if found.unknown_loops:
            notes.append(f"{label}: {found.unknown_loops} of its loops count once")
    if cost.unknown_loops:
        notes.append(f"{cost.unknown_loops} operations in loops of unknown length count once")
    return total, tuple(notes)


def _smallest(generation: str) -> str:
    return f"{generation}:{SLICES[generation][0]}"


@functools.cache
def cycle_seconds(generation: str) -> float:
    """Returns the length of one of the compiler's cycles on a chip.

    A large bf16 product is compiled for the chip; the one whose estimate is nearest to the
    published peak is taken to run at it.
    """
    import jax
    import jax.numpy as jnp

    from ddrp_jax.training.hardware import CHIPS

    place = jax.sharding.SingleDeviceSharding(devices_of(_smallest(generation))[0])
    rates = []
    for size in _PRODUCT_SIZES:
        matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=place)
        compiled = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
        cost = costs.cost(hlo.parse(compiled.as_text() or ""), {"data": 1})
        rates.append(2.0 * size**3 / cost.cycles)
    return max(rates) / CHIPS[generation].peak_flops


def exchange_seconds(exchange: costs.Collective, link_bandwidth: float) -> float:
    """Returns the least time of equal collectives: bytes cross a chip's links as in a ring."""
    others = (exchange.group - 1) / max(exchange.group, 1)
    factor = {"all-reduce": 2 * others, "collective-permute": 1.0}.get(exchange.kind, others)
    return factor * exchange.bytes * exchange.count / link_bandwidth
