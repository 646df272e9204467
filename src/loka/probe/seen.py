"""The tensors of one observed step, each looked at once however many sites it reaches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.column_statistics import marginals_of, moments_of
from loka.numerics import BatchStatistics, Covariance, Marginals
from loka.probe.strata import stratified_rows
from loka.sites.recorder import tensor_key

__all__ = ["Sampled", "SeenTensors", "row_numbers", "rows_of_features", "taken"]


@dataclass(slots=True)
class Sampled:
    """Sampled rows of a tensor.

    Attributes:
        rows: int64 [S] on the tensor's device, sorted; None where all rows are the sample.
        values: [S, F], a copy in the tensor's dtype.
    """

    rows: Tensor | None
    values: Tensor
    _found: tuple[Covariance, Marginals] | None = None

    @classmethod
    def of(cls, x_MK: Tensor, rows: Tensor | None) -> Sampled:
        """The given rows of x_MK; no host synchronisation."""
        return cls(rows, taken(x_MK, rows))

    def distributions(self) -> tuple[Covariance, Marginals]:
        """Of the finite ones among the rows; computed once, when first asked for."""
        if self._found is None:
            self._found = Covariance.of(self.values), marginals_of(self.values)
        return self._found


@dataclass(frozen=True, slots=True)
class _Entry:
    owners: tuple[weakref.ref[Tensor], ...]
    found: Any


class SeenTensors:
    """Statistics by tensor. A tensor is known by its place in memory, and only while it lives.

    Nothing is kept alive: an address belongs to whoever has it next, so an entry counts only while the Python
    object of the tensor that was looked at, or of its base, exists. One that is gone for Python, but not for
    autograd, is looked at again.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], _Entry] = {}

    def clear(self) -> None:
        """Forget everything, at the end of a step."""
        self._entries.clear()

    def batch(self, x: Tensor) -> BatchStatistics:
        """Moments and amax of all rows of x [..., features]."""
        found: BatchStatistics = self._once(
            x, ("moments",), lambda: BatchStatistics.of(rows_of_features(x), moments_of=moments_of)
        )
        return found

    def sampled(self, x: Tensor, *, limit: int, generator: Callable[[], torch.Generator]) -> Sampled:
        """At most `limit` rows of x [..., features]; the generator is asked for only by who comes first."""

        def sample() -> Sampled:
            x_MK = rows_of_features(x)
            return Sampled.of(x_MK, row_numbers(x_MK, limit, generator()))

        found: Sampled = self._once(x, ("sample", limit), sample)
        return found

    def _once(self, x: Tensor, what: tuple[object, ...], look: Callable[[], Any]) -> Any:
        key = (*what, *tensor_key(x))
        entry = self._entries.get(key)
        if entry is not None and any(owner() is not None for owner in entry.owners):
            return entry.found
        found = look()
        base = x._base if x._is_view() else None
        owners = (x,) if base is None else (x, base)
        self._entries[key] = _Entry(tuple(weakref.ref(owner) for owner in owners), found)
        return found


def rows_of_features(x: Tensor) -> Tensor:
    """A tensor [..., F] as [rows, F], outside autograd; of a sharded one the part on this rank."""
    to_local = getattr(x, "to_local", None)
    local: Tensor = x if to_local is None else to_local()
    local = local.detach()
    return local.reshape(-1, local.shape[-1]) if local.numel() else local.reshape(0, local.shape[-1])


def taken(x_MK: Tensor, rows: Tensor | None) -> Tensor:
    """A copy of the given rows: the model may write over the tensor before they are needed."""
    return x_MK.clone() if rows is None else x_MK.index_select(0, rows)


def row_numbers(x_MK: Tensor, limit: int, generator: torch.Generator) -> Tensor | None:
    """`stratified_rows` of x_MK on its device, copied there without a wait."""
    rows = stratified_rows(x_MK.shape[0], limit, generator)
    if rows is None or not x_MK.is_cuda:
        return rows
    return rows.pin_memory().to(x_MK.device, non_blocking=True)
