"""What a compiled module costs on one chip: products, memory traffic, cycles and collectives.

Everything is counted on the module that one device runs, with loops' bodies multiplied by their
trip counts. Sizes are logical: the padding of tiles is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ddrp_jax.planning import hlo

# Operations that move nothing: they name, regroup or wait.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "while",
    "conditional",
    "call",
    "async-start",
    "async-update",
}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
PALLAS_TARGET = "tpu_custom_call"


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal exchanges between chips in one run of the program.

    Attributes:
        kind: "all-reduce", ...
        axes: mesh axes over which chips exchange, joined by "+"; "?" where no set of axes fits.
        group: chips that exchange with each other.
        bytes: the larger of what one chip gives and what it gets, in one exchange.
        count: number of exchanges.
    """

    kind: str
    axes: str
    group: int
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Pallas kernel.

    Attributes:
        name: of the operation, of one of them where there are equal ones.
        count: of its runs in one run of the program.
        operands, results: their shapes.
        config: the operation's backend_config, JSON text that holds the kernel.
    """

    name: str
    count: int
    operands: tuple[hlo.Shape, ...]
    results: tuple[hlo.Shape, ...]
    config: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run of a module costs one device.

    Attributes:
        flops: of matrix products and convolutions, a multiplication and an addition being two.
        traffic: bytes read from and written to the chip's main memory.
        cycles: the TPU compiler's estimate, of all that is not an exchange between chips.
        collectives: exchanges between chips.
        kernels: the Pallas kernels, whose cycles are not in `cycles`.
        unknown_loops: number of operations inside loops of unknown length, counted once each.
    """

    flops: float
    traffic: int
    cycles: int
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    unknown_loops: int


def cost(module: hlo.Module, mesh_shape: Mapping[str, int]) -> Cost:
    """Returns what one run of a module costs one device.

    Args:
        module: a compiled module.
        mesh_shape: mesh axis -> size, in the order of the devices.
    """
    runs = list(hlo.executed(module))
    return Cost(
        flops=sum(run.count * product_flops(module, run) for run in runs),
        traffic=sum(run.count * traffic(module, run) for run in runs),
        cycles=sum(run.count * estimated_cycles(run.instruction) for run in runs),
        collectives=tuple(collectives(module, runs, mesh_shape)),
        kernels=tuple(kernels(runs)),
        unknown_loops=sum(run.in_unknown_loop for run in runs),
    )


def kernels(runs: Iterable[hlo.Executed]) -> list[Kernel]:
    """Returns the Pallas kernels among what a module executes, equal ones together."""
    found: dict[str, Kernel] = {}
    for run in runs:
        instruction = run.instruction
        if instruction.attribute("custom_call_target") != f'"{PALLAS_TARGET}"':
            continue
        config = instruction.attribute("backend_config") or "{}"
        operands = run.computation.operands(instruction)
        kernel = Kernel(
            name=instruction.name,
            count=run.count,
            operands=tuple(shape for operand in operands for shape in operand.shapes),
            results=instruction.shapes,
            config=config,
        )
        before = found.get(config)
        count = run.count + (before.count if before else 0)
        found[config] = dataclasses.replace(before or kernel, count=count)
    return list(found.values())


def estimated_cycles(instruction: hlo.Instruction) -> int:
    """Returns the TPU compiler's estimate for one run, 0 where it makes none."""
    match = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(match[1]) if match else 0


# ---- products --------------------------------------------------------------------------------


def product_flops(module: hlo.Module, run: hlo.Executed) -> float:
    """Returns the operations of the products in one run of an operation, those in fusions too."""
    return sum(
        _flops(computation, instruction)
        for computation, instruction in _within(module, run.computation, run.instruction)
        if instruction.opcode in ("dot", "convolution")
    )


def _within(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> Iterator[tuple[hlo.Computation, hlo.Instruction]]:
    """Yields an instruction, and all that a fusion or a wrapped operation holds."""
    yield computation, instruction
    if instruction.opcode in ("fusion", "custom-call"):
        called = instruction.called
        for name in (*called.get("calls", ()), *called.get("called_computations", ())):
            inner = module.computations[name]
            for held in inner.instructions:
                yield from _within(module, inner, held)


def _flops(computation: hlo.Computation, product: hlo.Instruction) -> float:
    left, right = (operand.shapes[0] for operand in computation.operands(product))
    outputs = math.prod(product.shapes[0].dims)
    if product.opcode == "dot":
        contracted = _numbers(product.attribute("lhs_contracting_dims"))
        return 2.0 * outputs * math.prod(left.dims[axis] for axis in contracted)
    # The TPU compiler writes products as convolutions, and their batch axes as windows in which
    # few places are real: only those are counted.
    inputs, kernel, result = re.split("_|->", product.attribute("dim_labels") or "")
    window = _window(product)
    places = 1
    for axis in (label for label in kernel if label.isdigit()):
        size = int(axis)
        places *= _valid_places(
            left.dims[inputs.index(axis)],
            right.dims[kernel.index(axis)],
            product.shapes[0].dims[result.index(axis)],
            {name: values[size] for name, values in window.items()},
        )
    batch = left.dims[inputs.index("b")] // int(product.attribute("batch_group_count") or 1)
    channels = product.shapes[0].dims[result.index("f")]
    return 2.0 * places * batch * channels * right.dims[kernel.index("i")]


def _window(product: hlo.Instruction) -> dict[str, list[tuple[int, ...]]]:
    """Returns "stride", "pad", ... of each spatial axis."""
    fields = {}
    for field in (product.attribute("window") or "{}").strip("{}").split():
        name, values = field.split("=")
        fields[name] = [_numbers(value) for value in values.split("x")]
    return fields


def _valid_places(
    size: int, kernel: int, outputs: int, window: Mapping[str, tuple[int, ...]]
) -> int:
    """Counts pairs of an output and a kernel place that meet a real input along one axis."""

    def one(name: str, default: int) -> int:
        return window.get(name, (default,))[0]

    stride, spread, dilation = one("stride", 1), one("lhs_dilate", 1), one("rhs_dilate", 1)
    taps = np.arange(kernel)[None, :] * dilation
    places = np.arange(outputs)[:, None] * stride + taps - one("pad", 0)
    valid = (places >= 0) & (places <= (size - 1) * spread) & (places % spread == 0)
    return int(valid.sum())


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text or ""))


# ---- memory traffic --------------------------------------------------------------------------


def traffic(module: hlo.Module, run: hlo.Executed) -> int:
    """Returns the bytes of main memory that one run of an operation reads and writes.

    Slices read, and updates in place write, the slice alone; buffers in on-chip memory are free,
    and so is the end of what began before (`copy-done`).
    """
    instruction, computation = run.instruction, run.computation
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    if opcode in ("copy-start", "slice-start"):
        # (target, source, token) or ((source), target, token): two arrays move.
        (source,) = computation.operands(instruction)
        moved = min(shape.bytes for shape in instruction.shapes[:2])
        target = [shape for shape in instruction.shapes if shape.bytes == moved]
        crossing = source.shapes[0].in_hbm + any(shape.in_hbm for shape in target[:1])
        return moved * crossing
    if opcode == "fusion":
        return _fusion_traffic(module.computations[instruction.called["calls"][0]], run)
    reads = [shape for operand in computation.operands(instruction) for shape in operand.shapes]
    written = _in_hbm(instruction.shapes)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return written + min(_in_hbm(reads[:1]), sum(s.bytes for s in instruction.shapes))
    if opcode == "dynamic-update-slice":
        return _in_hbm(reads[1:2]) + (reads[1].bytes if instruction.shapes[0].in_hbm else 0)
    return written + _in_hbm(reads)


def _fusion_traffic(inner: hlo.Computation, run: hlo.Executed) -> int:
    operands = run.computation.operands(run.instruction)
    users: dict[str, list[hlo.Instruction]] = {}
    for instruction in inner.instructions:
        for name in instruction.operands:
            users.setdefault(name, []).append(instruction)

    def read(value: hlo.Instruction) -> int:
        """Bytes of a parameter (or a view of it) that the fusion looks at."""
        total = 0
        for user in users.get(value.name, ()):
            if user.opcode == "bitcast":
                total += read(user)
            elif user.opcode in ("dynamic-slice", "slice", "gather"):
                total += sum(shape.bytes for shape in user.shapes)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
                continue
            else:
                return value.shapes[0].bytes
        return min(total, value.shapes[0].bytes)

    total = 0
    for parameter in inner.instructions:
        if parameter.opcode == "parameter":
            operand = operands[int(parameter.arguments)]
            total += read(parameter) if operand.shapes[0].in_hbm else 0
    results = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
    for result, shape in zip(results, run.instruction.shapes, strict=False):
        total += _written(inner, result) if shape.in_hbm else 0
    return total


def _written(inner: hlo.Computation, result: hlo.Instruction) -> int:
    while result.opcode == "bitcast":
        (result,) = inner.operands(result)
    if result.opcode == "dynamic-update-slice":
        return inner.operands(result)[1].shapes[0].bytes
    return sum(shape.bytes for shape in result.shapes)


def _in_hbm(shapes: Iterable[hlo.Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.in_hbm)


# ---- collectives -----------------------------------------------------------------------------


def collectives(
    module: hlo.Module, runs: Iterable[hlo.Executed], mesh_shape: Mapping[str, int]
) -> list[Collective]:
    """Returns the exchanges between chips, equal ones together, those that move most first."""
    found: dict[tuple[str, str, int, int], int] = {}
    seen: set[tuple[str, str]] = set()
    for run in runs:
        for computation, instruction in _within(module, run.computation, run.instruction):
            kind = instruction.opcode.removesuffix("-start")
            if kind not in _COLLECTIVES:
                continue
            # An exchange that overlaps with products is spread over several fusions, each with a
            # copy of it; they share its channel.
            channel = instruction.attribute("channel_id") or instruction.name
            if computation is not run.computation and (run.computation.name, channel) in seen:
                continue
            seen.add((run.computation.name, channel))
            axes, group = mesh_axes(instruction, mesh_shape)
            given = sum(
                s.bytes for operand in computation.operands(instruction) for s in operand.shapes
            )
            got = sum(shape.bytes for shape in instruction.shapes)
            if instruction.opcode.endswith("-start"):
                got -= given  # its result repeats what it takes
            key = (kind, axes, group, max(given, got))
            found[key] = found.get(key, 0) + run.count
    exchanges = [Collective(*key, count=count) for key, count in found.items()]
    return sorted(exchanges, key=lambda c: -c.bytes * c.count)


def mesh_axes(instruction: hlo.Instruction, mesh_shape: Mapping[str, int]) -> tuple[str, int]:
    """Returns the mesh axes along which a collective exchanges ("data+fsdp"), and the group's size.

    Args:
        instruction: a collective.
        mesh_shape: mesh axis -> size, in the order of the devices.
    """
    ids = np.arange(math.prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    if pairs := instruction.attribute("source_target_pairs"):
        flat = _numbers(pairs)
        moved = set()
        for source, target in zip(flat[::2], flat[1::2], strict=True):
            places = (np.argwhere(ids == number)[0] for number in (source, target))
            moved |= {axis for axis, (a, b) in enumerate(zip(*places, strict=True)) if a != b}
        names = [name for axis, name in enumerate(mesh_shape) if axis in moved]
        return "+".join(names) or "?", math.prod(mesh_shape[name] for name in names)
    groups = _groups(instruction.attribute("replica_groups") or "{}", ids.size)
    for number in range(1, len(mesh_shape) + 1):
        for axes in itertools.combinations(mesh_shape, number):
            size = math.prod(mesh_shape[name] for name in axes)
            last = [list(mesh_shape).index(name) for name in axes]
            rest = [axis for axis in range(ids.ndim) if axis not in last]
            expected = ids.transpose(*rest, *last).reshape(-1, size)
            if size > 1 and groups == {frozenset(row) for row in expected.tolist()}:
                names = [name for name in axes if mesh_shape[name] > 1]
                return "+".join(names), size
    return "?", max(map(len, groups))


def _groups(text: str, devices: int) -> set[frozenset[int]]:
    """Parses replica groups: listed, as a reshaped range, or as axes of a mesh of the compiler's.

    `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`, and
    `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}`.
    """
    if text.startswith("mesh["):
        described, chosen = text[4:].rsplit("{", 1)
        axes = re.findall(r"'([^']+)'=(\d+)", described)
        order = re.search(r"device_ids=\((.*?\]\S*)\)", described)
        ids = _reshaped(order[1], devices) if order else np.arange(devices)
        ids = ids.reshape([int(size) for _, size in axes])
        names = [name for name, _ in axes]
        last = [names.index(name) for name in re.findall(r"'([^']+)'", chosen)]
        rest = [axis for axis in range(len(names)) if axis not in last]
        size = math.prod(ids.shape[axis] for axis in last)
        rows = ids.transpose(*rest, *last).reshape(-1, size).tolist()
    elif "<=" in text:
        shape, source = text.split("<=")
        rows = _reshaped(source, devices).reshape(_numbers(shape)).tolist()
    else:
        rows = [list(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", text)]
    return {frozenset(row) for row in rows} or {frozenset(range(devices))}


def _reshaped(text: str, devices: int) -> np.ndarray:
    """Returns the numbers below `devices` in the order of `[4,4]T(1,0)`, flat."""
    shape, *turned = re.findall(r"[\[(]([\d,]+)[\])]", text)
    ids = np.arange(devices).reshape(_numbers(shape))
    return (ids.transpose(_numbers(turned[0])) if turned else ids).reshape(-1)
