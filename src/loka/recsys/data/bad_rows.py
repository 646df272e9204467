"""What happens to a row that cannot be read: an error that names it, or a count."""

from __future__ import annotations

from dataclasses import dataclass

from loka.errors import DataError
from loka.recsys.source import OnBadRow

__all__ = ["BadRow", "BadRows", "shown"]

_SKIP_HINT = "mend the row, or leave such rows out and count them with --on-bad-row skip"


@dataclass(frozen=True, slots=True)
class BadRow:
    """Why one row cannot be read.

    Attributes:
        reason: The word it is counted under, e.g. `bad_label`.
        what: The rest of the sentence after the place: what is wrong, with the value.
        hint: What to do; a general one where None.
    """

    reason: str
    what: str
    hint: str | None = None


class BadRows:
    """Raises on bad rows or counts them, each row once however many passes meet it.

    Args:
        policy: Raise or count.
        hint: What to do about a bad row that has no hint of its own.
    """

    def __init__(self, policy: OnBadRow, *, hint: str = _SKIP_HINT) -> None:
        self.policy = policy
        self._hint = hint
        self._counts: dict[str, int] = {}
        self._next_row = 0

    @property
    def counts(self) -> dict[str, int]:
        """Rows left out so far by reason."""
        return dict(self._counts)

    def report(self, row: int, place: str, bad: BadRow) -> None:
        """Take note of a bad row; within one pass rows are reported in rising order.

        Args:
            row: Its number in the source.
            place: File and line (or row), counted from 1, for the message.
            bad: Why.

        Raises:
            DataError: under OnBadRow.ERROR.
        """
        if self.policy is OnBadRow.ERROR:
            raise DataError(f"{place}: {bad.what}", hint=bad.hint or self._hint)
        # A later pass, or one of another split, meets the same rows again: only rows further on are new.
        if row >= self._next_row:
            self._counts[bad.reason] = self._counts.get(bad.reason, 0) + 1
            self._next_row = row + 1


def shown(value: object, *, limit: int = 40) -> str:
    """A value as a message shows it: text of bytes, control characters escaped, cut to `limit` characters."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."
