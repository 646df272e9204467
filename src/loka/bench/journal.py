"""The file of an unfinished run: a line a pair, on disk before the next pair begins.

The first line says what the run is. A kill may tear the last line, which is dropped; a line in the middle
that cannot be read was not torn by a kill, and the file is refused.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from loka.bench.results import PairResult
from loka.errors import ArtifactError, UsageError

if sys.platform != "win32":
    import fcntl

__all__ = ["Journal", "changed_lines", "held_journal"]

_SHOWN = 60


class _Lost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    kernel: str
    reason: str


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of the three."""

    identity: dict[str, Any] | None = None
    pair: PairResult | None = None
    lost: _Lost | None = None


class Journal:
    """What an unfinished run has measured.

    Attributes:
        path: The file.
        pairs: By key, in the order of measurement.
    """

    def __init__(self, path: Path, stream: IO[bytes], identity: Mapping[str, Any]) -> None:
        self.path = path
        self.pairs: dict[str, PairResult] = {}
        self._lost: dict[str, dict[str, str]] = {}
        self._stream = stream
        lines = self._whole_lines()
        if not lines:
            self._append(_Line(identity=dict(identity)))
            return
        changed = changed_lines(lines[0].identity or {}, identity)
        if changed:
            raise UsageError(
                f"`{path}` holds an unfinished run of another kind",
                lines=changed,
                hint="go on with the same options on the same machine, or start over with --overwrite",
            )
        for line in lines[1:]:
            self._take(line)

    def left_out(self, key: str) -> dict[str, str]:
        """Kernels that took the device down at this pair, with what the driver said."""
        return self._lost.get(key, {})

    def add(self, pair: PairResult) -> None:
        """Keep a pair."""
        self._append(_Line(pair=pair))
        self._take(_Line(pair=pair))

    def add_lost(self, key: str, kernel: str, reason: str) -> None:
        """Keep that a kernel took the device down, so that the run goes on without it there."""
        line = _Line(lost=_Lost(key, kernel, f"took the device down: {reason}"))
        self._append(line)
        self._take(line)

    def _take(self, line: _Line) -> None:
        if line.pair is not None:
            self.pairs[line.pair.key] = line.pair
        if line.lost is not None:
            self._lost.setdefault(line.lost.key, {})[line.lost.kernel] = line.lost.reason

    def _whole_lines(self) -> list[_Line]:
        """What can be read; a torn end is cut off, so that what follows begins a line of its own."""
        self._stream.seek(0)
        raw = self._stream.read()
        lines: list[_Line] = []
        begin = 0
        for number, text in enumerate(raw.splitlines(keepends=True), 1):
            try:
                if not text.endswith(b"\n"):
                    break
                lines.append(msgspec.json.decode(text, type=_Line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if begin + len(text) == len(raw):
                    break
                raise ArtifactError(
                    f"`{self.path}`, line {number}, is not of an unfinished run: {error}",
                    hint="start over with --overwrite",
                ) from error
            begin += len(text)
        if lines and lines[0].identity is None:
            raise ArtifactError(
                f"`{self.path}` does not begin with what the run is", hint="start over with --overwrite"
            )
        self._stream.truncate(begin)
        self._stream.seek(begin)
        return lines

    def _append(self, line: _Line) -> None:
        try:
            self._stream.write(msgspec.json.encode(line) + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise ArtifactError(
                f"cannot write `{self.path}`: {error.strerror or error}", hint="check free space"
            ) from error


@contextlib.contextmanager
def held_journal(path: Path, identity: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal of a run, new or gone on with; within the block no other process can have it.

    Raises:
        UsageError: for a journal of a run with another identity, or one that another process holds.
        ArtifactError: for a file that cannot be made, or is no journal.
    """
    try:
        stream = open(path, "a+b")  # noqa: SIM115 - closed below; not truncated before it is locked
    except OSError as error:
        raise ArtifactError(
            f"cannot write `{path}`: {error.strerror or error}", hint="check the folder and permissions"
        ) from error
    with stream:
        _lock(stream, path)
        yield Journal(path, stream, identity)


def _lock(stream: IO[bytes], path: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another process is measuring into `{path}`", hint="wait until it is done, or give another file"
        ) from None
    except OSError:
        return  # some network file systems know no locks


def changed_lines(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each part of an identity that differs."""
    same_form = msgspec.json.decode(msgspec.json.encode(dict(now)))
    return [
        f"{key}: was {_short(before.get(key))}, is {_short(same_form.get(key))}"
        for key in dict.fromkeys((*same_form, *before))
        if before.get(key) != same_form.get(key)
    ]


def _short(value: Any) -> str:
    if isinstance(value, list):
        value = f"{len(value)}: {', '.join(map(str, value))}"
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
