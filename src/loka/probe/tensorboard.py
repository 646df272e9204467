"""Curves of every site for TensorBoard, written each time every site was looked at in full.

    with ProbeWriter("runs/probe") as writer, loka.Probe(model, on_observed=writer) as probe:
        ...

Tags begin with the site, so that TensorBoard shows a group a site:

    <site>/sqnr_db/<pass>/<recipe>     of the rows of this step; _mean, _low and _high: of all so far, 90 %
    <site>/amax/<operand>              of this step
    <site>/zero_share/<operand>        exact zeros, 0 to 1, of the rows since the last point
    <site>/drift/<operand>             distance of exponent histograms from the window before, 0 to 1
    <site>/nonfinite_rows              of input and output gradient, so far
    probe/overhead_percent, probe/every
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, cast

import torch
from torch import Tensor

from loka.artifacts.profile import ErrorTable, Overhead
from loka.errors import UsageError
from loka.numerics import OperandStatistics
from loka.vocab import Operand

__all__ = ["Learned", "ProbeWriter", "ScalarWriter"]

Statistics = Mapping[str, Mapping[Operand, OperandStatistics]]


class ScalarWriter(Protocol):
    """What is asked of a writer; torch's SummaryWriter is one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Keep one point of one curve."""
        ...

    def flush(self) -> object:
        """Bring what was added to disk."""
        ...


class _OwnWriter(ScalarWriter, Protocol):
    def close(self) -> object: ...


class Learned(Protocol):
    """What is read of a Probe."""

    @property
    def statistics(self) -> Statistics:
        """Learned statistics by site and operand."""
        ...

    @property
    def errors(self) -> ErrorTable:
        """Errors read so far."""
        ...

    @property
    def overhead(self) -> Overhead | None:
        """What observing costs; None before it is known."""
        ...


@dataclass(frozen=True, slots=True)
class _Point:
    """What one operand gave, read from the device."""

    amax: float
    zeros: int
    rows: int
    nonfinite_rows: int


class ProbeWriter:
    """A callback for `Probe(on_observed=...)` that writes curves.

    Args:
        log_dir: Folder of TensorBoard's event files; made at the first point, if it does not exist.
        writer: Write to this instead, such as the SummaryWriter that a trainer has already; it is not closed.

    Raises:
        UsageError: where TensorBoard is not installed, or for both or neither argument.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, *, writer: ScalarWriter | None = None
    ) -> None:
        if (log_dir is None) is (writer is None):
            raise UsageError("ProbeWriter takes a log_dir or a writer", hint='ProbeWriter("runs/probe")')
        self._open = None if log_dir is None else partial(_writer_class(), log_dir=os.fspath(log_dir))
        self._own: _OwnWriter | None = None
        self._writer = writer
        self._means: dict[tuple[str, ...], tuple[int, float]] = {}
        self._points: dict[tuple[str, Operand], _Point] = {}

    def __enter__(self) -> ProbeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Bring everything to disk; what this writer opened is closed."""
        if self._writer is not None:
            self._writer.flush()
        if self._own is not None:
            self._own.close()
        self._open = self._own = self._writer = None

    def __call__(self, probe: Learned, step: int) -> None:
        """Write the points of one observed step.

        Args:
            probe: What was learned, this step included.
            step: Its number, the x of every curve.

        Raises:
            UsageError: after `close`.
        """
        if self._writer is None:
            if self._open is None:
                raise UsageError("this ProbeWriter is closed", hint="make a new one")
            self._writer = self._own = self._open()
        for tag, value in self._scalars(probe):
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def _scalars(self, probe: Learned) -> Iterator[tuple[str, float]]:
        yield from self._errors(probe.errors)
        yield from self._operands(probe.statistics)
        overhead = probe.overhead
        if overhead is not None:
            yield "probe/overhead_percent", overhead.percent
            yield "probe/every", overhead.every

    def _errors(self, table: ErrorTable) -> Iterator[tuple[str, float]]:
        for i in range(len(table)):
            if table.source[i] != "live":
                continue
            name = _recipe(table.spec_a[i], table.spec_b[i], table.accumulation[i])
            key = (table.site[i], str(table.pass_[i]), name, table.kernel[i])
            count, mean = table.observations[i], table.sqnr_db[i]
            before, old = self._means.get(key, (0, 0.0))
            self._means[key] = (count, mean)
            if count <= before:
                continue  # nothing new of this recipe
            tag = f"{key[1]}/{name}"
            if before or count == 1:
                # Means of all so far, so what is new is their difference.
                yield f"{key[0]}/sqnr_db/{tag}", (count * mean - before * old) / (count - before)
            yield f"{key[0]}/sqnr_db_mean/{tag}", mean
            if count > 1:
                yield f"{key[0]}/sqnr_db_low/{tag}", table.sqnr_db_low[i]
                yield f"{key[0]}/sqnr_db_high/{tag}", table.sqnr_db_high[i]

    def _operands(self, statistics: Statistics) -> Iterator[tuple[str, float]]:
        for site, operands in statistics.items():
            points = _read(operands)
            bad = sum(p.nonfinite_rows for o, p in points.items() if o is not Operand.WEIGHT)
            yield f"{site}/nonfinite_rows", bad
            for operand, point in points.items():
                yield f"{site}/amax/{operand}", point.amax
                share = self._zero_share(site, operand, point, operands[operand].features)
                if share is not None:
                    yield f"{site}/zero_share/{operand}", share
                drift = operands[operand].drift()
                if drift is not None:
                    yield f"{site}/drift/{operand}", drift.total_variation
                    yield f"{site}/drift_amax_octaves/{operand}", drift.amax_octaves

    def _zero_share(self, site: str, operand: Operand, point: _Point, features: int) -> float | None:
        """Of the rows since the last point; of all where they do not add up, as a weight's."""
        old = self._points.get((site, operand))
        self._points[site, operand] = point
        zeros, rows = point.zeros, point.rows
        if old is not None and rows > old.rows:
            zeros, rows = zeros - old.zeros, rows - old.rows
        return zeros / (rows * features) if rows and features else None


def _recipe(spec_a: str, spec_b: str, accumulation: str) -> str:
    """The recipe in characters that TensorBoard keeps in a tag."""
    name = spec_a if spec_a == spec_b else f"{spec_a}-{spec_b}"
    return name + (".fast" if accumulation == "fast" else "")


def _read(operands: Mapping[Operand, OperandStatistics]) -> dict[Operand, _Point]:
    """One read from the device for all operands of a site."""
    rows: list[Tensor] = []
    for found in operands.values():
        moments = found.moments
        known = found.history.values() if found.history.steps else moments.amax.sort().values
        amax = torch.cat([known.new_zeros(1), known])[-1:]
        counts = torch.stack([moments.zeros, moments.count, moments.nonfinite_rows])
        rows.append(torch.cat([amax.double(), counts.double()]))
    numbers = torch.stack(rows).tolist() if rows else []
    return {
        operand: _Point(amax, int(zeros), int(count), int(bad))
        for operand, (amax, zeros, count, bad) in zip(operands, numbers, strict=True)
    }


def _writer_class() -> Callable[..., _OwnWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            f"curves for TensorBoard need the package `tensorboard`: {error}",
            hint="pip install 'loka[tensorboard]'",
        ) from error
    return cast(Callable[..., _OwnWriter], SummaryWriter)
