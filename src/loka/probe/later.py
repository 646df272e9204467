"""Live trials that wait for a plain step.

What a trial multiplies is taken in the observed step, before the optimizer changes the weight. To multiply
and compare takes the host about as long as a whole step (a hundred small launches a site), and meanwhile the
GPU would have nothing to do. In a plain compiled step the host is idle for most of the time, so there a pass
of a site is tried at a time: what it costs is the GPU's part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loka.probe.error_log import ErrorLog
from loka.probe.live import Captured, LiveOperands, errors_of_operands, live_operands
from loka.probe.trial import Trial
from loka.vocab import Pass

__all__ = ["QUEUE_BYTES", "LaterTrials"]

QUEUE_BYTES = 2**30  # of operands that wait, beside those of one site


@dataclass(frozen=True, slots=True)
class _Piece:
    """The trials of one pass of one site."""

    site: str
    trials: list[Trial]
    operands: LiveOperands

    @property
    def nbytes(self) -> int:
        """What its operands hold; a weight that two passes share counts twice."""
        return sum(side.values.nbytes for pair in self.operands.values() for side in pair)


class LaterTrials:
    """A queue of trials, each with operands of its own.

    Args:
        log: Where their numbers go.
        where: The device of the model.
    """

    def __init__(self, log: ErrorLog, where: torch.device) -> None:
        self._log, self._where = log, where
        self._queue: deque[_Piece] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, site: str, trials: Sequence[Trial], captured: Captured, generator: torch.Generator) -> None:
        """Take the operands now; where the queue holds too much, the oldest are tried at once."""
        operands = live_operands(captured, {trial.pass_ for trial in trials}, generator, own=True)
        for pass_ in Pass:
            if pass_ in operands:
                of_pass = [trial for trial in trials if trial.pass_ is pass_]
                self._queue.append(_Piece(site, of_pass, {pass_: operands[pass_]}))
                self._nbytes += self._queue[-1].nbytes
        while len(self._queue) > 1 and self._nbytes > QUEUE_BYTES:
            self.run(1)

    def clear(self) -> None:
        """Forget what waits."""
        self._queue.clear()
        self._nbytes = 0

    def run(self, most: int | None = None) -> bool:
        """Try the oldest `most` pieces; None for all.

        Returns:
            Whether there were any.
        """
        count = len(self._queue) if most is None else min(most, len(self._queue))
        for _ in range(count):
            piece = self._queue.popleft()
            self._nbytes -= piece.nbytes
            values = errors_of_operands(piece.operands, piece.trials, where=self._where)
            self._log.add(piece.site, piece.trials, values)
        return count > 0
