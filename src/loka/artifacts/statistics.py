"""Learned statistics on disk: safetensors, keys `<site>/<operand>/<field>`. No pickle.

The header's only metadata key is `loka`, a JSON object with schema and version: one key, because the order
of several is not fixed by the format's writer and equal statistics should give equal bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from loka.artifacts.atomic import read_bytes, write_atomically
from loka.errors import ArtifactError
from loka.numerics import HISTOGRAM_BINS, Moments
from loka.vocab import Operand

__all__ = ["Statistics", "read_statistics", "write_statistics"]

Statistics = dict[str, dict[Operand, Moments]]

_SCHEMA, _VERSION = "loka.statistics", 1
_FIELDS = tuple(f.name for f in fields(Moments))
_PER_FEATURE = {"mean": torch.float64, "m2": torch.float64, "amax": torch.float32}


def write_statistics(
    path: str | os.PathLike[str],
    statistics: Mapping[str, Mapping[Operand, Moments]],
    metadata: Mapping[str, str | int | float] | None = None,
) -> None:
    """Write the statistics of every operand, whole or not at all.

    Args:
        path: The file; its folder must exist.
        statistics: Site name to operand to moments, on any device.
        metadata: Small facts to keep beside them (steps seen, model, seed).

    Raises:
        ArtifactError: for a tensor with NaN or infinity, or an unwritable file.
    """
    tensors: dict[str, Tensor] = {}
    for site, operands in statistics.items():
        for operand, moments in operands.items():
            for field, tensor in moments.tensors().items():
                key = f"{site}/{Operand(operand)}/{field}"
                if not bool(torch.isfinite(tensor).all()):
                    raise ArtifactError(f"`{os.fspath(path)}` at `{key}`: not every element is finite")
                tensors[key] = tensor.detach().cpu().contiguous()
    header = {"schema": _SCHEMA, "version": _VERSION, "facts": dict(metadata or {})}
    text = msgspec.json.encode(header, order="deterministic").decode()
    write_atomically(path, save(tensors, metadata={"loka": text}))


def read_statistics(path: str | os.PathLike[str]) -> tuple[Statistics, dict[str, Any]]:
    """Read what `write_statistics` wrote.

    Returns:
        Site to operand to moments on the CPU, and the metadata.

    Raises:
        ArtifactError: for a file that is not safetensors, of another schema or version, or whose tensors are
            not those of moments.
    """
    where = os.fspath(path)
    read_bytes(path, kind="statistics")
    try:
        with safe_open(where, framework="pt", device="cpu") as file:
            header = (file.metadata() or {}).get("loka")
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ArtifactError(
            f"`{where}` is not a statistics file: {error}", hint="statistics are safetensors"
        ) from error
    facts = _facts(header, where)
    return _grouped(tensors, where), facts


def _facts(header: str | None, where: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(header or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError):
        decoded = {}
    if decoded.get("schema") != _SCHEMA:
        raise ArtifactError(
            f"`{where}` holds tensors that are not LoKA's statistics",
            hint="give a file written by `loka probe`",
        )
    if decoded.get("version") != _VERSION:
        raise ArtifactError(
            f"`{where}` holds statistics of version {decoded.get('version')}, this LoKA reads {_VERSION}",
            hint="probe again, or upgrade LoKA",
        )
    facts = decoded.get("facts", {})
    return facts if isinstance(facts, dict) else {}


def _grouped(tensors: dict[str, Tensor], where: str) -> Statistics:
    parts: dict[tuple[str, Operand], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        site, operand, field = _split(key, where)
        parts.setdefault((site, operand), {})[field] = tensor
    out: Statistics = {}
    for (site, operand), found in parts.items():
        missing = [name for name in _FIELDS if name not in found]
        if missing:
            raise ArtifactError(f"`{where}` at `{site}/{operand}`: `{missing[0]}` is missing")
        for field, tensor in found.items():
            _check_tensor(f"{site}/{operand}/{field}", field, tensor, found["mean"].numel(), where)
        out.setdefault(site, {})[operand] = Moments(**found)
    return out


def _split(key: str, where: str) -> tuple[str, Operand, str]:
    pieces = key.rsplit("/", 2)
    if len(pieces) != 3 or pieces[1] not in list(Operand) or pieces[2] not in _FIELDS:
        raise ArtifactError(f"`{where}` at `{key}`: unknown tensor", hint="keys are <site>/<operand>/<field>")
    return pieces[0], Operand(pieces[1]), pieces[2]


def _check_tensor(key: str, field: str, tensor: Tensor, features: int, where: str) -> None:
    shape = (features,) if field in _PER_FEATURE else (HISTOGRAM_BINS,) if field == "exponents" else ()
    dtype = _PER_FEATURE.get(field, torch.int64)
    if tensor.shape != shape or tensor.dtype is not dtype:
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ArtifactError(f"`{where}` at `{key}`: expected {dtype} of shape {shape}, got {got}")
    if not bool(torch.isfinite(tensor).all()):
        raise ArtifactError(f"`{where}` at `{key}`: not every element is finite")
