"""Compiled code made to run eagerly while any Probe observes.

torch's stance is one for the process, and each `set_stance` restores what it found. Two Probes in one loop
whose steps overlap would restore each other's, and the process would stay eager; so they share one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["EAGER"]


class _Eager:
    """The stance `force_eager`, from the first `hold` to the last `release`."""

    def __init__(self) -> None:
        self._holders = 0
        self._stance: AbstractContextManager[object] | None = None

    def hold(self) -> None:
        self._holders += 1
        if self._stance is None:
            stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
            stance.__enter__()
            self._stance = stance

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0 and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


EAGER = _Eager()
