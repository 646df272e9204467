"""A sample of rows, drawn cheaply however many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["stratified_rows"]


def stratified_rows(rows: int, limit: int, generator: torch.Generator) -> Tensor | None:
    """Sorted row numbers int64 [limit], one from each of `limit` equal strata; None when all rows fit.

    The rows are cut into runs that differ in length by one at most, and each run gives one row at random: no
    row comes twice, and `limit` random numbers are enough. A shuffle of 1.5 million rows takes a CPU more
    than 10 ms, as long as a training step may.
    """
    if rows <= limit:
        return None
    starts = torch.arange(limit + 1, dtype=torch.int64, device="cpu") * rows // limit
    lengths = starts.diff()
    offset = (torch.rand(limit, generator=generator, dtype=torch.float64, device="cpu") * lengths).long()
    return starts[:-1] + torch.minimum(offset, lengths - 1)  # a product may round up to the length itself
