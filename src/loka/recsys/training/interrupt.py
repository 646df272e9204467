"""Stopping a run between two steps."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from loka.errors import LokaError

__all__ = ["InterruptedRunError", "StopRequest"]

logger = logging.getLogger("loka")


class InterruptedRunError(LokaError, RuntimeError):
    """A run that a signal stopped after a whole step; `exit_code` is 128 + the signal's number."""

    def __init__(self, what: str, *, signal_number: int, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.exit_code = 128 + signal_number


class StopRequest:
    """Within the block, the first Ctrl-C or SIGTERM only sets `signal_number`; a second acts at once.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()  # so that a second signal is not held up
        logger.warning("stopping after this step; once more stops at once, without a checkpoint")

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}
