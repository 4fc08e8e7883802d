"""Cycles of Pallas kernels, of which the TPU compiler's estimates say nothing (ours).

The compiler schedules a kernel statically, and one bundle of instructions is one cycle. It writes
schedules down where flags say so that it reads once in a process, and then those of every
operation: a kernel is compiled alone, in a process of its own. The schedule holds no waiting for
memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ddrp_jax.planning import costs, hlo

# What of an operation's backend_config is the kernel; the rest is what the compiler found out.
_GIVEN = ("custom_call_config", "flag_configs", "scoped_memory_configs")
# A line of the schedule: "0x1c LB: >> { %12 = ...", inside as many loops as there are ">".
_BUNDLE = re.compile(r"^ *(?:0|0x[0-9a-f]+) +([A-Z ]*): *(>*) *\{(.)", re.MULTILINE)
_END = re.compile(r"exit bundle: %\S+ = custom-call\b")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static schedule of a kernel.

    Attributes:
        bundles: of one program; those of a loop times its trips, where these are known.
        programs: of the kernel's grid.
        unknown_loops: number of loops whose bundles count once.
    """

    bundles: int
    programs: int
    unknown_loops: int

    @property
    def cycles(self) -> int:
        """Of one run of the kernel."""
        return self.bundles * self.programs


def schedule(kernel: costs.Kernel, topology: str) -> Schedule | None:
    """Compiles a kernel alone, its operands in the chip's main memory.

    Args:
        kernel: of a compiled module.
        topology: a slice of chips of the right generation, "v5e:1x1".

    Returns:
        Its schedule, None where the compiler did not write one.
    """
    described = {
        "topology": topology,
        "operands": [(shape.dtype, shape.dims) for shape in kernel.operands],
        "results": [(shape.dtype, shape.dims) for shape in kernel.results],
        "config": kernel.config,
    }
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            *os.environ.get("LIBTPU_INIT_ARGS", "").split(),
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
            f"--xla_mosaic_dump_to={folder}",
        )
        compiled = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(described),
            env=os.environ | {"LIBTPU_INIT_ARGS": " ".join(flags)},
            capture_output=True,
            text=True,
        )
        return _read(Path(folder)) if compiled.returncode == 0 else None


def _read(folder: Path) -> Schedule | None:
    # Others are of the program around the kernel ("TLP"), of copies, and of no operation at all.
    files = (file for file in folder.glob("*[0-9]-final_bundles.txt") if "-TLP-" not in file.name)
    texts = [text for text in map(Path.read_text, files) if _END.search(text)]
    sources = list(folder.glob("*-post-canonicalize-mosaic-simplify.txt"))
    if len(texts) != 1 or not sources:
        return None
    bundles, source = texts[0], sources[0].read_text()
    # A kernel without a grid is one program.
    grid = re.search(r"iteration_bounds = array<i64(?:: ([-\d, ]+))?>", source)
    sizes = [int(size) for size in (grid[1] or "").split(",") if size] if grid else []
    if any(size < 1 for size in sizes):  # a grid that data decide
        return None
    programs = math.prod(sizes)
    trips = _trips(source)
    if programs > 1:  # a loop too, around the others
        trips = [1, *trips]
    begun = sum("LB" in labels for labels, _, _ in _BUNDLE.findall(bundles))
    if begun != len(trips):  # the compiler unrolled some, or added its own
        trips = [None] * begun
    return Schedule(_weigh(bundles, [trip or 1 for trip in trips]), programs, trips.count(None))


def _trips(source: str) -> list[int | None]:
    """Returns how often each loop of a kernel runs, None where it is not a constant."""
    constants = {
        name: int(value)
        for name, value in re.findall(r"%(\w+) = arith\.constant (-?\d+) : \w+", source)
    }
    found: list[int | None] = []
    for loop in re.finditer(r"\bscf\.(?:while|for %\w+ = %(\w+) to %(\w+) step %(\w+))", source):
        bounds = [constants[name] for name in loop.groups() if name in constants]
        found.append(len(range(*bounds)) if len(bounds) == 3 else None)
    return found


def _weigh(bundles: str, trips: list[int]) -> int:
    """Returns the number of bundles, each as often as the loops around it run."""
    beginnings = iter(trips)
    around: list[int] = []
    total = 0
    for labels, nesting, content in _BUNDLE.findall(bundles):
        if "LB" in labels:
            around[len(nesting) - 1 :] = [next(beginnings)]
        elif content != "}":  # an empty bundle shows no nesting, and stays where it is
            del around[len(nesting) :]
        total += math.prod(around)
    return total


def _compile(described: dict) -> None:
    from ddrp_jax.planning import aot

    aot.prepare_environment()
    import jax

    place = jax.sharding.SingleDeviceSharding(aot.devices_of(described["topology"])[0])

    def abstract(array: list) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array[1], hlo.numpy_name(array[0]), sharding=place)

    operands, results = (
        [abstract(array) for array in described[name]] for name in ("operands", "results")
    )
    config = json.loads(described["config"])
    call = jax.ffi.ffi_call(
        costs.PALLAS_TARGET,
        results,
        custom_call_api_version=1,
        legacy_backend_config=json.dumps({k: v for k, v in config.items() if k in _GIVEN}),
    )
    jax.jit(call).lower(*operands).compile()


if __name__ == "__main__":
    _compile(json.load(sys.stdin))
