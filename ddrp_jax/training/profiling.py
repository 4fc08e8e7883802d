"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax

from ddrp_jax.errors import UsageError

FOLDER = "profile"


def parse_steps(text: str) -> tuple[int, int]:
    """Parses `steps=A:B`: the first and the last step to trace.

    Raises:
        UsageError: anything else, or B before A.
    """
    match = re.fullmatch(r"steps=(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--profile={text!r}: expected steps=A:B, the first and the last step to trace, such "
            "as steps=10:12; steps count from 1"
        )
    return int(match[1]), int(match[2])


def check_steps(steps: tuple[int, int] | None, done: int, total: int) -> None:
    """Raises UsageError where a run never takes these steps, or has taken them.

    Args:
        steps: first and last step to trace, or None.
        done: steps that the run has taken already.
        total: its last step.
    """
    if steps is not None and not done < steps[0] <= steps[1] <= total:
        raise UsageError(
            f"--profile=steps={steps[0]}:{steps[1]}: this run goes from step {done + 1} to "
            f"{total}; name steps among these"
        )


class Trace:
    """Traces the steps from A to B of a run into `WORKDIR/profile`.

    Args:
        steps: A and B, or None for no trace.
        workdir: the run's folder.
    """

    def __init__(self, steps: tuple[int, int] | None, workdir: Path):
        self.folder = workdir / FOLDER
        self._steps = steps
        self._is_open = False

    def before(self, step: int) -> None:
        """Begins where `step` is the first to trace."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(str(self.folder))
            self._is_open = True

    def after(self, step: int, results: Any) -> bool:
        """Ends where `step` was the last to trace, once its results are there.

        Returns:
            Whether the trace has just been written.
        """
        if not self._is_open or self._steps is None or step < self._steps[1]:
            return False
        jax.block_until_ready(results)
        self.close()
        return True

    def close(self) -> None:
        """Writes what there is of the trace."""
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()
