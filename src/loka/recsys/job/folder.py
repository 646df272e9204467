"""The folder of a run: taken only when it is empty, one's own to resume, or a run to be overwritten."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loka.artifacts import read_record, write_record
from loka.errors import ArtifactError, UsageError
from loka.recsys.training.checkpoint import CHECKPOINT_NAME

if sys.platform != "win32":
    import fcntl

__all__ = [
    "COMPARISON_NAME",
    "METRICS_NAME",
    "PLAN_NAME",
    "PROFILE_NAME",
    "RUN_NAME",
    "STATISTICS_NAME",
    "held_folder",
    "take_folder",
]

logger = logging.getLogger("loka")

RUN_NAME = "run.json"
PROFILE_NAME = "profile.json"
STATISTICS_NAME = "statistics.safetensors"
PLAN_NAME = "plan.json"
COMPARISON_NAME = "comparison.json"
METRICS_NAME = "metrics.json"

_OURS = (
    RUN_NAME,
    PROFILE_NAME,
    STATISTICS_NAME,
    PLAN_NAME,
    COMPARISON_NAME,
    METRICS_NAME,
    CHECKPOINT_NAME,
)
_NAMES = "|".join(re.escape(name) for name in _OURS)
_PREDICTIONS = r"predictions-\w+(-seed-\d+)?\.parquet"
_RUN_FILE = re.compile(rf"({_NAMES}|{_PREDICTIONS})|\.({_NAMES})\.[0-9a-f]+\.tmp|{_PREDICTIONS}\.part")
_ARM = r"seed-\d+(/[A-Za-z0-9][A-Za-z0-9_.-]*)?"
# With what a kill may leave of a checkpoint that was being written.
_RUN_FOLDER = re.compile(rf"{_ARM}|({_ARM}/)?{re.escape(CHECKPOINT_NAME)}\.writing")


@contextlib.contextmanager
def held_folder(
    directory: Path, identity: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
) -> Iterator[None]:
    """`take_folder`; within the block no other process can do so.

    The lock is the system's own on the folder: nothing is written for it, and a kill releases it.

    Raises:
        UsageError: as `take_folder`, or while another process works in the folder.
        ArtifactError: as `take_folder`.
    """
    with contextlib.ExitStack() as stack:
        existed = directory.is_dir()
        if existed:
            stack.enter_context(_alone_in(directory))
        take_folder(directory, identity, resume=resume, overwrite=overwrite)
        if not existed:
            stack.enter_context(_alone_in(directory))
        yield


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is working in the folder `{directory}`",
                hint="wait until it is done, or use another folder",
            ) from None
        except OSError as error:
            logger.debug("the folder %s cannot be locked: %s", directory, error)  # some network file systems
        yield
    finally:
        os.close(handle)


def take_folder(
    directory: Path, identity: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
) -> None:
    """Make the folder of a run, with its `run.json`.

    Args:
        directory: Made if it does not exist.
        identity: What the run is, plain values; kept in `run.json`.
        resume: A folder that holds this very run is taken as it is.
        overwrite: A folder that holds a run, and nothing that LoKA did not write, is emptied first.

    Raises:
        UsageError: for a folder that holds something else, another run, or a run without `resume` or
            `overwrite`.
        ArtifactError: for a folder that cannot be made or emptied.
    """
    if resume and overwrite:
        raise UsageError(
            "resume and overwrite exclude each other", hint="go on with the run, or start it over"
        )
    record = directory / RUN_NAME
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(identity)))
    if record.exists() and resume:
        _check_same(directory, read_record(record, "loka.run").body, plain)
        return
    try:
        if overwrite and directory.is_dir() and any(directory.iterdir()):
            _empty(directory)
        if directory.is_dir() and any(directory.iterdir()):
            hint = "--resume goes on with the run in it, --overwrite starts over"
            hint = hint if record.exists() else "give a folder that is empty or does not exist"
            raise UsageError(f"the folder `{directory}` is not empty", hint=hint)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"cannot make the folder `{error.filename or directory}`: {error.strerror or error}",
            hint="give another folder, or check permissions",
        ) from error
    write_record(record, "loka.run", plain)


def _check_same(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [
        f"{key}: was {before.get(key)}, is {now.get(key)}"
        for key in dict.fromkeys((*now, *before))
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise UsageError(
            f"the folder `{directory}` holds another run",
            lines=changed,
            hint="resume with the same options, or use another folder",
        )


def _empty(directory: Path) -> None:
    """Delete the files of a run; nothing is deleted where anything else lies between them."""
    record = directory / RUN_NAME
    if not record.is_file():
        raise UsageError(
            f"the folder `{directory}` holds no run to overwrite: it has no {RUN_NAME}",
            hint="give a folder that is empty or does not exist",
        )
    read_record(record, "loka.run")
    inside = sorted(directory.rglob("*"), key=lambda path: len(path.parts), reverse=True)
    foreign = [path for path in inside if not _is_ours(path, directory)]
    if foreign:
        raise UsageError(
            f"the folder `{directory}` also holds what LoKA did not write there",
            lines=[str(path.relative_to(directory)) for path in sorted(foreign)[:8]],
            hint="move it elsewhere, or use another folder",
        )
    for path in inside:
        # The record goes last: a deletion that is stopped half-way can be taken up again.
        if path != record:
            path.rmdir() if path.is_dir() else path.unlink()
    record.unlink()


def _is_ours(path: Path, directory: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        return _RUN_FOLDER.fullmatch(path.relative_to(directory).as_posix()) is not None
    parent = path.parent.relative_to(directory).as_posix()
    known = parent == "." or _RUN_FOLDER.fullmatch(parent) is not None
    return known and _RUN_FILE.fullmatch(path.name) is not None
