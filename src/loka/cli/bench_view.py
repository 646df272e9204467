"""What `loka bench gemm` shows: progress on stderr, a line a pair, and what they come to."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from loka.bench import GemmResult, KernelRow, PairResult
from loka.cli.output import cell
from loka.cli.talk import logger
from loka.kernels import HIGH_PRECISION

__all__ = ["PairProgress", "gemm_json", "gemm_table", "summary_lines"]

_LINES_EVERY_S = 10.0


class PairProgress:
    """Pairs done, as a bar where someone watches, else as a line now and then.

    Args:
        bar: Draw a bar; None draws one if stderr is a terminal.
    """

    def __init__(self, *, bar: bool | None) -> None:
        self._bar = self._new_bar() if (sys.stderr.isatty() if bar is None else bar) else None
        self._told = time.monotonic()

    @staticmethod
    def _new_bar() -> Bar:
        return Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("pairs"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=Console(stderr=True),
        )

    def __enter__(self) -> PairProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, last: PairResult | None) -> None:
        """Show how far it is; `last` is the pair just measured, None before the first."""
        text = "" if last is None else f"{last.key}: {last.pick or 'failed'}"
        if self._bar is not None:
            if not self._bar.task_ids:
                self._bar.add_task("bench gemm", total=total, completed=done, last=text)
            self._bar.update(self._bar.task_ids[0], completed=done, last=text)
            return
        logger.debug("%d of %d pairs, %s", done, total, text)
        if time.monotonic() - self._told >= _LINES_EVERY_S:
            self._told = time.monotonic()
            logger.info("%d of %d pairs, %s", done, total, text)


def gemm_json(result: GemmResult) -> dict[str, Any]:
    """Metrics, and every pair with its kernels, as plain values."""
    return {"metrics": result.metrics, "pairs": [msgspec.to_builtins(pair) for pair in result.pairs]}


def gemm_table(result: GemmResult) -> Table:
    """A line a pair: bf16, the best FP8 kernel, and what the pass is given."""
    table = Table(title="products with their casts, against bf16", title_justify="left")
    for name in ("M x N x K", "pass"):
        table.add_column(name, no_wrap=True)
    table.add_column("bf16 us", justify="right")
    table.add_column("best FP8 kernel")
    for name in ("total us", "speed-up", "90 %", "product alone", "of roofline"):
        table.add_column(name, justify="right")
    table.add_column("pick")
    for pair in result.pairs:
        table.add_row(*_cells(pair))
    return table


def _cells(pair: PairResult) -> list[str]:
    shape, _, pass_ = pair.key.rpartition(".")
    base, best = pair.row(HIGH_PRECISION), pair.row(pair.best_fp8)
    head = [shape, pass_, _number(base.p50_us if base else None, "{:.1f}")]
    if pair.failed:
        return [*head, cell(pair.failed), "", "", "", "", "", ""]
    pick = "bf16" if pair.pick == HIGH_PRECISION else pair.pick
    return [*head, *_fp8_cells(pair, best), pick]


def _fp8_cells(pair: PairResult, best: KernelRow | None) -> list[str]:
    if best is None:
        # None was timed to the end: the one that was dropped last tells how far behind they are.
        timed = [row for row in pair.kernels if row.quantized and row.p50_us is not None]
        best = min(timed, key=lambda row: row.p50_us or 0.0, default=None)
    if best is None:
        return [cell(_why_none(pair)), "", "", "", "", ""]
    interval = "-"
    if best.speedup_low is not None and best.speedup_high is not None:
        interval = f"{best.speedup_low:.2f} .. {best.speedup_high:.2f}"
    return [
        best.kernel,
        _number(best.p50_us, "{:.1f}"),
        _number(best.speedup, "{:.2f}x"),
        interval,
        _number(best.product_speedup, "{:.2f}x"),
        _percent(best.roofline),
    ]


def _why_none(pair: PairResult) -> str:
    quantized = [row for row in pair.kernels if row.quantized]
    if not quantized:
        return "none can run this"
    return f"none ({quantized[0].kernel}: {quantized[0].reason})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def summary_lines(result: GemmResult) -> list[str]:
    """What the pairs come to, in a few lines."""
    metrics = result.metrics
    pairs = int(metrics["pairs"])
    if not pairs:
        return ["no pair could be timed"]
    fp8 = round(metrics["fp8_share_of_pairs"] * pairs)
    lines = [
        f"FP8 is picked at {fp8} of {pairs} pairs, {_percent(metrics['fp8_share_of_flops'])} of the FLOPs"
    ]
    if fp8:
        exact = metrics.get("fp8_total_speedup_geomean_exact")
        tail = "" if exact is None else f"; {exact:.3f}x with exact accumulation only"
        speedup = metrics["fp8_total_speedup_geomean"]
        lines.append(f"there it is {speedup:.3f}x as fast as bf16, casts included{tail}")
        lines.append(f"casts take {metrics.get('quantization_share_percent', 0.0):.1f} % of its time")
    lines.append(f"{_percent(metrics['slower_than_bf16_share'])} of the picks turned out slower than bf16")
    counts = {name.partition("@")[2]: int(v) for name, v in metrics.items() if name.startswith("best_count@")}
    fastest = ", ".join(f"{library} {count}" for library, count in counts.items())
    lines.append(f"fastest, bf16 included: {fastest}")
    unfit = sorted({row.kernel for pair in result.pairs for row in pair.kernels if not row.vetted})
    if unfit:
        lines.append(f"failed their vetting somewhere, and are not timed there: {', '.join(unfit)}")
    failed = int(metrics["pairs_failed"])
    if failed:
        lines.append(f"{failed} pair{'' if failed == 1 else 's'} could not be timed in bf16")
    return lines
