"""What is kept of one pair of shape and pass, in the record and in the file of an unfinished run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

__all__ = ["KernelRow", "PairResult", "columns_of", "rows_of"]

Row = TypeVar("Row", bound=msgspec.Struct)


class KernelRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One usable kernel at one pair. Times are None where none was taken, and `reason` says why.

    Attributes:
        kernel: Its name.
        quantized: Whether its operands are in FP8.
        exact: Whether it accumulates exactly.
        vetted: Whether its output was right for this class of shapes.
        captured: Whether the samples are replays of a CUDA graph.
        rounds: Samples taken of the total.
        p10_us: 10th percentile of the total: casts, product, bias.
        p50_us: Median of the total.
        p90_us: 90th percentile of the total.
        product_us: Median of the product alone.
        cast_us: Median of the casts alone; None for a bf16 product.
        speedup: Total against bf16 on the half of the samples that chose nothing: median of the ratios.
        speedup_low: Lower end of its 90 % interval.
        speedup_high: Upper end.
        product_speedup: Product alone against bf16's, all samples.
        roofline: Fraction of the roofline that the product alone reaches; None where peaks are not known.
        reason: Why it was not timed, or not to the end.
    """

    kernel: str
    quantized: bool
    exact: bool
    vetted: bool
    captured: bool = False
    rounds: int = 0
    p10_us: float | None = None
    p50_us: float | None = None
    p90_us: float | None = None
    product_us: float | None = None
    cast_us: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    product_speedup: float | None = None
    roofline: float | None = None
    reason: str = ""


class PairResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pair.

    Attributes:
        key: `MxNxK.pass` of the linear layer.
        flops: Of the product.
        pick: The kernel the pass is given.
        pick_exact: The same where only kernels with exact accumulation may be picked.
        fastest: The kernel of least total, bf16 included, on the half that chooses.
        best_fp8: The FP8 kernel of least total on that half; empty where none was timed.
        kernels: Every usable kernel.
        refused: Kernels that cannot run this product, and why.
        failed: Why bf16 itself could not be timed; then nothing is picked or judged.
    """

    key: str
    flops: int
    pick: str = ""
    pick_exact: str = ""
    fastest: str = ""
    best_fp8: str = ""
    kernels: tuple[KernelRow, ...] = ()
    refused: dict[str, str] = {}
    failed: str = ""

    def row(self, kernel: str) -> KernelRow | None:
        """The kernel's row, if it is usable here."""
        return next((row for row in self.kernels if row.kernel == kernel), None)


def columns_of(rows: Sequence[msgspec.Struct], kind: type[msgspec.Struct]) -> dict[str, list[Any]]:
    """Rows as columns, which a record keeps a line each."""
    plain = [msgspec.to_builtins(row) for row in rows]
    return {name: [row[name] for row in plain] for name in kind.__struct_fields__}


def rows_of(columns: dict[str, list[Any]], kind: type[Row]) -> list[Row]:
    """`columns_of`, read back.

    Raises:
        msgspec.ValidationError: for columns that are not those of the type.
    """
    values = zip(*(columns[name] for name in columns), strict=True)
    return [msgspec.convert(dict(zip(columns, row, strict=True)), kind) for row in values]
