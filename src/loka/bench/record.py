"""The record of `loka bench gemm`: written from the pairs, and read back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loka.artifacts import BENCHMARK, read_envelope
from loka.bench.journal import changed_lines
from loka.bench.results import KernelRow, PairResult, columns_of, rows_of
from loka.bench.settings import GemmBench
from loka.bench.summary import metrics_of
from loka.bench.time_pair import DROP_SLOWER_THAN
from loka.errors import ArtifactError, UsageError

__all__ = ["GemmResult", "partial_path", "result_of", "take_record"]

logger = logging.getLogger("loka")

_KIND = "gemm"
_NOTES = (
    "a total is every cast of both operands, the product and the bias, each pair by itself; activations and "
    "gradients arrive in bf16, weights are fp32, y and dx leave in bf16, dw in fp32",
    "bf16 pays for its copy of the weight in fwd, not in dgrad, and for the fp32 copy of dw",
    "picked on the even rounds, judged on the odd ones; FP8 is picked where the median ratio is 1.05 or more "
    "and its interval lies above 1; slower means a median ratio under 0.98",
    f"a kernel more than {DROP_SLOWER_THAN:g} times slower than the fastest is dropped early",
    "L2-cold; the clock's own cost is not subtracted",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmResult:
    """What came out.

    Attributes:
        pairs: In the order of the settings.
        metrics: As in the record.
        details: As in the record.
    """

    pairs: tuple[PairResult, ...]
    metrics: dict[str, float]
    details: dict[str, Any]


def partial_path(record: Path) -> Path:
    """Where a run keeps what it has measured until the record is written."""
    return record.with_name(record.name + ".partial.jsonl")


def result_of(
    settings: GemmBench,
    results: Sequence[PairResult],
    *,
    identity: Mapping[str, Any],
    seconds: Mapping[str, float],
    overhead_us: float,
) -> GemmResult:
    """Metrics and tables.

    Args:
        settings: What was measured.
        results: Of every pair, in the settings' order.
        identity: Of the run.
        seconds: Time that this process spent, by what it was spent on.
        overhead_us: What the clock sees for nothing.
    """
    metrics = {**metrics_of(results), "clock_overhead_us": overhead_us}
    details = {
        "bench": _KIND,
        "identity": dict(identity),
        "models": {shape.key: " ".join(shape.models) for shape in settings.shapes if shape.models},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        **_tables(results),
        "notes": list(_NOTES),
    }
    return GemmResult(pairs=tuple(results), metrics=metrics, details=details)


def _tables(results: Sequence[PairResult]) -> dict[str, Any]:
    """Columns of pairs and of kernels, and how often each kernel was refused for which reason."""
    shallow = [msgspec.structs.replace(pair, kernels=(), refused={}) for pair in results]
    pairs = columns_of(shallow, PairResult)
    refused: dict[str, dict[str, int]] = {}
    for name, reason in ((n, r) for pair in results for n, r in pair.refused.items()):
        reasons = refused.setdefault(name, {})
        reasons[reason] = reasons.get(reason, 0) + 1
    rows = [(pair.key, row) for pair in results for row in pair.kernels]
    return {
        "pairs": {name: pairs[name] for name in pairs if name not in ("kernels", "refused")},
        "kernels": {"key": [key for key, _ in rows], **columns_of([row for _, row in rows], KernelRow)},
        "refused": refused,
    }


def take_record(
    record: Path, identity: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> GemmResult | None:
    """See that the record may be written.

    Args:
        record: The file.
        identity: Of the run that would write it.
        resume: Go on with an unfinished run, or take a finished one.
        overwrite: Delete an unfinished run and allow a finished one to be replaced.

    Returns:
        The finished record of this very run where it is asked for again, else None.

    Raises:
        UsageError: for a record or an unfinished run that is there and neither flag, or that is another's.
        ArtifactError: for a file that cannot be read, or a folder that does not exist.
    """
    if resume and overwrite:
        raise UsageError(
            "resume and overwrite exclude each other", hint="go on with the run, or start it over"
        )
    if record.is_dir() or not record.parent.is_dir():
        what = "it is a directory" if record.is_dir() else f"the folder `{record.parent}` does not exist"
        raise ArtifactError(f"cannot write `{record}`: {what}", hint="name a file in a folder that exists")
    partial = partial_path(record)
    finished = _finished(record) if record.exists() else None
    if overwrite:
        partial.unlink(missing_ok=True)
        return None
    if partial.exists() and not resume:
        raise UsageError(
            f"`{partial}` holds an unfinished run",
            hint="--resume goes on with it, --overwrite starts over",
        )
    if finished is None or partial.exists():
        return None
    if not resume:
        raise UsageError(f"the record `{record}` exists", hint="--overwrite measures again and replaces it")
    changed = changed_lines(finished.details["identity"], identity)
    if changed:
        raise UsageError(
            f"the record `{record}` is of another run",
            lines=changed,
            hint="give another file, or replace it with --overwrite",
        )
    logger.info("`%s` is complete", record)
    return finished


def _finished(record: Path) -> GemmResult:
    """A record that `bench_gemm` wrote; anything else is not overwritten."""
    body = read_envelope(record, BENCHMARK).body
    details = body.details
    if not isinstance(details, dict) or details.get("bench") != _KIND:
        raise UsageError(
            f"`{record}` is no record of `loka bench {_KIND}`", hint="give another file, or move it away"
        )
    kernels = dict(details["kernels"])
    keys = kernels.pop("key")
    rows = list(zip(keys, rows_of(kernels, KernelRow), strict=True))
    pairs = tuple(
        msgspec.structs.replace(pair, kernels=tuple(row for key, row in rows if key == pair.key))
        for pair in rows_of(details["pairs"], PairResult)
    )
    return GemmResult(pairs=pairs, metrics=dict(body.metrics), details=details)
