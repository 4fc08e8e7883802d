"""Flags of commands that train, perhaps as several processes, and how such a process ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from ddrp_jax.errors import DdrpError, UsageError
from ddrp_jax.paths import as_path


def add_run_arguments(parser: argparse.ArgumentParser, config_help: str) -> None:
    """Adds what every run takes: its config, its folder, a trace, and which processes it is of.

    Args:
        parser: of the command.
        config_help: what kind of file `--config` names.
    """
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE[:arg]",
        help=f"{config_help}; --config.path.to.field=value overrides a field",
    )
    parser.add_argument(
        "--workdir",
        required=True,
        type=as_path,
        metavar="DIR",
        help="the run's folder; where it holds checkpoints, training goes on from the newest good "
        "one",
    )
    parser.add_argument(
        "--profile",
        type=_profile,
        metavar="steps=A:B",
        help="write a trace of these steps to WORKDIR/profile, for TensorBoard's profiler or "
        "Perfetto (compilations are kept in ~/.cache/ddrp_jax on accelerators; "
        "JAX_COMPILATION_CACHE_DIR in the environment names another folder, on CPUs too)",
    )
    group = parser.add_argument_group(
        "several processes",
        "on TPUs all processes of a slice find each other, so none of these is needed; elsewhere "
        "start the command once for each process (each flag may come from the environment: "
        "DDRP_COORDINATOR, DDRP_PROCESSES, DDRP_PROCESS, DDRP_HEARTBEAT_SECONDS)",
    )
    group.add_argument(
        "--coordinator",
        default=os.environ.get("DDRP_COORDINATOR", ""),
        metavar="HOST:PORT",
        help="where process 0 listens; 'auto' asks Slurm, Open MPI or Kubernetes",
    )
    for flag, metavar, text in (
        ("processes", "N", "how many processes there are"),
        ("process", "I", "which of them this is, from 0"),
    ):
        group.add_argument(
            f"--{flag}",
            type=int,
            default=_number(f"DDRP_{flag.upper()}"),
            metavar=metavar,
            help=text,
        )
    group.add_argument(
        "--heartbeat-seconds",
        type=int,
        default=_number("DDRP_HEARTBEAT_SECONDS") or 100,
        metavar="S",
        help="a process that is silent for so long is taken for dead, and the others end "
        "(default: 100)",
    )


@contextlib.contextmanager
def joined(args: argparse.Namespace, prog: str) -> Iterator[None]:
    """Joins the other processes, and sees to it that none waits for one that failed.

    Raises:
        UsageError: the flags are incomplete.
        DdrpError: the other processes cannot be reached.
    """
    from ddrp_jax.training import distributed

    distributed.initialize(
        distributed.Hosts(args.coordinator, args.processes, args.process, args.heartbeat_seconds)
    )
    try:
        yield
    except Exception as error:
        # A process that exits in the ordinary way would first wait for the others.
        if not distributed.is_joined():
            raise
        known = error if isinstance(error, DdrpError) else distributed.explain(error)
        if known is None:
            traceback.print_exc()
        else:
            print(f"{prog}: error: {known}", file=sys.stderr)
        distributed.leave(2 if isinstance(known, UsageError) else 1)


def _profile(text: str) -> tuple[int, int]:
    from ddrp_jax.training.profiling import parse_steps

    return parse_steps(text)


def _number(variable: str) -> int | None:
    value = os.environ.get(variable)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{variable}={value!r} in the environment: expected a number") from None
