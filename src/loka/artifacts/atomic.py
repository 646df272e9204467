"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from loka.errors import ArtifactError

__all__ = ["read_bytes", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Put `data` at `path`: a new file beside it, synced to disk, then renamed over it.

    A reader sees the old file or the new one, and a failure leaves the old one untouched.

    Args:
        path: Where to write; a symbolic link keeps pointing at its (replaced) target.
        data: The whole content.

    Raises:
        ArtifactError: naming the path and the system's reason (full disk, no permission, no such folder).
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ArtifactError(f"cannot write `{path}`: it is a directory", hint="name a file inside it")
    if not target.parent.is_dir():
        raise ArtifactError(
            f"cannot write `{path}`: the folder `{target.parent}` does not exist", hint="create the folder"
        )
    beside = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        _write_synced(beside, data)
        os.replace(beside, target)
        _sync_folder(target.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(
            f"cannot write `{path}`: {reason}", hint="check free space and permissions; nothing was changed"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # on a read-only file system even this fails
            beside.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes) -> None:
    # "xb" with the default mode: the file gets the permissions of the user's umask, as any other would.
    with open(path, "xb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system can sync a folder."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_bytes(path: str | os.PathLike[str], *, kind: str) -> bytes:
    """The content of a file that must not be empty.

    Args:
        path: The file.
        kind: What it should be, for the messages: `plan`.

    Raises:
        ArtifactError: for a missing file, a directory, an empty or an unreadable file.
    """
    file = Path(path)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{kind} file `{path}` does not exist", hint=_nearby(file)) from None
    except IsADirectoryError:
        raise ArtifactError(
            f"`{path}` is a directory, a {kind} file is needed", hint=f"try `{file / (kind + '.json')}`"
        ) from None
    except OSError as error:
        raise ArtifactError(f"cannot read `{path}`: {error.strerror or error}") from error
    if not data:
        raise ArtifactError(f"{kind} file `{path}` is empty", hint="write it again")
    return data


def _nearby(file: Path) -> str:
    if not file.parent.is_dir():
        return f"the folder `{file.parent}` does not exist"
    names = sorted(p.name for p in file.parent.iterdir() if p.suffix == file.suffix and p.is_file())
    if not names:
        return "check the path"
    return f"`{file.parent}` has {', '.join(f'`{name}`' for name in names[:8])}"
