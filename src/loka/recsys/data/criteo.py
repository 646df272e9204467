"""The Criteo click logs (Kaggle Display Advertising, Terabyte): tab-separated text without a header.

A line is `label, I1 .. I13, C1 .. C26`: the label 0 or 1, integers that may be negative or empty, and
categories of 8 hex digits that may be empty; files are plain or gzip. A category's id is the hash of
(field, its 32-bit value), see `loka.recsys.data.hashing`; an empty one has id 0. An empty integer becomes 0.

Text is parsed by pyarrow in blocks of whole lines; hex digits are decoded eight at a time in 64-bit words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from loka.recsys.batch import FieldSchema, Schema
from loka.recsys.data.bad_rows import BadRow, shown
from loka.recsys.data.blocks import Block, BlockSource, IdColumn
from loka.recsys.data.dense import DenseTransform, transform
from loka.recsys.data.file_text import find_files, total_bytes
from loka.recsys.data.hashing import check_cardinality, int_ids
from loka.recsys.data.lines import BLOCK_BYTES, LineReader, UnparsableError
from loka.recsys.data.read_ahead import read_ahead
from loka.recsys.source import OnBadRow

__all__ = ["CATEGORIES", "INTEGERS", "CriteoSource", "hex_words"]

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
_COLUMNS = 1 + len(INTEGERS) + len(CATEGORIES)

# Every byte of a good line. Whatever else is in a block sends it to the diagnosis, so that pyarrow's own
# liberties with numbers (blanks, 0x) never decide what is a row.
_ALLOWED = b"0123456789abcdefABCDEF-\t\r\n"
_INTEGER = re.compile(rb"-?[0-9]+")
_HEX8 = re.compile(rb"[0-9a-fA-F]{8}")


class CriteoSource(BlockSource):
    """Rows of one or several Criteo files, in file order, streamed.

    Args:
        files: A path, a comma list of paths or a glob pattern.
        cardinality: Ids of each of the 26 fields, 0 ("missing") included; categories are hashed into the
            rest.
        transform: What is done to the 13 integers: `log1p` is sign(x) * log(1 + |x|).
        on_bad_row: What to do with rows that cannot be read.
        block_bytes: Text parsed at once; memory grows with it, the rows do not depend on it.

    Raises:
        DataError: if a file is missing, empty or a directory.
        UsageError: if the cardinality is not in [2, 2**31].
    """

    def __init__(
        self,
        files: str,
        *,
        cardinality: int = 65_536,
        transform: DenseTransform = DenseTransform.LOG1P,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        for name in CATEGORIES:
            check_cardinality(cardinality, field=name)
        schema = Schema(INTEGERS, tuple(FieldSchema(name, cardinality) for name in CATEGORIES))
        super().__init__("criteo", schema, on_bad_row=on_bad_row)
        self._given = files
        self._paths = find_files(files)
        self._cardinality = cardinality
        self._transform = transform
        self._block_bytes = block_bytes

    def identity(self) -> dict[str, str | int | float]:
        """Path as given, bytes on disk and options."""
        return {
            "kind": self.name,
            "path": self._given,
            "files": len(self._paths),
            "bytes": total_bytes(self._paths),
            "cardinality": self._cardinality,
            "transform": self._transform.value,
            "on_bad_row": self._bad_rows.policy.value,
        }

    def _blocks(self) -> Iterator[Block]:
        first_row = 0
        for path in self._paths:
            reader = LineReader(
                path,
                parse=parse_lines,
                diagnose=diagnose,
                bad_rows=self._bad_rows,
                first_row=first_row,
                block_bytes=self._block_bytes,
            )
            for rows, parsed in read_ahead(reader.read()):
                yield self._block(rows, parsed)
            first_row = reader.next_row

    def _block(self, rows: NDArray[np.int64], parsed: _Parsed) -> Block:
        dense = transform(parsed.integers.astype(np.float32), self._transform)
        ids = []
        for name, words, present in zip(CATEGORIES, parsed.words, parsed.present, strict=True):
            hashed = int_ids(words, field=name, cardinality=self._cardinality)
            if present is None:
                ids.append(IdColumn(hashed))
            else:
                column = np.zeros(len(rows), dtype=np.int64)
                column[present] = hashed
                ids.append(IdColumn(column))
        return Block(rows, np.ascontiguousarray(dense.T), tuple(ids), parsed.labels[:, None])


@dataclass(frozen=True, slots=True)
class _Parsed:
    """n good lines.

    labels float32 [n]; integers int64 [13, n], 0 where empty; for each category its 32-bit values
    uint64 [m], and where they are: bool [n], or None if m = n.
    """

    labels: NDArray[np.float32]
    integers: NDArray[np.int64]
    words: tuple[NDArray[np.uint64], ...]
    present: tuple[NDArray[np.bool_] | None, ...]


def hex_words(digits: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], bool]:
    """Decode texts of 8 hex digits, each as the little-endian 64-bit word of its ASCII bytes.

    Args:
        digits: uint64 [n]. Bytes other than hex digits are noticed if they are below 0x40 with bit 4 clear,
            which all that can be left of `_ALLOWED` is.

    Returns:
        The values (uint64 [n], below 2**32), and whether all bytes were hex digits.
    """
    ones = np.uint64(0x0101010101010101)
    letter = (digits >> np.uint64(6)) & ones
    figure = (digits >> np.uint64(4)) & ones
    valid = bool(((letter | figure) == ones).all())
    x = (digits & np.uint64(0x0F0F0F0F0F0F0F0F)) + letter * np.uint64(9)
    x = ((x << np.uint64(4)) | (x >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    x = ((x << np.uint64(8)) | (x >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    x = ((x << np.uint64(16)) | (x >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return x, valid


_NAMES = ["label", *INTEGERS, *CATEGORIES]
_PARSE = pa_csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False)
_CONVERT = pa_csv.ConvertOptions(
    column_types={
        "label": pa.int64(),
        **{name: pa.int64() for name in INTEGERS},
        **{name: pa.binary() for name in CATEGORIES},
    },
    null_values=[""],
    strings_can_be_null=False,
)


def parse_lines(data: bytes, lines: int) -> _Parsed:
    """Parse whole lines at once.

    Raises:
        UnparsableError: if any line is not a good row; which one, `diagnose` tells.
    """
    if data.translate(None, _ALLOWED):
        raise UnparsableError
    try:
        table = pa_csv.read_csv(
            pa.py_buffer(data),
            # One chunk and no threads of pyarrow's own: the next block is read ahead in a thread of ours.
            read_options=pa_csv.ReadOptions(
                column_names=_NAMES, block_size=max(len(data), 1 << 10), use_threads=False
            ),
            parse_options=_PARSE,
            convert_options=_CONVERT,
        )
    except pa.ArrowInvalid as error:
        raise UnparsableError from error
    if table.num_rows != lines or table["label"].null_count:
        raise UnparsableError  # e.g. a lone carriage return, which pyarrow takes for a line end
    labels = _numbers(table["label"])
    if not ((labels == 0) | (labels == 1)).all():
        raise UnparsableError
    integers = np.stack([_numbers(table[name].fill_null(0)) for name in INTEGERS])
    words, present = zip(*(_categories(table[name]) for name in CATEGORIES), strict=True)
    return _Parsed(labels.astype(np.float32), integers, words, present)


def _numbers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    values: NDArray[np.int64] = column.to_numpy()
    return values


def _categories(column: pa.ChunkedArray) -> tuple[NDArray[np.uint64], NDArray[np.bool_] | None]:
    array = column.combine_chunks()
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    present = np.diff(offsets) == 8
    count = int(present.sum())
    if count * 8 != int(offsets[-1] - offsets[0]):
        raise UnparsableError  # some text is neither empty nor 8 long
    if not count:
        return np.empty(0, dtype=np.uint64), present
    words, valid = hex_words(np.frombuffer(data_buffer, dtype="<u8", offset=int(offsets[0]), count=count))
    if not valid:
        raise UnparsableError
    return words, None if count == len(array) else present


def diagnose(line: bytes) -> BadRow | None:
    """Why a line (without its line end) is not a row, or None."""
    fields = line.split(b"\t")
    if len(fields) != _COLUMNS:
        return BadRow(
            "wrong_field_count",
            f"{len(fields)} tab-separated fields, a Criteo row has {_COLUMNS} (label, I1..I13, C1..C26)",
        )
    if not (_INTEGER.fullmatch(fields[0]) and int(fields[0]) in (0, 1)):
        return BadRow("bad_label", f"label `{shown(fields[0])}` is neither 0 nor 1")
    for name, text in zip(INTEGERS, fields[1:14], strict=True):
        if text.strip().lower().lstrip(b"+-") == b"nan":
            return BadRow("nan_dense", f"dense feature {name} is NaN (`{shown(text)}`)")
        if text and not (_INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63):
            return BadRow("bad_dense", f"dense feature {name} is `{shown(text)}`, not a 64-bit integer")
    for name, text in zip(CATEGORIES, fields[14:], strict=True):
        if text and not _HEX8.fullmatch(text):
            return BadRow("bad_categorical", f"categorical {name} is `{shown(text)}`, not 8 hex digits")
    return None
