"""Compile and vet beside each other, in processes of their own, before anything is timed.

Two reasons. Compiling and vetting some thousand pairs of kernel and shape takes much longer than timing them
and can be done in parallel, since nothing of it is timed. And a kernel that kills the CUDA context or hangs
takes only its worker along: the worker is started again behind it, and the kernel has a reason.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from loka.bench.accounting import Pair
from loka.bench.settings import GemmBench
from loka.bench.time_pair import PairTimer
from loka.kernels import device_of, usable
from loka.timing import DeviceLostError
from loka.vocab import shape_class

__all__ = ["Verdicts", "prepare"]

logger = logging.getLogger("loka")

# Pair key to kernel name to why it is not timed there; empty where it is.
Verdicts = dict[str, dict[str, str]]

_STALLED_S = 600.0  # a kernel that hangs; vetting the longest products on a CPU takes minutes
_POLL_S = 0.2


def prepare(
    settings: GemmBench,
    *,
    workers: int,
    left_out: Mapping[str, Mapping[str, str]] | None = None,
    done: Collection[str] = (),
) -> Verdicts:
    """Compile and vet every usable kernel at every pair.

    Args:
        settings: What will be timed, and where.
        workers: Processes.
        left_out: Pair key to kernels that are not to be tried, and why.
        done: Keys of pairs that were timed before and need nothing.

    Returns:
        Why each kernel is not timed at each pair, empty where it is.
    """
    shares = _shares([pair for pair in settings.pairs if pair.key not in done], workers)
    with tempfile.TemporaryDirectory(prefix="loka-prepare-") as folder:
        files = [Path(folder) / f"{i}.jsonl" for i in range(len(shares))]
        known: Verdicts = {key: dict(reasons) for key, reasons in (left_out or {}).items()}
        running = [_Worker(settings, share, file, known) for share, file in zip(shares, files, strict=True)]
        try:
            while sum(worker.going_on() for worker in running):  # each is asked, not up to the first yes
                time.sleep(_POLL_S)
        finally:
            for worker in running:
                worker.stop()
        for file in files:
            _read(file, known)
    return known


def _shares(pairs: Sequence[Pair], workers: int) -> list[list[Pair]]:
    """Pairs of one shape class go to one worker, which vets the class once."""
    classes: dict[str, list[Pair]] = {}
    for pair in pairs:
        classes.setdefault(shape_class(pair.problem), []).append(pair)
    shares: list[list[Pair]] = [[] for _ in range(min(workers, len(classes)))]
    for members in sorted(classes.values(), key=len, reverse=True):
        min(shares, key=len).extend(members)
    return shares


class _Worker:
    """One process and its file of answers; started again behind a kernel that ends or stalls it."""

    def __init__(self, settings: GemmBench, share: Sequence[Pair], file: Path, known: Verdicts) -> None:
        self._settings, self._share, self._file = settings, share, file
        self._known = {key: dict(reasons) for key, reasons in known.items()}
        file.touch()
        self._start()

    def _start(self) -> None:
        _read(self._file, self._known)
        arguments = (self._settings, [pair.key for pair in self._share], self._file, self._known)
        self._process = multiprocessing.get_context("spawn").Process(target=_work, args=arguments)
        self._process.start()
        self._grew, self._size = time.monotonic(), self._file.stat().st_size
        self._begun_at = self._size

    def stop(self) -> None:
        """End the process, where it has not ended: whoever waited for it was interrupted."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def going_on(self) -> bool:
        """Whether there is more to come; starts the process again where a kernel ended it."""
        if self._process.is_alive():
            size = self._file.stat().st_size
            if size != self._size:
                self._grew, self._size = time.monotonic(), size
            if time.monotonic() - self._grew < _STALLED_S:
                return True
            self._process.kill()
            self._process.join()
        if self._process.exitcode == 0:
            return False
        if self._file.stat().st_size == self._begun_at:
            logger.warning("a preparing process ended with code %s", self._process.exitcode)
            return False
        culprit = _unanswered(self._file)
        if culprit is not None:
            pair, kernel = culprit
            reason = f"ended or stalled the process that tried it (exit code {self._process.exitcode})"
            _append(self._file, {"pair": pair, "kernel": kernel, "reason": reason})
        self._start()
        return True


def _work(settings: GemmBench, keys: list[str], file: Path, known: Verdicts) -> None:
    """The worker's process: try what is not known, a line before and a line after each kernel."""
    where = torch.device(settings.device)
    timer = PairTimer(where, settings.chosen(), settings.rounds)
    device = device_of(where)
    by_key = {pair.key: pair for pair in settings.pairs}
    for key in keys:
        pair = by_key[key]
        for kernel in timer.kernels:
            if kernel.name in known.get(key, {}) or not usable(kernel, pair.problem, device):
                continue
            _append(file, {"pair": key, "kernel": kernel.name})
            try:
                reason = timer.try_once(pair, kernel)
            except DeviceLostError as lost:
                _append(file, {"pair": key, "kernel": kernel.name, "reason": f"lost the GPU: {lost.reason}"})
                raise SystemExit(3) from lost  # the parent starts a new process behind this kernel
            _append(file, {"pair": key, "kernel": kernel.name, "reason": reason})
        if where.type == "cuda":
            torch.cuda.empty_cache()


def _append(file: Path, line: dict[str, str]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def _lines(file: Path) -> list[dict[str, str]]:
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # a line that a killed process did not finish
            continue
    return found


def _read(file: Path, known: Verdicts) -> None:
    for line in _lines(file):
        if "reason" in line:
            known.setdefault(line["pair"], {})[line["kernel"]] = line["reason"]


def _unanswered(file: Path) -> tuple[str, str] | None:
    """The kernel that was begun last, where no line answers for it."""
    last = _lines(file)[-1]
    return None if "reason" in last else (last["pair"], last["kernel"])
