"""A process that carries out tasks: a group of them is a line on its standard input, an answer a line back.

Before each task it says its number, so that whoever reads knows what a process that ends was at. It imports
nothing of the program that started it: a script without a guard around its main part is not run again.
"""

from __future__ import annotations

import os
import time
from typing import BinaryIO

import msgspec
import torch

from loka.kernels.preparing.carry_out import Preparer
from loka.kernels.preparing.tasks import Answer, Task
from loka.timing import DeviceLostError

__all__ = ["Begun", "Group", "Settings", "main"]


class Settings(msgspec.Struct, frozen=True):
    """What a worker must know besides its tasks.

    Attributes:
        where: The device.
        threads: For torch's own work on a CPU.
    """

    where: str
    threads: int


class Group(msgspec.Struct, frozen=True):
    """Tasks with their numbers, in order."""

    tasks: list[tuple[int, Task]]


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A task is being tried."""

    task: int


def main(settings: str) -> None:
    """Carry out groups until the input ends.

    Args:
        settings: `Settings` as JSON.
    """
    groups, answers = _own_streams()
    known = msgspec.json.decode(settings, type=Settings)
    torch.set_num_threads(known.threads)
    where = torch.device(known.where)
    if where.type == "cuda" and where.index is not None:
        torch.cuda.set_device(where)
    preparer = Preparer(where)
    torch.zeros((), device=where)  # a GPU that takes no more processes is no kernel's fault
    for line in groups:
        for number, task in msgspec.json.decode(line, type=Group).tasks:
            begun = time.monotonic()
            _say(answers, Begun(number))
            try:
                answer = preparer.carry_out(task)
            except DeviceLostError as lost:
                _say(answers, Answer(number, failed=f"lost the GPU: {lost.reason}", ended=True))
                raise SystemExit(3) from lost  # the parent starts a new process behind this task
            if where.type == "cuda":
                torch.cuda.empty_cache()  # the memory is shared with the other processes
            if _was_short_of_memory(answer):
                # Not the kernel's fault, and no verdict on its class.
                answer, preparer = Answer(left=True), Preparer(where)
            seconds = time.monotonic() - begun
            _say(answers, msgspec.structs.replace(answer, task=number, seconds=seconds))


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output for this module alone.

    What libraries print goes where errors go, and the compilers that they start find nothing to read.
    """
    groups, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return groups, answers


def _say(answers: BinaryIO, what: Answer | Begun) -> None:
    answers.write(msgspec.json.encode(what) + b"\n")
    answers.flush()


def _was_short_of_memory(answer: Answer) -> bool:
    said = f"{answer.failed} {answer.unfit}".lower()
    return "out of memory" in said or "alloc_failed" in said  # torch and Triton; cuBLAS
