"""Calls that may fail: the failure's text, and whether the device survived it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from loka.errors import LokaError

__all__ = ["DeviceLostError", "attempt", "check_device", "failures"]

T = TypeVar("T")
_LONGEST = 300


class DeviceLostError(LokaError, RuntimeError):
    """A call left the GPU unusable for the rest of this process, as an illegal memory access does.

    Attributes:
        culprit: Name of the call.
        reason: What the driver said.
    """

    def __init__(self, culprit: str, reason: str, *, hint: str | None = None) -> None:
        self.culprit = culprit
        self.reason = reason
        super().__init__(
            f"`{culprit}` left the GPU unusable in this process: {reason}",
            hint=hint or "start a new process and leave this candidate out",
        )


def failures() -> tuple[type[Exception], ...]:
    """The exceptions with which a product, or the compilation of one, fails.

    Errors of torch, CUDA and out of memory are RuntimeErrors. Libraries check shapes by assertions. Triton's
    own errors belong to no common base, and are known only where Triton is loaded.
    """
    known: tuple[type[Exception], ...] = (
        RuntimeError,
        ValueError,
        TypeError,
        AssertionError,
        ArithmeticError,
        AttributeError,
        LookupError,
        ImportError,
        OSError,
    )
    loaded = getattr(sys.modules.get("triton"), "TritonError", None)
    return (*known, loaded) if isinstance(loaded, type) and issubclass(loaded, Exception) else known


def attempt(name: str, call: Callable[[], T], *, where: torch.device) -> tuple[T | None, str]:
    """Call, wait for the device, and give the result, or None and the reason of the failure.

    A GPU reports an error at some later call, so the wait is what ties it to this one.

    Args:
        name: Who is to blame.
        call: What may fail.
        where: The device that is waited for.

    Raises:
        DeviceLostError: where the device answers nothing any more after the failure.
    """
    try:
        result = call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    except DeviceLostError:
        raise
    except failures() as error:
        reason = _one_line(error)
    else:
        return result, ""
    check_device(where, culprit=name, reason=reason)
    return None, reason


def check_device(where: torch.device, *, culprit: str, reason: str) -> None:
    """Find out whether the device still answers after a failure.

    Args:
        where: The device; a CPU always answers.
        culprit: Whose failure it was.
        reason: What it said.

    Raises:
        DeviceLostError: where it does not.
    """
    if where.type != "cuda":
        return
    try:
        torch.cuda.synchronize(where)
    except RuntimeError as error:
        raise DeviceLostError(culprit, reason) from error


def _one_line(error: Exception) -> str:
    """The first line that says something, with the exception's name in front where it says nothing."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = said or f"raised {type(error).__name__}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
