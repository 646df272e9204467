"""Which steps are observed, which of them in full, and how seldom for their cost to stay within a limit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from loka.errors import UsageError
from loka.probe.overhead import StepClock, StepKind, rounded_up
from loka.probe.ranks import Ranks

__all__ = ["Schedule", "check_count"]

_log = logging.getLogger("loka.probe")
_DECIDES_FROM = 3  # due steps, on every rank alike, whatever each could observe in them


def check_count(name: str, value: object) -> None:
    """Raise UsageError unless an option of Probe is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"Probe({name}={value!r}) must be a whole number")
    if value < 1:
        raise UsageError(f"Probe({name}={value}) must be at least 1")


def _in_words(percent: float) -> str:
    return f"{percent:,.0f}" if percent >= 100 else f"{percent:.2g}"


class Schedule:
    """Counts steps and decides about the next one.

    Attributes:
        every: Steps from one observed step to the next; raised where observing costs more than the limit.
        live_every: Each site is looked at in full at the first observed step and then at each such one.
        seen: Steps that are over.
        observed: Those of them that were observed.
        resumed_at: `seen` when a saved state was taken up.
        clock: Times of steps.
        note: What was decided, for the profile; empty where nothing was.

    Args:
        every: To begin with.
        live_every: As above.
        max_overhead: Largest share of the training that observing may cost; None for no limit.
        where: The device of the model.
        ranks: Decide together.

    Raises:
        UsageError: for a number out of range.
    """

    def __init__(
        self, *, every: int, live_every: int, max_overhead: float | None, where: torch.device, ranks: Ranks
    ) -> None:
        for name, value in (("every", every), ("live_every", live_every)):
            check_count(name, value)
        number = isinstance(max_overhead, int | float) and not isinstance(max_overhead, bool)
        if max_overhead is not None and not (number and 0 < max_overhead < 1):
            raise UsageError(
                f"Probe(max_overhead={max_overhead!r}) must lie in (0, 1)",
                hint="it is a share of the training, 0.01 for 1 %; None switches the limit off",
            )
        self.every, self.live_every = every, live_every
        self.seen = self.observed = self.resumed_at = 0
        self.clock = StepClock(where)
        self.note = ""
        self._max_overhead = max_overhead
        self._ranks = ranks
        self._raised_to = self._turns = 0
        self._raises: list[str] = []  # why, then what was decided, oldest first
        self._repeats = self._next_repeats = False  # an observed step that gave nothing

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be observed."""
        return self._repeats or (self.seen + 1) % self.every == 0

    @property
    def is_first(self) -> bool:
        """Whether the next observed step is the first: every site is looked at in full."""
        return self.observed == 0

    @property
    def ends_round(self) -> bool:
        """Whether every site will have been looked at in full again once the next observed step is over."""
        return self.observed % self.live_every == 0

    def full_sites(self, names: Sequence[str]) -> frozenset[str]:
        """The sites that the next observed step looks at in full: errors and distributions too.

        The first step takes all. Then their turns are spread over the observed steps: one that took all would
        cost as much as all the others of its round, and leave the GPU waiting for the host.
        """
        if self.is_first:
            return frozenset(names)
        return frozenset(
            name for place, name in enumerate(names) if (self.observed + place) % self.live_every == 0
        )

    @property
    def raised_to(self) -> int:
        """What `every` was raised to; 0 where it was not."""
        return self._raised_to

    def observe_next(self) -> bool:
        """Observe the next step in place of the one under way, which gave nothing; not twice in a row.

        Several ranks must observe the same steps, or they would wait for each other.

        Returns:
            Whether the step under way counts as observed nevertheless.
        """
        if self._ranks.count > 1:
            return True
        self._next_repeats = not self._repeats
        return False

    def over(self, kind: StepKind, *, observed: bool) -> None:
        """A step is over."""
        self._repeats, self._next_repeats = self._next_repeats, False
        self.seen += 1
        self.observed += observed
        self.clock.mark(kind)

    def resume(self, *, seen: int, observed: int, raised_to: int) -> None:
        """Go on where another Probe stopped."""
        self.seen = self.resumed_at = seen
        self.observed = observed
        if raised_to > self.every:
            self.note = (
                f"one step in {raised_to} is observed instead of one in {self.every}, for the limit to hold"
            )
            self.every = self._raised_to = raised_to

    def adjust(self) -> None:
        """Before an observed step: raise `every` where what was clocked says so, on all ranks alike.

        Ranks ask each other only from the fourth due step on, and each time from then on, so that none
        waits for another that does not ask.
        """
        self.clock.turn()
        self._turns += 1
        if self._max_overhead is None or self._turns <= _DECIDES_FROM:
            return
        needed = self._ranks.maximum(self.clock.needed_every(self._max_overhead))
        if needed <= self.every:
            return
        before, self.every = self.every, rounded_up(needed)
        known = self.clock.overhead(every=before, live_every=self.live_every)
        if not self._raises:
            longer = "longer, " if known is None else f"{_in_words(known.percent)} % longer, "
            self._raises = [
                f"observing one step in {before} made the training {longer}over the limit of "
                f"{100 * self._max_overhead:g} %"
            ]
        self._raises.append(f"one in {self.every} from step {self.seen + 1} on")
        self.note = f"{self._raises[0]}: {', '.join(self._raises[1:])}"
        _log.log(logging.INFO if self._raised_to else logging.WARNING, "%s", self.note)
        self._raised_to = self.every
