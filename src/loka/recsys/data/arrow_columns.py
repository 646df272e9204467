"""From Arrow columns to ids, numbers and 0/1 labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from loka.recsys.data.bad_rows import BadRow, BadRows, shown
from loka.recsys.data.blocks import IdColumn
from loka.recsys.data.hashing import int_ids, text_ids

__all__ = ["RowChecks", "Vocabulary", "hashed_ids", "hashed_lists", "is_list", "is_text"]


_LABEL_HINT = "mend or skip the row (--on-bad-row skip), or name another label column (`label=NAME`)"


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this Arrow type are texts or byte strings."""
    return bool(
        pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether values of this Arrow type are lists."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def hashed_ids(column: pa.Array, *, field: str, cardinality: int) -> NDArray[np.int64]:
    """Hash a column of texts or integers (or a dictionary of them) to ids; a null gets 0.

    Args:
        column: Arrow array [n].
        field: Name that enters the hash.
        cardinality: As in `loka.recsys.data.hashing.int_ids`.

    Returns:
        int64 [n].
    """
    if pt.is_dictionary(column.type):
        # One spare id at the end, 0, for null indices.
        known = np.append(hashed_ids(column.dictionary, field=field, cardinality=cardinality), 0)
        return known[_integers(column.indices.fill_null(len(known) - 1))]
    if is_text(column.type):
        distinct = column.dictionary_encode()
        texts = distinct.dictionary.cast(pa.large_binary())
        known = np.append(_text_ids(texts, field=field, cardinality=cardinality), 0)
        return known[_integers(distinct.indices.fill_null(len(known) - 1))]
    ids = int_ids(_tokens(column), field=field, cardinality=cardinality)
    if column.null_count:
        ids[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return ids


def hashed_lists(column: pa.Array, *, field: str, cardinality: int, max_length: int) -> IdColumn:
    """Hash a column of lists.

    A null list is an empty one, a null in a list gets id 0, and of a longer list the first
    `max_length` are kept.
    """
    lengths = _integers(pc.list_value_length(column).fill_null(0))
    values = hashed_ids(pc.list_flatten(column), field=field, cardinality=cardinality)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if len(lengths) and lengths.max() > max_length:
        within = np.arange(len(values)) - np.repeat(offsets[:-1], lengths)
        values = values[within < max_length]
        offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, max_length))])
    return IdColumn(values, offsets)


def _integers(column: pa.Array) -> NDArray[np.int64]:
    return np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.int64)


def _tokens(column: pa.Array) -> NDArray[np.uint64]:
    values = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False))
    if values.dtype == np.uint64:
        return values
    return values.astype(np.int64).view(np.uint64)


def _text_ids(texts: pa.Array, *, field: str, cardinality: int) -> NDArray[np.int64]:
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
    return text_ids(data, offsets, field=field, cardinality=cardinality)


class Vocabulary:
    """Texts numbered from 1; anything else, null included, is 0.

    Args:
        texts: The known texts, in the order of their ids.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._known = pa.array(texts, type=pa.string())

    @property
    def cardinality(self) -> int:
        """Ids including 0."""
        return len(self._known) + 1

    def ids(self, texts: pa.Array) -> NDArray[np.int64]:
        """Ids of an Arrow array of strings [n]; int64 [n]."""
        return _integers(pc.index_in(texts, value_set=self._known, skip_nulls=True).fill_null(-1)) + 1


class RowChecks:
    """Collects which of n rows are bad and why; the first reason found for a row stands.

    Args:
        rows: n.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._bad: dict[int, BadRow] = {}

    def flag(
        self,
        mask: NDArray[np.bool_],
        reason: str,
        what: Callable[[int], str],
        *,
        hint: str | None = None,
    ) -> None:
        """Mark the rows where mask (bool [n]) holds; `what` words it for a position."""
        for i in np.flatnonzero(mask).tolist():
            if i not in self._bad:
                self._bad[i] = BadRow(reason, what(i), hint)

    def numbers(self, column: pa.Array, *, name: str, nulls_are_bad: bool = False) -> NDArray[np.float32]:
        """A numeric or boolean column as float32 [n], null as 0; what float32 cannot hold is flagged."""
        if pt.is_boolean(column.type):
            column = column.cast(pa.uint8())
        wide = np.asarray(column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False))
        nan = np.isnan(wide)
        with np.errstate(over="ignore"):
            values = wide.astype(np.float32)
        if nulls_are_bad and column.null_count:
            null = column.is_null().to_numpy(zero_copy_only=False)
            self.flag(null, "missing_value", lambda i: f"column `{name}` has no value")
        if not np.isfinite(values).all():
            self.flag(nan, "nan_dense", lambda i: f"dense feature `{name}` is NaN")
            self.flag(
                ~np.isfinite(values),
                "infinite_dense",
                lambda i: f"dense feature `{name}` is {column[i]}, beyond the range of float32",
            )
        return values

    def labels(self, column: pa.Array, *, name: str) -> NDArray[np.float32]:
        """A numeric or boolean column of 0 and 1 as float32 [n]; anything else is flagged."""
        if pt.is_boolean(column.type):
            column = column.cast(pa.uint8())
        values = np.asarray(
            column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
        )
        bad = (values != 0) & (values != 1)
        self.flag(
            bad,
            "bad_label",
            lambda i: f"label `{name}` is {shown(column[i])}, neither 0 nor 1",
            hint=_LABEL_HINT,
        )
        return values.astype(np.float32)

    def report(self, bad_rows: BadRows, *, first_row: int, place: Callable[[int], str]) -> NDArray[np.int64]:
        """Report the flagged rows in order and return the positions of the others, int64 [m].

        Args:
            bad_rows: Raises or counts.
            first_row: Row number of position 0.
            place: Names a position for a message.
        """
        for i in sorted(self._bad):
            bad_rows.report(first_row + i, place(i), self._bad[i])
        good = np.ones(self._rows, dtype=np.bool_)
        good[list(self._bad)] = False
        return np.flatnonzero(good)
