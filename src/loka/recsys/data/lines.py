"""Line-oriented files: fast while rows are good, exact about the line that is not.

A file is cut into blocks of whole lines. A block goes to a fast parser in one piece. If that refuses, each
line is diagnosed on its own, the bad ones are reported, and the others go to the fast parser again (halved
until the culprit stands alone, should the diagnosis have missed it). So which rows are kept never depends
on where blocks begin.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from loka.errors import DataError
from loka.recsys.data.bad_rows import BadRow, BadRows, shown
from loka.recsys.data.file_text import DamagedGzipError, byte_pieces

__all__ = ["LineBlock", "LineReader", "UnparsableError", "line_blocks"]

BLOCK_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 20

T = TypeVar("T")


class UnparsableError(Exception):
    """A fast parser's refusal of a piece of text; never reaches a caller of a source."""


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines of a file.

    Attributes:
        data: The lines, each ended by a newline.
        first_line: Number of the first one, counted from 1.
        lines: How many.
    """

    data: bytes
    first_line: int
    lines: int


def line_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[LineBlock]:
    """A file, plain or gzip, in blocks of about `block_bytes`.

    Raises:
        DataError: if a line is longer than 1 MiB.
        DamagedGzipError: after the last whole line; names the line that the damage cut.
    """
    parts: list[bytes] = []
    held, line = 0, 1
    try:
        for piece in byte_pieces(path):
            parts.append(piece)
            held += len(piece)
            if held < block_bytes:
                continue
            data = b"".join(parts)
            end = data.rfind(b"\n") + 1
            if end:
                block = LineBlock(data[:end], line, data.count(b"\n", 0, end))
                yield block
                line += block.lines
            parts, held = [data[end:]], len(data) - end
            if held > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {line}: longer than {MAX_LINE_BYTES} bytes", hint="is it a text file?"
                )
    except DamagedGzipError as damage:
        data = b"".join(parts)
        end = data.rfind(b"\n") + 1
        if end:
            block = LineBlock(data[:end], line, data.count(b"\n", 0, end))
            yield block
            line += block.lines
        what = damage.what.removeprefix(f"{path}: ")
        raise DamagedGzipError(f"{path}, line {line}: {what}", hint="fetch or pack the file anew") from damage
    data = b"".join(parts)
    if data:
        data += b"" if data.endswith(b"\n") else b"\n"
        yield LineBlock(data, line, data.count(b"\n"))


class LineReader(Generic[T]):
    """Reads one file line by line in effect, block by block in fact.

    Args:
        path: The file.
        parse: Whole lines and their count -> what they hold; raises UnparsableError if any line is bad.
        diagnose: One line without its line end -> why it is bad, or None. Must not blame a line that
            `parse` takes.
        bad_rows: Told of every bad line.
        header_lines: Lines at the front that are no rows.
        first_row: Row number of the first row; row numbers count bad rows too.
        block_bytes: Size of a block.

    Attributes:
        next_row: Row number after the last one read so far, good or bad.
    """

    def __init__(
        self,
        path: Path,
        *,
        parse: Callable[[bytes, int], T],
        diagnose: Callable[[bytes], BadRow | None],
        bad_rows: BadRows,
        header_lines: int = 0,
        first_row: int = 0,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._path = path
        self._parse = parse
        self._diagnose = diagnose
        self._bad_rows = bad_rows
        self._header_lines = header_lines
        self._first_row = first_row
        self._block_bytes = block_bytes
        self.next_row = first_row

    def read(self) -> Generator[tuple[NDArray[np.int64], T], None, None]:
        """(row numbers int64 [n], the n parsed rows), piece by piece, in rising order.

        Raises:
            DataError: at the first bad line, under OnBadRow.ERROR; if the file holds no rows.
        """
        lines = 0
        try:
            for block in line_blocks(self._path, block_bytes=self._block_bytes):
                lines += block.lines
                header = max(0, min(self._header_lines - block.first_line + 1, block.lines))
                block = _without_front(block, header)
                if block.lines:
                    first = self._first_row + block.first_line - 1 - self._header_lines
                    self.next_row = first + block.lines
                    yield from self._rows(block, first)
        except DamagedGzipError as damage:
            # The row that the damage cut keeps a number of its own, like every other bad row.
            place, _, what = damage.what.partition(": ")
            self._bad_rows.report(self.next_row, place, BadRow("damaged_gzip", what, damage.hint))
            self.next_row += 1
            return
        if lines <= self._header_lines:
            raise DataError(f"{self._path}: holds no rows", hint="was the download or the copy cut off?")

    def _rows(self, block: LineBlock, first: int) -> Iterator[tuple[NDArray[np.int64], T]]:
        try:
            parsed = self._parse(block.data, block.lines)
        except UnparsableError:
            yield from self._salvage(block, first)
            return
        yield np.arange(first, first + block.lines, dtype=np.int64), parsed

    def _salvage(self, block: LineBlock, first: int) -> Iterator[tuple[NDArray[np.int64], T]]:
        lines = block.data.split(b"\n")[:-1]
        bad = {i: why for i, line in enumerate(lines) if (why := self._diagnose(line.removesuffix(b"\r")))}
        parsed: list[tuple[list[int], T]] = []
        todo = [[i for i in range(len(lines)) if i not in bad]]
        while todo:
            part = todo.pop()
            if not part:
                continue
            try:
                parsed.append((part, self._parse(b"".join(lines[i] + b"\n" for i in part), len(part))))
            except UnparsableError:
                if len(part) == 1:
                    bad[part[0]] = BadRow("unreadable", f"row `{shown(lines[part[0]])}` cannot be read")
                    continue
                half = len(part) // 2
                todo += [part[half:], part[:half]]
        for i in sorted(bad):
            self._bad_rows.report(first + i, f"{self._path}, line {block.first_line + i}", bad[i])
        for part, rows in parsed:
            yield np.array(part, dtype=np.int64) + first, rows


def _without_front(block: LineBlock, lines: int) -> LineBlock:
    data = block.data
    for _ in range(lines):
        data = data.partition(b"\n")[2]
    return LineBlock(data, block.first_line + lines, block.lines - lines)
