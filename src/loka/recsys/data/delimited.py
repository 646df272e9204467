"""Delimited text with a header line: parsed by pyarrow, columns by name, never quoted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

from loka.errors import DataError, unknown_name
from loka.recsys.data.bad_rows import BadRows
from loka.recsys.data.file_text import first_line, require_file
from loka.recsys.data.lines import LineReader, UnparsableError
from loka.recsys.source import OnBadRow

__all__ = ["DelimitedParser", "float_or_none", "header_of", "int_or_none", "read_small_table"]


class DelimitedParser:
    """Whole lines -> an Arrow table of the wanted columns.

    Args:
        names: All columns of the file, in order.
        types: The wanted columns and their Arrow types; an empty text column stays an empty text, an empty
            number is null.
        delimiter: One character.
    """

    def __init__(self, names: Sequence[str], types: Mapping[str, pa.DataType], *, delimiter: str) -> None:
        self.names = list(names)
        self._parse = pa_csv.ParseOptions(delimiter=delimiter, quote_char=False, ignore_empty_lines=False)
        self._convert = pa_csv.ConvertOptions(
            column_types=dict(types), include_columns=list(types), null_values=[""], strings_can_be_null=False
        )

    def __call__(self, data: bytes, lines: int) -> pa.Table:
        """Parse `lines` whole lines.

        Raises:
            UnparsableError: if one of them does not fit the columns and types.
        """
        try:
            table = pa_csv.read_csv(
                pa.py_buffer(data),
                read_options=pa_csv.ReadOptions(
                    column_names=self.names, block_size=max(len(data), 1 << 10), use_threads=False
                ),
                parse_options=self._parse,
                convert_options=self._convert,
            )
        except pa.ArrowInvalid as error:
            raise UnparsableError from error
        if table.num_rows != lines:
            raise UnparsableError
        return table.combine_chunks()


def header_of(path: Path, *, delimiter: str, wanted: Sequence[str], kind: str) -> list[str]:
    """The column names in a file's first line.

    Raises:
        DataError: if the file is missing, empty or a directory.
        UnknownNameError: if a wanted column is not there.
    """
    require_file(path)
    names = first_line(path).decode("utf-8-sig", "replace").split(delimiter)
    for name in wanted:
        if name not in names:
            raise unknown_name(f"{kind} column", name, [n for n in names if n], where=f"{path}, line 1")
    return names


def read_small_table(
    path: Path, types: Mapping[str, pa.DataType], *, delimiter: str, kind: str
) -> dict[str, pa.Array]:
    """All rows of a side table (users, items) in memory; a bad line is an error under any policy.

    Raises:
        DataError: if the file is missing, empty or a directory, lacks a column, or a line does not fit.
    """
    names = header_of(path, delimiter=delimiter, wanted=list(types), kind=kind)
    reader = LineReader(
        path,
        parse=DelimitedParser(names, types, delimiter=delimiter),
        diagnose=lambda line: None,
        bad_rows=BadRows(OnBadRow.ERROR, hint="mend the table: no row can be read without it"),
        header_lines=1,
    )
    table = pa.concat_tables([part for _, part in reader.read()]).combine_chunks()
    columns = {name: _one_array(table[name]) for name in types}
    for name, column in columns.items():
        if column.null_count:
            line = column.is_null().to_numpy(zero_copy_only=False).argmax() + 2
            raise DataError(f"{path}, line {line}: column `{name}` has no value", hint="mend the table")
    return columns


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def int_or_none(text: bytes) -> int | None:
    """An integer as any reader of numbers would take it, 0x included, or None."""
    for base in (10, 0):
        try:
            return int(text, base)
        except ValueError:
            continue
    return None


def float_or_none(text: bytes) -> float | None:
    """A number as Python would take it (nan and inf included), or None."""
    try:
        return float(text)
    except ValueError:
        return None
