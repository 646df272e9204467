"""From a path to the bytes of its text: which files are meant, plain or gzip, and in what pieces.

Everything streams: at most a few megabytes are held, whatever the size of the file or of a gzip's content.
"""

from __future__ import annotations

import glob
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from loka.errors import DataError

__all__ = ["DamagedGzipError", "byte_pieces", "find_files", "first_line", "require_file", "total_bytes"]

_READ_BYTES = 1 << 18
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's word for "a gzip header and trailer, largest window"


class DamagedGzipError(DataError):
    """A gzip stream that ends early or does not decode; all that came before was handed out."""


def find_files(spec: str) -> tuple[Path, ...]:
    """The files that a path, a comma list of paths or a glob pattern names.

    A path that exists is taken as it stands, commas and stars included. Files of a pattern come sorted by
    name.

    Args:
        spec: `day_0.gz`, `day_0.gz,day_1.gz` or `days/day_*.gz`.

    Raises:
        DataError: if a file is missing, empty, a directory or cannot be opened, or a pattern matches none.
    """
    parts = [spec] if Path(spec).exists() else [part for part in spec.split(",") if part]
    paths: list[Path] = []
    for part in parts:
        if Path(part).exists() or not glob.has_magic(part):
            paths.append(Path(part))
            continue
        found = sorted(glob.glob(part))
        if not found:
            raise DataError(f"no file matches `{part}`", hint="quote the pattern, and check its directory")
        paths += [Path(name) for name in found]
    if not paths:
        raise DataError(
            "no data file is named", hint="give a path, a comma list of paths or a pattern like `day_*.gz`"
        )
    for path in paths:
        require_file(path)
    return tuple(paths)


def require_file(path: Path, *, hint: str | None = None) -> None:
    """Raise DataError unless the path is a readable file that is not empty."""
    if path.is_dir():
        raise DataError(
            f"{path}: is a directory, a file is wanted",
            hint=hint or f"name its files, e.g. `{path}/*` in quotes",
        )
    if not path.exists():
        raise DataError(
            f"{path}: no such file", hint=hint or "check the path; it is taken from the current directory"
        )
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be opened ({error.strerror})", hint="check its permissions"
        ) from error
    if empty:
        raise DataError(f"{path}: is empty (0 bytes)", hint="was the download or the copy cut off?")


def total_bytes(paths: tuple[Path, ...]) -> int:
    """Size of the files on disk, together."""
    return sum(path.stat().st_size for path in paths)


def byte_pieces(path: Path) -> Iterator[bytes]:
    """The file's content in pieces of at most 256 KiB; a gzip file (told by its first bytes) unpacked.

    Raises:
        DamagedGzipError: after the last good piece, if a gzip stream ends early or does not decode.
    """
    with path.open("rb") as file:
        packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        if packed:
            yield from _unpacked(file, path)
        else:
            yield from iter(lambda: file.read(_READ_BYTES), b"")


def _unpacked(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """All members of a gzip file. Output is bounded too: 256 KiB can unpack to 256 MiB."""
    member = zlib.decompressobj(_GZIP_WINDOW)
    data = b""
    try:
        while data or (data := file.read(_READ_BYTES)):
            if member.eof:
                data = data.lstrip(b"\0")  # some writers pad to a block size
                if not data:
                    continue
                member = zlib.decompressobj(_GZIP_WINDOW)
            if piece := member.decompress(data, _READ_BYTES):
                yield piece
            data = member.unused_data if member.eof else member.unconsumed_tail
        if piece := member.flush():
            yield piece
    except zlib.error as error:
        raise DamagedGzipError(f"{path}: gzip stream does not decode ({error})") from error
    if not member.eof:
        raise DamagedGzipError(f"{path}: gzip stream ends early")


def first_line(path: Path, *, limit: int = 1 << 16) -> bytes:
    """A text file's first line without its line end, cut to `limit` bytes (damaged gzip: what is left)."""
    head = b""
    try:
        for piece in byte_pieces(path):
            head += piece
            if b"\n" in head or len(head) >= limit:
                break
    except DamagedGzipError:
        pass  # the reader of the rows will meet the damage and name the line
    return head[:limit].split(b"\n", 1)[0].rstrip(b"\r")
