"""Statistics saved in the background every so many steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from loka.artifacts.statistics import BackgroundWrite, write_statistics_in_background
from loka.errors import UsageError
from loka.numerics import OperandStatistics
from loka.probe.schedule import check_count
from loka.vocab import Operand

__all__ = ["PeriodicSaving"]

_Statistics = Mapping[str, Mapping[Operand, OperandStatistics]]


class PeriodicSaving:
    """Writes one file again and again; each write replaces the last whole.

    Args:
        path: The file; None for none.
        every: Steps from one write to the next.

    Raises:
        UsageError: for every < 1, a folder instead of a file, or one in a folder that does not exist.
    """

    def __init__(self, path: str | os.PathLike[str] | None, every: int) -> None:
        check_count("save_every", every)
        if path is not None:
            if not isinstance(path, str | os.PathLike):
                raise UsageError(f"Probe(save_to={path!r}) must be the path of a file")
            if Path(path).is_dir():
                raise UsageError(f"Probe(save_to={os.fspath(path)!r}) is a folder", hint="name a file in it")
            folder = Path(path).absolute().parent
            if not folder.is_dir():
                raise UsageError(
                    f"Probe(save_to={os.fspath(path)!r}): the folder `{folder}` does not exist",
                    hint="make it first",
                )
        self._path, self._every = path, every
        self._write: BackgroundWrite | None = None

    def after_step(self, seen: int, observed: int, statistics: Callable[[], _Statistics]) -> None:
        """Write where it is time; training goes on meanwhile.

        Raises:
            ArtifactError: what went wrong in the write before.
        """
        if self._path is None or seen % self._every or not observed:
            return
        facts = {"steps_seen": seen, "steps_observed": observed}
        self._write = write_statistics_in_background(self._path, statistics(), facts, after=self._write)

    def close(self) -> None:
        """Wait for the last write.

        Raises:
            ArtifactError: what went wrong in it.
        """
        if self._write is not None:
            write, self._write = self._write, None
            write.close()
