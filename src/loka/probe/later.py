"""Work on what an observed step saw that waits for a plain step.

What a trial multiplies and what a distribution is of is taken in the observed step, before the optimizer
changes the weight and the model writes over its activations. To multiply and compare, or to fit, takes the
host about as long as a whole step (some hundred small launches a site), and meanwhile the GPU would have
nothing to do. In a plain compiled step the host is idle for most of the time, so there a piece is done at a
time: what it costs is the GPU's part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from loka.numerics import OperandStatistics
from loka.probe.error_log import ErrorLog
from loka.probe.live import Captured, LiveOperands, errors_of_operands, live_operands
from loka.probe.seen import Sampled
from loka.probe.trial import Trial
from loka.vocab import Pass

__all__ = ["QUEUE_BYTES", "LaterWork"]

QUEUE_BYTES = 2**30  # of operands and samples that wait, beside those of one site


class _Piece(Protocol):
    """What is done in one go."""

    @property
    def nbytes(self) -> int:
        """What it holds; a tensor that two pieces share counts twice."""

    def run(self) -> None:
        """Do it."""


@dataclass(frozen=True, slots=True)
class _Trials:
    """The trials of one pass of one site."""

    site: str
    trials: list[Trial]
    operands: LiveOperands
    log: ErrorLog
    where: torch.device

    @property
    def nbytes(self) -> int:
        return sum(side.values.nbytes for pair in self.operands.values() for side in pair)

    def run(self) -> None:
        values = errors_of_operands(self.operands, self.trials, where=self.where)
        self.log.add(self.site, self.trials, values)


@dataclass(frozen=True, slots=True)
class _Distributions:
    """Those of one sample of rows, for one operand; several sites share a sample of one tensor."""

    known: OperandStatistics
    sample: Sampled

    @property
    def nbytes(self) -> int:
        return self.sample.values.nbytes

    def run(self) -> None:
        values = self.sample.values
        if values.is_cuda:  # the model may have run on a stream of its own
            values.record_stream(torch.cuda.current_stream(values.device))
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            self.known.take_distributions(*self.sample.distributions())


class LaterWork:
    """A queue of trials and distributions, each with tensors of its own.

    Args:
        log: Where the numbers of trials go.
        where: The device of the model.
    """

    def __init__(self, log: ErrorLog, where: torch.device) -> None:
        self._log, self._where = log, where
        self._queue: deque[_Piece] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add_trials(
        self, site: str, trials: Sequence[Trial], captured: Captured, generator: torch.Generator
    ) -> None:
        """Take the operands now; where the queue holds too much, the oldest pieces are done at once."""
        operands = live_operands(captured, {trial.pass_ for trial in trials}, generator, own=True)
        for pass_ in Pass:
            if pass_ in operands:
                of_pass = [trial for trial in trials if trial.pass_ is pass_]
                self._wait(_Trials(site, of_pass, {pass_: operands[pass_]}, self._log, self._where))
        self._shrink()

    def add_distributions(self, known: OperandStatistics, sample: Sampled) -> None:
        """Add those of the sampled rows to what is known of an operand, later."""
        self._wait(_Distributions(known, sample))
        self._shrink()

    def _wait(self, piece: _Piece) -> None:
        self._queue.append(piece)
        self._nbytes += piece.nbytes

    def _shrink(self) -> None:
        while len(self._queue) > 1 and self._nbytes > QUEUE_BYTES:
            self.run(1)

    def clear(self) -> None:
        """Forget what waits."""
        self._queue.clear()
        self._nbytes = 0

    def run(self, most: int | None = None) -> bool:
        """Do the oldest `most` pieces; None for all.

        Returns:
            Whether there were any.
        """
        count = len(self._queue) if most is None else min(most, len(self._queue))
        for _ in range(count):
            piece = self._queue.popleft()
            self._nbytes -= piece.nbytes
            piece.run()
        return count > 0
