"""What is said on stderr: the `loka` logger's lines, warnings marked as such."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from loka.errors import UsageError

if TYPE_CHECKING:
    from loka.cli.options import TalkOptions

__all__ = ["bar_wanted", "set_level", "talking"]

logger = logging.getLogger("loka")


class _StderrLines(logging.Handler):
    """Writes to whatever sys.stderr is at that moment: a progress bar puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        try:
            print(mark + record.getMessage(), file=sys.stderr, flush=True)
        except OSError:
            self.handleError(record)


@contextmanager
def talking() -> Iterator[None]:
    """Within the block the `loka` logger writes to stderr; afterwards it is as before."""
    handler = _StderrLines()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def set_level(talk: TalkOptions) -> None:
    """Say more or less.

    Raises:
        UsageError: for both at once.
    """
    if talk.verbose and talk.quiet:
        raise UsageError("--verbose and --quiet exclude each other", hint="give one of them")
    if talk.verbose:
        logger.setLevel(logging.DEBUG)
    elif talk.quiet:
        logger.setLevel(logging.WARNING)


def bar_wanted() -> bool | None:
    """As `Progress` takes it: no bar where only warnings are wanted, else one on a terminal."""
    return None if logger.isEnabledFor(logging.INFO) else False
