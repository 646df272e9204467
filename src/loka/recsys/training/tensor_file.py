"""Tensors with a JSON document in one safetensors file that is replaced whole or not at all. No pickle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loka.errors import ArtifactError

__all__ = ["read_tensor_file", "write_tensor_file"]

_DOCUMENT_KEY = "loka"


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two share memory, which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        on_host = tensor.detach().cpu().contiguous()
        if on_host.numel() and on_host.untyped_storage().data_ptr() in seen:
            on_host = on_host.clone()
        seen.add(on_host.untyped_storage().data_ptr())
        result[name] = on_host
    return result


def _sync(path: Path) -> None:
    """Wait until a file or the entries of a folder have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], *, document: Mapping[str, Any]) -> None:
    """Write tensors and a JSON document; at every moment `path` is the old file or the new one, complete.

    The new file is made in a folder beside it (`<name>.writing`), synced and renamed over the old one. A kill
    leaves at most that folder, which the next write clears.

    Args:
        path: Where; an older file is replaced.
        tensors: Any dtype, device and strides.
        document: JSON values; numbers must be finite.

    Raises:
        ArtifactError: if the file cannot be written (full disk, no permission, no such folder).
    """
    staging = path.with_name(path.name + ".writing")
    text = json.dumps(document, allow_nan=False)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        part = staging / path.name
        part.touch()
        mode = part.stat().st_mode  # what the user's umask allows; safetensors would leave 0600
        save_file(_plain(tensors), part, metadata={_DOCUMENT_KEY: text})
        part.chmod(mode)
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"cannot write {path}: {error}",
            hint="check that the folder can be written and the disk has room; an older file there is intact",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_tensor_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensor_file` wrote.

    Returns:
        The tensors on the CPU, and the document.

    Raises:
        ArtifactError: if the file is missing, damaged, or holds no document of LoKA's.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no file {path}") from error
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"{path} is not a whole safetensors file: {error}",
            hint="delete this file to train that part again, or fetch an undamaged copy",
        ) from error
    try:
        document = json.loads(metadata[_DOCUMENT_KEY])
    except (KeyError, json.JSONDecodeError) as error:
        raise ArtifactError(
            f"{path} was not written by LoKA: it carries no `{_DOCUMENT_KEY}` document"
        ) from error
    return tensors, document
