"""Contestants that work in turns, each in a process of its own.

A machine whose speed drifts slows all of them alike, and none meets the threads, the memory or the
settings of another.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def serve(run: Callable[[], Any]) -> None:
    """Runs once for each line on standard input; answers with the result and what it took."""
    for _ in sys.stdin:
        begin, cpu = time.perf_counter(), time.process_time()
        result = run()
        answer = {
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": time.process_time() - cpu,
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "result": result,
        }
        print(json.dumps(answer), flush=True)


class Contestant:
    """A process that serves.

    Attributes:
        name: what it is called in tables.
        first: the answer of its first run, which compiles.
        answers: of the counted runs.
    """

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        from ddrp_jax.cli import HUGE_PAGES  # not for peers, whose interpreter may lack it

        # As `ddrp` sets for itself, unless told otherwise; peers get it too.
        variables = {"GLIBC_TUNABLES": HUGE_PAGES} | os.environ
        self.process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self.run()
        self.answers: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Has it run once; returns the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: its process ended with status {self.process.wait()}")
        return json.loads(line)

    def median(self, figure: str) -> float:
        """Returns the median of a figure over the counted runs."""
        return statistics.median(answer[figure] for answer in self.answers)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def steps_of(training: Any, rows: Any) -> Callable[[], float]:
    """Returns a function that makes one of our training steps on the same rows, again and again."""
    import jax

    rows = jax.device_put(rows, training.batch_sharding)
    state = training.init(0)

    def step() -> float:
        nonlocal state
        state, metrics = training.train_step(state, rows)
        return float(metrics["loss"])

    return step


def show(rows: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Prints a line for each row, and writes them as JSON where a file is named."""
    for row in rows:
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if file:
        file.write_text(json.dumps(rows, indent=2) + "\n")


def take_turns(contestants: Sequence[Contestant], runs: int, *, warm_up: int = 0) -> None:
    """Has every contestant run, one after the other, again and again; then ends them.

    In its turn each runs twice and the second run counts: the first finds caches and free memory
    as another one left them (seen: up to a fifth slower after a peer that keeps its memory).
    """
    for turn in range(warm_up + runs):
        for each in contestants:
            each.run()
            answer = each.run()
            if turn >= warm_up:
                each.answers.append(answer)
    for each in contestants:
        each.close()
