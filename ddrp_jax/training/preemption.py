"""Stopping at a signal: the loop asks once a step, saves, and ends with a message.

SIGTERM comes from a machine that is taken away, SIGINT from Ctrl-C. The first one asks for a stop;
a second one ends the process at once, as does a kill.
"""

from __future__ import annotations

import signal
import types
from typing import Any


class StopSignal:
    """Notices SIGTERM and SIGINT while it is open (a context manager; main thread only).

    Attributes:
        received: the signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def should_stop(self) -> bool:
        """Returns whether the run must save and end after the current step.

        Every process of a run on several hosts has to give the same answer at the same step; this
        is the one place that decides it.
        """
        return self.received is not None

    @property
    def exit_status(self) -> int:
        """The status of a process that this signal ended: 128 + its number.

        Not 0, so that a script that waits for the end of training does not take it for one.
        """
        return 128 + self.received if self.received is not None else 0

    def _receive(self, number: int, _frame: types.FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = signal.Signals(number)
