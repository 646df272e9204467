"""`loka bench gemm`: every usable kernel at every pair of shape and pass, into one record."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from loka.artifacts import describe_environment, write_benchmark
from loka.bench.journal import Journal, held_journal
from loka.bench.prepare import prepare
from loka.bench.record import GemmResult, partial_path, result_of, take_record
from loka.bench.results import PairResult
from loka.bench.settings import GemmBench
from loka.bench.time_pair import PairTimer, blamed
from loka.timing import DeviceLostError, clock_overhead_us

__all__ = ["bench_gemm"]

logger = logging.getLogger("loka")

OnPair = Callable[[int, int, PairResult | None], object]


def bench_gemm(
    settings: GemmBench,
    *,
    record: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    commit: str | None = None,
    workers: int = 0,
    on_pair: OnPair | None = None,
) -> GemmResult:
    """Measure every pair.

    Args:
        settings: What and where.
        record: The file to write; None writes nothing.
        resume: Go on with the unfinished run beside `record`, if there is one. A finished record of the
            same run is read and returned.
        overwrite: Delete an unfinished run and replace a record of an earlier one.
        commit: Of the code, where the checkout does not say.
        workers: Processes that compile and vet beside each other first; 0 does it in this process, pair by
            pair.
        on_pair: Told how many pairs are done, of how many, and the last one (None before the first).

    Raises:
        UsageError: for a record or an unfinished run that is there and neither flag, or that is another's.
        ArtifactError: for a file that cannot be read or written.
        DeviceLostError: where a kernel left the GPU unusable. It is noted: a resumed run leaves that kernel
            out there.
    """
    where = torch.device(settings.device)
    overhead = clock_overhead_us(device=where)
    environment = describe_environment()
    if commit is not None:
        environment = msgspec.structs.replace(environment, commit=commit)
    identity = settings.identity(environment)
    if record is not None:
        done = take_record(record, identity, resume=resume, overwrite=overwrite)
        if done is not None:
            return done
    timer = PairTimer(where, settings.chosen(), settings.rounds)
    with _journal(record, identity) as journal:
        if workers:
            begun = time.monotonic()
            timer.verdicts = prepare(
                settings,
                workers=workers,
                left_out=_lost(settings, journal),
                done=() if journal is None else journal.pairs,
            )
            timer.seconds["preparing"] = time.monotonic() - begun
        results = _run(settings, timer, journal, on_pair)
        result = result_of(settings, results, identity=identity, seconds=timer.seconds, overhead_us=overhead)
        if record is not None and journal is not None:
            write_benchmark(record, result.metrics, result.details, environment=environment)
            journal.path.unlink(missing_ok=True)
    return result


def _lost(settings: GemmBench, journal: Journal | None) -> Mapping[str, Mapping[str, str]]:
    return {} if journal is None else {pair.key: journal.left_out(pair.key) for pair in settings.pairs}


def _journal(
    record: Path | None, identity: Mapping[str, Any]
) -> contextlib.AbstractContextManager[Journal | None]:
    return contextlib.nullcontext() if record is None else held_journal(partial_path(record), identity)


def _run(
    settings: GemmBench, timer: PairTimer, journal: Journal | None, on_pair: OnPair | None
) -> list[PairResult]:
    pairs = settings.pairs
    known = dict(journal.pairs) if journal is not None else {}
    done = sum(pair.key in known for pair in pairs)
    if done:
        logger.info("%d of %d pairs were measured before", done, len(pairs))
    tell = on_pair or (lambda done, total, last: None)
    tell(done, len(pairs), None)
    for pair in pairs:
        if pair.key in known:
            continue
        try:
            result = timer.run(pair, left_out=journal.left_out(pair.key) if journal is not None else {})
        except DeviceLostError as lost:
            if journal is not None:
                journal.add_lost(pair.key, blamed(lost), lost.reason)
            raise DeviceLostError(
                lost.culprit,
                f"at {pair.key}: {lost.reason}",
                hint="the same command with --resume goes on and leaves the kernel out there",
            ) from lost
        if result.failed:
            logger.warning("%s: bf16 could not be timed: %s", pair.key, result.failed)
        known[pair.key] = result
        if journal is not None:
            journal.add(result)
        done += 1
        tell(done, len(pairs), result)
    return [known[pair.key] for pair in pairs]
