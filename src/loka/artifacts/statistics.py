"""Learned statistics on disk: safetensors, keys `<site>/<operand>/<part>.<field>`. No pickle.

The header's only metadata key is `loka`, a JSON object with schema and version: one key, because the order
of several is not fixed by the format's writer and equal statistics should give equal bytes. Version 1 held
moments alone, as `<site>/<operand>/<field>`, without `row_exponents`; it is read, and what it lacks is empty.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from loka.artifacts.atomic import read_bytes, write_atomically
from loka.errors import ArtifactError
from loka.numerics import HISTOGRAM_BINS, Moments, OperandStatistics
from loka.vocab import Operand

__all__ = [
    "BackgroundWrite",
    "Statistics",
    "read_statistics",
    "write_statistics",
    "write_statistics_in_background",
]

Statistics = dict[str, dict[Operand, OperandStatistics]]
# Moments alone may be written too; what else there is to know of the operand is empty then.
_Known = Mapping[str, Mapping[Operand, OperandStatistics | Moments]]
_Facts = Mapping[str, str | int | float]

_SCHEMA, _VERSION = "loka.statistics", 2
_OPTIONAL = ("covariance.", "marginals.")
# Files of version 2 written before there were these lack them; they are unknown then.
_LATER = tuple(f"marginals.{name}" for name in ("fine_counts", "fine_inside", "fine_squares", "digits"))


def write_statistics(
    path: str | os.PathLike[str], statistics: _Known, metadata: _Facts | None = None
) -> None:
    """Write the statistics of every operand, whole or not at all.

    Args:
        path: The file; its folder must exist.
        statistics: Site name to operand to statistics, on any device.
        metadata: Small facts to keep beside them (steps seen, model, seed).

    Raises:
        ArtifactError: for a tensor with NaN or infinity, or an unwritable file.
    """
    _write(path, _on_the_host(statistics), dict(metadata or {}))


class BackgroundWrite:
    """A file that is being written by a thread; made by `write_statistics_in_background`."""

    def __init__(self, written: Future[None]) -> None:
        self._written = written

    def close(self) -> None:
        """Wait until the file is on disk.

        Raises:
            ArtifactError: what went wrong in the thread.
        """
        self._written.result()


def write_statistics_in_background(
    path: str | os.PathLike[str],
    statistics: _Known,
    metadata: _Facts | None = None,
    *,
    after: BackgroundWrite | None = None,
) -> BackgroundWrite:
    """Copy the statistics to the host, then let a thread write them as `write_statistics` does.

    What is in the file is what was known at the call, however training goes on meanwhile.

    Args:
        path: The file; its folder must exist.
        statistics: Site name to operand to statistics, on any device.
        metadata: Small facts to keep beside them.
        after: An earlier write that must be over first: two at once would hold two copies on the host.

    Returns:
        The write under way; its `close` waits for it.

    Raises:
        ArtifactError: what went wrong in the earlier write.
    """
    if after is not None:
        after.close()
    copied = _on_the_host(statistics)
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loka-statistics")
    written = writer.submit(_write, path, copied, dict(metadata or {}))
    writer.shutdown(wait=False)
    return BackgroundWrite(written)


def _on_the_host(statistics: _Known) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for site, operands in statistics.items():
        for operand, known in operands.items():
            whole = OperandStatistics(known) if isinstance(known, Moments) else known
            for field, tensor in whole.tensors().items():
                tensors[f"{site}/{Operand(operand)}/{field}"] = tensor.detach().cpu().contiguous()
    return tensors


def _write(path: str | os.PathLike[str], tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    for key, tensor in tensors.items():
        _check_finite(key, tensor, os.fspath(path))
    header = {"schema": _SCHEMA, "version": _VERSION, "facts": facts}
    text = msgspec.json.encode(header, order="deterministic").decode()
    write_atomically(path, save(tensors, metadata={"loka": text}))


def read_statistics(path: str | os.PathLike[str]) -> tuple[Statistics, dict[str, Any]]:
    """Read what `write_statistics` wrote, or a file of version 1.

    Returns:
        Site to operand to statistics on the CPU, and the metadata.

    Raises:
        ArtifactError: for a file that is not safetensors, of another schema or version, or whose tensors are
            not those of statistics.
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
    version, facts = _header(header, where)
    return _grouped(tensors, version, where), facts


def _header(header: str | None, where: str) -> tuple[int, dict[str, Any]]:
    try:
        decoded = msgspec.json.decode(header or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError):
        decoded = {}
    if decoded.get("schema") != _SCHEMA:
        raise ArtifactError(
            f"`{where}` holds tensors that are not LoKA's statistics",
            hint="give a file written by `loka probe`",
        )
    version = decoded.get("version")
    if version not in (_VERSION - 1, _VERSION):
        raise ArtifactError(
            f"`{where}` holds statistics of version {version}, this LoKA reads {_VERSION - 1} and {_VERSION}",
            hint="probe again, or upgrade LoKA",
        )
    facts = decoded.get("facts", {})
    return int(version), facts if isinstance(facts, dict) else {}


def _grouped(tensors: dict[str, Tensor], version: int, where: str) -> Statistics:
    parts: dict[tuple[str, Operand], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        pieces = key.rsplit("/", 2)
        if len(pieces) != 3 or pieces[1] not in list(Operand):
            raise _unknown(key, where)
        field = f"moments.{pieces[2]}" if version == 1 else pieces[2]
        parts.setdefault((pieces[0], Operand(pieces[1])), {})[field] = tensor
    out: Statistics = {}
    for (site, operand), found in parts.items():
        if version == 1:
            found.setdefault("moments.row_exponents", torch.zeros(HISTOGRAM_BINS, dtype=torch.int64))
        _check(f"{site}/{operand}", found, version, where)
        out.setdefault(site, {})[operand] = OperandStatistics.from_tensors(found)
    return out


def _check(name: str, found: dict[str, Tensor], version: int, where: str) -> None:
    """Every tensor has the place, dtype and shape that statistics of so many features have."""
    mean = found.get("moments.mean")
    features = 0 if mean is None else mean.numel()
    expected = OperandStatistics.empty(features, "meta", distributions=True).tensors()
    if version == 1:
        expected = {field: like for field, like in expected.items() if field.startswith("moments.")}
    cut = len("moments.") if version == 1 else 0  # a message names what the file has
    unknown = [field for field in found if field not in expected]
    if unknown:
        raise _unknown(f"{name}/{unknown[0][cut:]}", where)
    given = tuple({part for part in _OPTIONAL if any(field.startswith(part) for field in found)})
    for field, like in expected.items():
        if field in found:
            _check_tensor(f"{name}/{field[cut:]}", found[field], like, where)
        elif field not in _LATER and (field.startswith(given) or not field.startswith(_OPTIONAL)):
            raise ArtifactError(f"`{where}` at `{name}`: `{field[cut:]}` is missing")


def _check_tensor(key: str, tensor: Tensor, like: Tensor, where: str) -> None:
    if tensor.shape != like.shape or tensor.dtype is not like.dtype:
        wanted = f"{like.dtype} of shape {tuple(like.shape)}"
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ArtifactError(f"`{where}` at `{key}`: expected {wanted}, got {got}")
    _check_finite(key, tensor, where)


def _check_finite(key: str, tensor: Tensor, where: str) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ArtifactError(f"`{where}` at `{key}`: not every element is finite")


def _unknown(key: str, where: str) -> ArtifactError:
    return ArtifactError(
        f"`{where}` at `{key}`: unknown tensor", hint="keys are <site>/<operand>/<part>.<field>"
    )
