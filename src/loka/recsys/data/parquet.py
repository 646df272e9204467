"""Parquet files with any columns, streamed.

What a column is for follows from its type unless it is named in an option:

| Arrow type | role |
|---|---|
| the column named by `label` (several: one task each) | label: a number or boolean, 0 or 1 |
| the column named by `weight` | row weight, a finite number >= 0 |
| integer, float, decimal, boolean | dense feature; null is 0 |
| string, binary, dictionary (a pandas category) | ids, one a row; null is id 0 |
| list of integers or strings | ids, up to `max_length` a row |

Integer columns that are ids in truth are named in `ids`. Ids are hashed by (column name, value), see
`loka.recsys.data.hashing`: integer 5 and text "5" are different tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from loka.errors import DataError, UsageError, unknown_name
from loka.recsys.batch import FieldSchema, Schema
from loka.recsys.data.arrow_columns import RowChecks, hashed_ids, hashed_lists, is_list, is_text
from loka.recsys.data.blocks import Block, BlockSource, IdColumn
from loka.recsys.data.dense import DenseTransform, transform
from loka.recsys.data.file_text import find_files, total_bytes
from loka.recsys.data.hashing import check_cardinality
from loka.recsys.data.splits import count_in_split
from loka.recsys.source import OnBadRow, Split

__all__ = ["ParquetSource", "Piece", "parquet_pieces", "parquet_schema"]

_ROWS_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a Parquet file.

    Attributes:
        path: The file.
        row_in_file: The first row's number in it, from 0.
        row: The first row's number in the source, from 0.
        columns: The rows.
    """

    path: Path
    row_in_file: int
    row: int
    columns: pa.RecordBatch

    def place(self, position: int) -> str:
        """How messages name a row: rows of a file are counted from 1."""
        return f"{self.path}, row {self.row_in_file + position + 1}"


def parquet_pieces(paths: Sequence[Path], columns: Sequence[str]) -> Iterator[Piece]:
    """The files' rows in order, a bounded number at a time.

    Raises:
        DataError: if a file turns out not to be readable as Parquet.
    """
    row = 0
    for path in paths:
        row_in_file = 0
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(columns)):
                    yield Piece(path, row_in_file, row, batch.select(list(columns)))
                    row_in_file += batch.num_rows
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise _not_parquet(path, error, row_in_file=row_in_file) from error


def parquet_schema(path: Path) -> tuple[pa.Schema, int]:
    """A file's columns and its number of rows, from its footer.

    Raises:
        DataError: if it is not a Parquet file.
    """
    try:
        with pq.ParquetFile(path) as file:
            return file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(path, error) from error


def _not_parquet(path: Path, error: Exception, *, row_in_file: int = 0) -> DataError:
    after = f" after row {row_in_file}" if row_in_file else ""
    cause = str(error).partition("\n")[0].rstrip(".")
    return DataError(
        f"{path}: cannot be read as Parquet{after} ({cause})", hint="was the download or copy cut off?"
    )


class ParquetSource(BlockSource):
    """Rows of one or several Parquet files with equal columns, in file order.

    Args:
        files: A path, a comma list of paths or a glob pattern.
        label: Label columns.
        dense: Columns that are dense features; other columns follow from their types.
        ids: Columns that are ids.
        drop: Columns that are left out.
        weight: Column of row weights.
        cardinality: Ids of each id field, 0 ("missing") included.
        max_length: Most ids kept of a list; the first ones are.
        transform: What is done to dense features.
        on_bad_row: What to do with rows that cannot be read.

    Raises:
        DataError: if a file is missing, empty, a directory or no Parquet, or its columns do not fit.
        UnknownNameError: if an option names a column that is not there.
    """

    def __init__(
        self,
        files: str,
        *,
        label: Sequence[str] = ("label",),
        dense: Sequence[str] = (),
        ids: Sequence[str] = (),
        drop: Sequence[str] = (),
        weight: str | None = None,
        cardinality: int = 65_536,
        max_length: int = 64,
        transform: DenseTransform = DenseTransform.RAW,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
    ) -> None:
        if max_length < 1:
            raise UsageError(f"max_length must be >= 1, got {max_length}")
        self._given = files
        self._paths = find_files(files)
        columns, total = _common_schema(self._paths)
        roles = _roles(self._paths[0], columns, label=label, dense=dense, ids=ids, drop=drop, weight=weight)
        for name in roles.ids:
            check_cardinality(cardinality, field=name)
        fields = tuple(
            FieldSchema(name, cardinality, max_length if is_list(columns.field(name).type) else 1)
            for name in roles.ids
        )
        super().__init__("parquet", Schema(roles.dense, fields, tuple(label)), on_bad_row=on_bad_row)
        self._total = total
        self._roles = roles
        self._weight = weight
        self._transform = transform
        self._options = {"cardinality": cardinality, "max_length": max_length}

    def rows(self, split: Split) -> int | None:
        """Rows of the split; None under OnBadRow.SKIP, where only reading all rows would tell."""
        if self._bad_rows.policy is OnBadRow.SKIP:
            return None
        return count_in_split(self._total, split)

    def identity(self) -> dict[str, str | int | float]:
        """Path as given, bytes on disk, columns by role and options."""
        return {
            "kind": self.name,
            "path": self._given,
            "files": len(self._paths),
            "bytes": total_bytes(self._paths),
            "label": ",".join(self.schema.tasks),
            "dense": ",".join(self._roles.dense),
            "ids": ",".join(self._roles.ids),
            "weight": self._weight or "",
            **self._options,
            "transform": self._transform.value,
            "on_bad_row": self._bad_rows.policy.value,
        }

    def _blocks(self) -> Iterator[Block]:
        weight = () if self._weight is None else (self._weight,)
        wanted = [*self.schema.tasks, *self._roles.dense, *self._roles.ids, *weight]
        for piece in parquet_pieces(self._paths, wanted):
            yield self._block(piece)

    def _block(self, piece: Piece) -> Block:
        n = piece.columns.num_rows
        checks = RowChecks(n)
        labels = np.stack([checks.labels(piece.columns[t], name=t) for t in self.schema.tasks], axis=1)
        dense = np.empty((n, len(self._roles.dense)), dtype=np.float32)
        for d, name in enumerate(self._roles.dense):
            dense[:, d] = checks.numbers(piece.columns[name], name=name)
        weight = None
        if self._weight is not None:
            weight = checks.numbers(piece.columns[self._weight], name=self._weight, nulls_are_bad=True)
            checks.flag(
                weight < 0, "bad_weight", lambda i: f"weight `{self._weight}` is {weight[i]}, below 0"
            )
        ids = tuple(self._ids(piece.columns[spec.name], spec) for spec in self.schema.fields)
        good = checks.report(self._bad_rows, first_row=piece.row, place=piece.place)
        rows = np.arange(piece.row, piece.row + n, dtype=np.int64)
        block = Block(rows, dense, ids, labels, weight)
        block = block if len(good) == n else block.take(good)
        return replace(block, dense=transform(block.dense, self._transform))

    @staticmethod
    def _ids(column: pa.Array, spec: FieldSchema) -> IdColumn:
        if is_list(column.type):
            return hashed_lists(
                column, field=spec.name, cardinality=spec.cardinality, max_length=spec.max_length
            )
        return IdColumn(hashed_ids(column, field=spec.name, cardinality=spec.cardinality))


@dataclass(frozen=True, slots=True)
class _Roles:
    dense: tuple[str, ...]
    ids: tuple[str, ...]


def _common_schema(paths: Sequence[Path]) -> tuple[pa.Schema, int]:
    first, total = parquet_schema(paths[0])
    for path in paths[1:]:
        columns, rows = parquet_schema(path)
        if not columns.equals(first):
            differing = sorted(
                {f"{f.name}: {f.type}" for f in columns} ^ {f"{f.name}: {f.type}" for f in first}
            )
            raise DataError(
                f"{path}: its columns are not those of {paths[0]}",
                lines=differing,
                hint="files read together need equal columns in equal order",
            )
        total += rows
    if total == 0:
        raise DataError(f"{paths[0]}: holds no rows", hint="was it written to the end?")
    return first, total


def _roles(
    path: Path,
    columns: pa.Schema,
    *,
    label: Sequence[str],
    dense: Sequence[str],
    ids: Sequence[str],
    drop: Sequence[str],
    weight: str | None,
) -> _Roles:
    named = {"label": label, "dense": dense, "ids": ids, "drop": drop, "weight": [weight] if weight else []}
    if len(set(columns.names)) < len(columns.names):
        twice = sorted({name for name in columns.names if columns.names.count(name) > 1})
        raise DataError(f"{path}: has two columns `{twice[0]}`", hint="rename one of them")
    role_of: dict[str, str] = {}
    for role, names in named.items():
        for name in names:
            if name not in columns.names:
                raise unknown_name(f"{role} column", name, columns.names, where=str(path))
            if name in role_of:
                raise UsageError(f"column `{name}` is named both as {role_of[name]} and as {role}")
            role_of[name] = role
    for column in columns:
        role = role_of.setdefault(column.name, _role_by_type(column.type))
        if not _fits(role, column.type):
            raise DataError(
                f"{path}: column `{column.name}` of type {column.type} cannot be {role or 'read'}",
                hint=f"leave it out with `drop={column.name}`, or write it in another type",
            )
    by_role = {r: tuple(n for n in columns.names if role_of[n] == r) for r in ("dense", "ids")}
    if not by_role["dense"] and not by_role["ids"]:
        raise DataError(
            f"{path}: has no column to learn from", hint="all columns are labels, weights or dropped"
        )
    return _Roles(by_role["dense"], by_role["ids"])


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind) or pt.is_boolean(kind))


def _is_token(kind: pa.DataType) -> bool:
    kind = kind.value_type if pt.is_dictionary(kind) else kind
    return bool(pt.is_integer(kind) or is_text(kind))


def _role_by_type(kind: pa.DataType) -> str:
    if _is_number(kind):
        return "dense"
    return "ids" if _fits("ids", kind) else ""


def _fits(role: str, kind: pa.DataType) -> bool:
    if role == "ids":
        return _is_token(kind.value_type if is_list(kind) else kind)
    return role == "drop" or (role in ("dense", "label", "weight") and _is_number(kind))
