"""Stopping at a signal: the loop asks once a step, saves, and ends with a message.

SIGTERM comes from a machine that is taken away, SIGINT from Ctrl-C. The first one asks for a stop;
a second one ends the process at once, as does a kill. Of several processes any one may get it, and
all stop after the same step.
"""

from __future__ import annotations

import signal
import types
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax

from ddrp_jax.training import distributed

Item = TypeVar("Item")


class Stopped(Exception):
    """A signal came in the middle of work that can be done again."""


class StopSignal:
    """Notices SIGTERM and SIGINT while it is open (a context manager; main thread only).

    Attributes:
        received: the signal that all processes know to have come to one of them, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._noticed: signal.Signals | None = None
        self._maximum = distributed.Maximum() if jax.process_count() > 1 else None
        self._asked: jax.Array | None = None
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

        All processes of a run call it at the same moments and get the same answer. The answer is
        that of one call before: it lies ready by then, so asking costs the step no time.
        """
        if self._maximum is None:
            self.received = self._noticed
            return self.received is not None
        asked, self._asked = self._asked, self._maximum(self._noticed or 0)
        if asked is not None and self.received is None and (number := int(asked)):
            self.received = signal.Signals(number)
        return self.received is not None

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Returns the items one after the other, and asks before each.

        Raises:
            Stopped: the run must end.
        """
        for item in items:
            if self.should_stop():
                raise Stopped
            yield item

    @property
    def exit_status(self) -> int:
        """The status of a process that this signal ended: 128 + its number.

        Not 0, so that a script that waits for the end of training does not take it for one.
        """
        return 128 + self.received if self.received is not None else 0

    def _receive(self, number: int, _frame: types.FrameType | None) -> None:
        if self._noticed is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._noticed = signal.Signals(number)
