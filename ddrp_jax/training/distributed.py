"""Several processes of one run: how they find each other, agree, and end together.

Every process runs the same program on its own devices. Process 0 alone writes what there is one
of; what one process finds out and all must act on is broadcast. All functions here are for the
main thread, called by every process in the same order; with one process they cost nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orjson
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.training.hardware import has_tpu

Result = TypeVar("Result")

AUTO = "auto"
# A process that has not been heard of for so long is taken for dead, and the others end.
HEARTBEAT_SECONDS = 100
# How long a process that failed waits for the others to fail alike before it leaves.
_LEAVE_SECONDS = 5.0
# How far apart processes may finish compiling.
_BARRIER_SECONDS = 1800
_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Which processes make up a run, by flags or environment.

    Attributes:
        coordinator: `HOST:PORT` of process 0; "auto" asks the cluster's manager (Slurm, Open MPI,
            Kubernetes); "" is one process alone, or on TPUs all of the slice's.
        processes: how many.
        process: which of them this is, from 0.
        heartbeat_seconds: after which a silent process is taken for dead.
    """

    coordinator: str = ""
    processes: int | None = None
    process: int | None = None
    heartbeat_seconds: int = HEARTBEAT_SECONDS

    def check(self) -> None:
        """Raises UsageError where something is missing or out of range."""
        given = {
            "--coordinator": self.coordinator or None,
            "--processes": self.processes,
            "--process": self.process,
        }
        missing = [flag for flag, value in given.items() if value is None]
        if (self.coordinator == AUTO and len(missing) == 2) or len(missing) == 3:
            return
        if missing or self.coordinator == AUTO:
            raise UsageError(
                f"{', '.join(missing) or '--processes, --process'}: --coordinator HOST:PORT, "
                "--processes N and --process I go together (or --coordinator auto alone, under "
                "Slurm, Open MPI or Kubernetes; on TPUs none of them)"
            )
        assert self.processes is not None
        assert self.process is not None
        if not self.coordinator.rpartition(":")[2].isdecimal() or ":" not in self.coordinator:
            raise UsageError(
                f"--coordinator={self.coordinator!r}: expected HOST:PORT, for example 10.0.0.1:8476"
            )
        if self.processes < 1 or not 0 <= self.process < self.processes:
            raise UsageError(
                f"--processes={self.processes}, --process={self.process}: processes are numbered "
                "from 0 up to the number of processes - 1"
            )


def initialize(hosts: Hosts) -> None:
    """Joins this process to the others; comes before anything that touches a device.

    Raises:
        UsageError: the description is incomplete.
        DdrpError: the others could not be reached.
    """
    hosts.check()
    alone = not hosts.coordinator and not _uses_tpu()
    if alone or hosts.processes == 1:
        return
    # Stops are agreed on by `preemption.StopSignal`; the service would take SIGTERM from it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if hosts.processes is not None:
            jax.distributed.initialize(
                hosts.coordinator,
                hosts.processes,
                hosts.process,
                cluster_detection_method="deactivate",
                heartbeat_timeout_seconds=hosts.heartbeat_seconds,
            )
        else:
            jax.distributed.initialize(heartbeat_timeout_seconds=hosts.heartbeat_seconds)
    except (ValueError, RuntimeError) as error:
        if not hosts.coordinator:
            return  # a TPU that belongs to no cluster, all of it this process's
        raise DdrpError(
            f"process {hosts.process} of {hosts.processes} could not join at "
            f"--coordinator={hosts.coordinator}: {_first_line(error)}; start all processes within "
            "minutes of each other, with a coordinator address that all can reach"
        ) from error


def is_joined() -> bool:
    """Returns whether this process is one of several."""
    return jax.distributed.is_initialized()


def is_main() -> bool:
    """Returns whether this process writes what there is one of."""
    return jax.process_index() == 0


def mixes_up_loops() -> bool:
    """Returns whether a compiled loop may hold no collective.

    Between CPU processes a collective inside a loop and one outside of it can start in another
    order in each process, and gloo then adds up the wrong numbers without an error (seen in 2 % of
    the first steps of a tiny model). Loops are unrolled there; what is computed is the same.
    """
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def on_main(function: Callable[[], Result]) -> Result:
    """Calls a function in process 0 alone; all return its result, or raise its error.

    Args:
        function: returns JSON data.

    Raises:
        DdrpError: as the function did, of the same kind.
    """
    if jax.process_count() == 1:
        return function()
    error: DdrpError | None = None
    answer: dict[str, Any] = {}
    if is_main():
        try:
            answer = {"result": function()}
        except DdrpError as raised:
            error = raised
            answer = {"error": str(raised), "is_usage": isinstance(raised, UsageError)}
    answer = _broadcast(answer)
    if error is not None:
        raise error
    if "error" in answer:
        raise (UsageError if answer["is_usage"] else DdrpError)(answer["error"])
    return answer["result"]


def check_same(data: Any) -> None:
    """Raises UsageError where processes were not given the same JSON data, the config."""
    if len(set(gather(zlib.crc32(orjson.dumps(data)) & 0x7FFFFFFF))) > 1:
        raise UsageError(
            "the processes of this run were started with different configs; start all of them "
            "with the same command but for --process"
        )


def check_shared(folder: Path) -> None:
    """Raises UsageError where a run's folder is not the same one for all processes."""
    if jax.process_count() == 1:
        return
    name = _broadcast(f".shared-{secrets.token_hex(4)}")
    path = folder / name
    if is_main():
        path.write_bytes(b"")
    barrier(name)
    sees = gather(path.exists())
    if is_main():
        path.unlink()
    blind = [str(process) for process, found in enumerate(sees) if not found]
    if blind:
        raise UsageError(
            f"--workdir={folder}: process {', '.join(blind)} does not see what process 0 writes "
            "there; name a folder that all share (gs://, NFS)"
        )


def barrier(name: str) -> None:
    """Waits until every process is here, and longer than a collective would.

    Between CPUs a collective gives up after 30 seconds, and compilations end further apart than
    that where only some processes find theirs in the cache.

    Args:
        name: of this wait alone.
    """
    from orbax.checkpoint import multihost

    multihost.get_barrier_sync_fn()(key=name, timeout_ms=1000 * _BARRIER_SECONDS)


def gather(value: Any) -> list[Any]:
    """Returns the value, a number, of every process."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(np.asarray(value)).tolist()


def gather_rows(rows: np.ndarray) -> list[int]:
    """Returns the numbers of the rows of all processes."""
    if jax.process_count() == 1:
        return rows.tolist()
    from jax.experimental import multihost_utils

    every = multihost_utils.process_allgather(rows)
    return list(dict.fromkeys(every.reshape(-1).tolist()))


class Maximum:
    """The largest of the numbers that processes hold, found without waiting for it."""

    def __init__(self) -> None:
        mesh = Mesh(np.array(jax.devices()), ("all",))
        self._where = NamedSharding(mesh, PartitionSpec("all"))
        whole = NamedSharding(mesh, PartitionSpec())
        self._function = jax.jit(jnp.max, in_shardings=self._where, out_shardings=whole)

    def __call__(self, value: int) -> jax.Array:
        """Returns the scalar as it will be on the device."""
        local = np.full(jax.local_device_count(), value, np.int32)
        return self._function(jax.make_array_from_process_local_data(self._where, local))


def leave(status: int) -> None:
    """Ends a process that failed, so that the others do not wait for it.

    Where all fail alike they leave together; a process that failed alone waits a few seconds and
    goes. Does nothing in a run of one process.
    """
    if not is_joined():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    shutdown = threading.Thread(target=_shutdown_quietly, daemon=True)
    shutdown.start()
    shutdown.join(_LEAVE_SECONDS)
    # Not an ordinary exit, which would wait minutes for processes that are gone.
    os._exit(status)


def explain(error: BaseException) -> DdrpError | None:
    """Returns a failed collective as the loss of a process that it is, or None for other errors."""
    if jax.process_count() == 1 or not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    return DdrpError(
        f"process {jax.process_index()} of {jax.process_count()} lost contact with another one, "
        f"which ended or cannot be reached ({_first_line(error)}); the same command in all "
        "processes goes on from the newest checkpoint"
    )


def _broadcast(data: Any) -> Any:
    """Returns process 0's JSON data."""
    from jax.experimental import multihost_utils

    encoded = orjson.dumps(data)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(encoded))))
    # Whole chunks, so that messages of any length share one compilation.
    chunks = np.zeros((-(-size // _CHUNK), _CHUNK), np.uint8)
    if is_main():
        chunks.reshape(-1)[:size] = np.frombuffer(encoded, np.uint8)
    received = [multihost_utils.broadcast_one_to_all(chunk) for chunk in chunks]
    return orjson.loads(np.concatenate(received).tobytes()[:size])


def _shutdown_quietly() -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # where the others are gone
        jax.distributed.shutdown()


def _uses_tpu() -> bool:
    wanted = os.environ.get("JAX_PLATFORMS", "tpu").split(",")
    return "tpu" in wanted and has_tpu()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
