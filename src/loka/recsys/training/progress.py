"""Progress on stderr: a bar where someone watches, else a log line now and then. Nothing goes to stdout."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

__all__ = ["Progress"]

logger = logging.getLogger("loka")


class Progress:
    """Shows rows done, rows/s, running NE and, where the total is known, the time left.

    Args:
        description: What is going on, such as `train bf16`.
        total_rows: Rows in all, or None where that is not known.
        done_rows: Rows done before, as by the run that is resumed.
        bar: Draw a bar; None draws one if stderr is a terminal. Otherwise lines go to the `loka` logger.
        every_s: Seconds between two updates; None takes 0.5 for a bar and 10 for lines. The NE is asked for
            only then, because asking a GPU waits for it.
    """

    def __init__(
        self,
        description: str,
        *,
        total_rows: int | None,
        done_rows: int = 0,
        bar: bool | None = None,
        every_s: float | None = None,
    ) -> None:
        show = sys.stderr.isatty() if bar is None else bar
        self._description = description
        self._total = total_rows
        self._first_rows = done_rows
        self._every_s = every_s if every_s is not None else (0.5 if show else 10.0)
        self._bar: Bar | None = self._new_bar() if show else None
        self._begun = self._shown = time.monotonic()
        self._logged_rows = -1

    def _new_bar(self) -> Bar:
        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows  {task.fields[speed]} rows/s  NE {task.fields[ne]} "),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        total = None if self._total is None else float(self._total)
        bar.add_task(self._description, total=total, completed=self._first_rows, speed="-", ne="-")
        return bar

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        self._begun = self._shown = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, rows: int, ne: Callable[[], float | None], *, last: bool = False) -> None:
        """Show that this many rows are done, if it is time to.

        Args:
            rows: Rows done in all.
            ne: Gives the running NE, None where undefined.
            last: Show in any case.
        """
        now = time.monotonic()
        if not last and now - self._shown < self._every_s:
            return
        self._shown = now
        speed = (rows - self._first_rows) / max(now - self._begun, 1e-9)
        value = ne()
        text = "-" if value is None else f"{value:.4f}"
        if self._bar is not None:
            total = None if self._total is None else max(self._total, rows)
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=rows, total=total, speed=f"{speed:,.0f}", ne=text)
            return
        if rows == self._logged_rows:
            return  # the last update of a run often repeats the one before
        self._logged_rows = rows
        of = f" of {self._total:,}" if self._total is not None else ""
        left = ""
        if self._total is not None and speed > 0:
            left = f", {max(self._total - rows, 0) / speed:.0f} s left"
        logger.info(
            "%s: %s%s rows, %s rows/s, NE %s%s",
            self._description,
            f"{rows:,}",
            of,
            f"{speed:,.0f}",
            text,
            left,
        )
