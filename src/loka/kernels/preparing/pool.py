"""Share tasks out to processes.

Compiling and vetting some hundred pairs of kernel and shape takes much longer than timing them and can be
done in parallel, since nothing of it is timed: compilers leave what they made on disk, where the program that
asked finds it. And a kernel that kills the CUDA context or hangs takes only its process along.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loka.errors import UsageError
from loka.kernels.preparing.compiler_key import ask_for_the_assembler_again
from loka.kernels.preparing.process import Numbered, Worker
from loka.kernels.preparing.tasks import Answer, CastTask, Task, expected_seconds, group_of
from loka.kernels.preparing.worker import Settings

__all__ = ["Prepared", "default_workers", "prepare_all"]

_log = logging.getLogger("loka")

_MOST_WORKERS = 14
# A kernel that hangs. Vetting the longest products on a CPU takes minutes.
_STALLED_S = {"cpu": 600.0, "cuda": 180.0}
_POLL_S = 0.1
_TOLD_EVERY_S = 10.0
_CONTEXT_BYTES = 3 * 2**28  # of a process on a GPU, besides its tensors
_USABLE_SHARE = 0.9  # of the memory that is free


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was found.

    Attributes:
        answers: Task to answer, for those that processes could take.
        seconds: How long it took.
        workers: Processes.
    """

    answers: Mapping[Task, Answer] = field(default_factory=dict)
    seconds: float = 0.0
    workers: int = 0

    def of(self, task: Task) -> Answer | None:
        """The answer; None where the caller has to carry the task out."""
        found = self.answers.get(task)
        return None if found is None or found.left else found


def default_workers(where: torch.device) -> int:
    """A process for each core that this rank may use, 14 at most; none for a CPU, where little compiles."""
    if where.type != "cuda":
        return 0
    return max(1, min(_MOST_WORKERS, _cores() // _ranks_here()))


def prepare_all(tasks: Iterable[Task], where: torch.device, *, workers: int) -> Prepared:
    """Carry out every task, in processes beside each other.

    Args:
        tasks: Each once; repetitions cost nothing.
        where: The device.
        workers: Processes at most; on a GPU fewer where their contexts would not fit in its free memory. 0
            carries out nothing: the caller has to.

    Returns:
        The answers. A task that ended its process, stalled it or lost the GPU in it is `failed` with that
        reason and marked `ended`. Tasks of kernels that only the caller knows, and what the memory does not
        hold, have none.

    Raises:
        UsageError: for a negative number of processes.
    """
    if workers < 0:
        raise UsageError(f"prepare_all(workers={workers}) must be at least 0")
    begun = time.monotonic()
    asked = list(dict.fromkeys(tasks))
    groups = _grouped(asked)
    count, budget = _capacity(where, min(workers, len(groups)))
    if not count:
        return Prepared()
    ask_for_the_assembler_again()
    _log.info("preparing %d products and casts in %d processes", len(asked), count)
    answers: dict[int, Answer] = {}
    shares = _Shares(groups, budget)
    settings = Settings(str(where), max(1, _cores() // count))
    some = [Worker(settings, lambda answer: answers.__setitem__(answer.task, answer)) for _ in range(count)]
    _run(some, shares, where, lambda: len(answers))
    seconds = time.monotonic() - begun
    _log.info("prepared %d of %d products and casts in %.1f s", len(answers), len(asked), seconds)
    _log.info("seconds of all processes: %s", _by_kernel(asked, answers))
    return Prepared({asked[number]: answer for number, answer in answers.items()}, seconds, count)


@dataclass(frozen=True, slots=True)
class _Group:
    tasks: tuple[Numbered, ...]

    @property
    def nbytes(self) -> int:
        return max(task.nbytes for _, task in self.tasks)

    @property
    def seconds(self) -> float:
        return sum(expected_seconds(task) for _, task in self.tasks)


def _grouped(tasks: Sequence[Task]) -> list[_Group]:
    """Groups in the order in which they are begun.

    Casts first, since products need them; then what takes longest. Kernels take turns: two shapes of one
    kernel often compile the same, which is wasted where they do it at the same time.
    """
    members: dict[tuple[str, ...], list[Numbered]] = {}
    for number, task in enumerate(tasks):
        members.setdefault(group_of(task), []).append((number, task))
    ranked = sorted(
        ((name, _Group(tuple(some))) for name, some in members.items()), key=lambda pair: -pair[1].seconds
    )
    turns: dict[str, int] = {}
    keyed = []
    for name, group in ranked:
        turn = turns[name[0]] = turns.get(name[0], -1) + 1
        keyed.append(((name[0] != "cast", turn), group))
    return [group for _, group in sorted(keyed, key=lambda pair: pair[0])]


class _Shares:
    """Hands out groups, as many at a time as the memory holds."""

    def __init__(self, groups: Sequence[_Group], budget: float) -> None:
        self._waiting = list(groups)
        self._left = budget
        self._out = 0
        self._changed = threading.Condition()

    def take(self) -> _Group | None:
        """The next group that fits; None where there is none, or none that would ever fit."""
        with self._changed:
            while self._waiting:
                for place, group in enumerate(self._waiting):
                    if group.nbytes <= self._left:
                        self._left -= group.nbytes
                        self._out += 1
                        return self._waiting.pop(place)
                if not self._out:
                    return None
                self._changed.wait()
            return None

    def done(self, group: _Group) -> None:
        """Its memory is free again."""
        with self._changed:
            self._left += group.nbytes
            self._out -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()


def _serve(worker: Worker, shares: _Shares) -> None:
    try:
        while worker.usable and (group := shares.take()) is not None:
            try:
                worker.carry_out(group.tasks)
            finally:
                shares.done(group)
    finally:
        worker.close()


def _run(
    workers: Sequence[Worker], shares: _Shares, where: torch.device, answered: Callable[[], int]
) -> None:
    """One thread reads from each process; this one watches over them."""
    threads = [threading.Thread(target=_serve, args=(worker, shares), daemon=True) for worker in workers]
    told = time.monotonic()
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for worker in workers:
                worker.kill_if_stalled(_STALLED_S.get(where.type, _STALLED_S["cpu"]))
            if time.monotonic() - told > _TOLD_EVERY_S:
                told = time.monotonic()
                _log.info("prepared %d", answered())
            time.sleep(_POLL_S)
    finally:  # an interrupt: nothing is left running
        shares.close()
        for worker in workers:
            worker.kill()
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()


def _by_kernel(asked: Sequence[Task], answers: Mapping[int, Answer]) -> str:
    """Where the time went, most first."""
    spent: dict[str, float] = {}
    for number, answer in answers.items():
        task = asked[number]
        name = "casts" if isinstance(task, CastTask) else task.kernel
        spent[name] = spent.get(name, 0.0) + answer.seconds
    ranked = sorted(spent.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {seconds:.0f}" for name, seconds in ranked)


def _capacity(where: torch.device, wanted: int) -> tuple[int, float]:
    """How many processes, and the bytes that their tensors may take together."""
    if where.type != "cuda":
        return wanted, float("inf")
    torch.cuda.empty_cache()  # what this process keeps for later is of more use to the workers
    free = _USABLE_SHARE * torch.cuda.mem_get_info(where)[0]
    count = min(wanted, int(free // 2 // _CONTEXT_BYTES))
    return count, free - count * _CONTEXT_BYTES


def _cores() -> int:
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _ranks_here() -> int:
    """Ranks of the process group that share this machine's cores, as far as its GPUs tell."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return max(1, min(torch.distributed.get_world_size(), torch.cuda.device_count()))
