"""A model held still while its loss is asked for, and put back exactly as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from loka.errors import UsageError, unknown_name
from loka.probe.eager import EAGER
from loka.sites import plannable_linears

__all__ = ["Evaluate", "Frozen", "frozen", "numbered", "site_linears"]

Evaluate = Callable[[Any, Any], Tensor]
"""`evaluate(model, batch)` gives the loss of each row, [rows]."""


class Frozen:
    """A model in evaluation mode whose random draws repeat from one evaluation to the next.

    Args:
        model: The model.
        evaluate: Gives the loss of each row of a batch.
    """

    def __init__(self, model: nn.Module, evaluate: Evaluate) -> None:
        self._model, self._evaluate = model, evaluate
        self._draws = _random_state(model)

    def losses(self, batch: object, number: int) -> Tensor:
        """The loss of each row, as `evaluate` gives it (its graph with it), checked.

        Paired differences are only as quiet as what both sides share, so every call starts from the same
        random state.

        Args:
            batch: For `evaluate`.
            number: Of the batch, for messages.

        Raises:
            UsageError: for what is not one finite loss a row.
        """
        _set_random_state(self._draws)
        losses = self._evaluate(self._model, batch)
        if not isinstance(losses, Tensor):
            raise UsageError(
                f"evaluate(model, batch) gave a {type(losses).__name__} for batch {number}, not a tensor",
                hint="return the loss of each row, [rows]",
            )
        if losses.dim() != 1 or not losses.numel() or not losses.is_floating_point():
            raise UsageError(
                f"evaluate(model, batch) gave {losses.dtype} of shape {list(losses.shape)} for batch "
                f"{number}, expected one loss a row, [rows]",
                hint="use reduction='none', and the mean over everything but rows",
            )
        if losses.dtype in (torch.bfloat16, torch.float16):
            raise UsageError(
                f"evaluate(model, batch) gave losses in {losses.dtype} for batch {number}, in which a "
                "change of 1e-4 vanishes",
                hint="compute the loss in FP32, from the logits",
            )
        bad = int((~torch.isfinite(losses.detach())).sum())
        if bad:
            raise UsageError(
                f"evaluate(model, batch) gave {bad} of {losses.numel()} losses that are not finite for "
                f"batch {number}",
                hint="leave such rows out, or look at what makes them: the change of a loss that is not "
                "finite cannot be said",
            )
        return losses


@contextlib.contextmanager
def frozen(model: nn.Module, evaluate: Evaluate) -> Iterator[Frozen]:
    """The model in evaluation mode, uncompiled, until the block ends; then everything is as it was.

    Modes of all modules, buffers and torch's random state are put back, also after an exception. Gradients
    of parameters are not touched by anything here.
    """
    modes = [(module, module.training) for module in model.modules()]
    # Not by version: batch_norm writes its running statistics without counting one.
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    held = Frozen(model, evaluate)
    draws = _random_state(model)
    model.eval()
    EAGER.hold()  # compiled code runs no hooks
    try:
        yield held
    finally:
        EAGER.release()
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        _set_random_state(draws)


def numbered(batches: Iterable[object], *, limit: int | None = None) -> Iterator[tuple[int, object]]:
    """The batches with their numbers from 1, at most `limit` of them.

    Raises:
        UsageError: for batches that can be read only once, or of which there are none.
    """
    if isinstance(batches, Iterator):
        raise UsageError(
            f"batches is a {type(batches).__name__} that can be read only once; they are read several times",
            hint="give a list, or an object whose __iter__ starts anew",
        )
    number = 0
    for number, batch in enumerate(batches, start=1):
        yield number, batch
        if number == limit:
            break
    if not number:
        raise UsageError("there are no batches to evaluate the model on", hint="give at least one")


def site_linears(model: nn.Module, sites: Iterable[str]) -> dict[str, nn.Linear]:
    """The plain nn.Linear of each site.

    Raises:
        UnknownNameError: for a site that is no nn.Linear of the model which a plan could switch.
    """
    linears = plannable_linears(model)
    for name in sites:
        if name not in linears:
            raise unknown_name("site", name, list(linears), where="the model's linears that can be planned")
    return {name: linears[name] for name in sites}


_RandomState = tuple[Tensor, dict[int, Tensor]]


def _random_state(model: nn.Module) -> _RandomState:
    devices = {p.device.index or 0 for p in model.parameters() if p.is_cuda}
    return torch.get_rng_state(), {i: torch.cuda.get_rng_state(i) for i in sorted(devices)}


def _set_random_state(state: _RandomState) -> None:
    torch.set_rng_state(state[0])
    for index, device_state in state[1].items():
        torch.cuda.set_rng_state(device_state, index)
