"""The user's loss on held-out batches: what it must be, and the table that it fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from loka.artifacts.profile import LossTable
from loka.errors import UsageError
from loka.vocab import ProductRecipe

__all__ = ["Evaluate", "HeldOut"]

Evaluate = Callable[[nn.Module, object], Tensor]
"""`evaluate(model, batch)` gives the loss of each row, [rows]."""


class HeldOut:
    """A loss and the batches to ask it about.

    Args:
        evaluate: Gives the loss of each row.
        batches: Held-out batches that can be read again and again.

    Raises:
        UsageError: for batches that can be read only once, such as a generator.
    """

    def __init__(self, evaluate: Evaluate, batches: Iterable[object]) -> None:
        if not callable(evaluate):
            raise UsageError(f"Probe(evaluate=...) takes a function, got a {type(evaluate).__name__}")
        if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
            raise UsageError(
                f"Probe(batches=...) takes batches that can be read again and again, got a "
                f"{type(batches).__name__}",
                hint="give a list, or a DataLoader without shuffling",
            )
        self._evaluate, self._batches = evaluate, batches

    @classmethod
    def of(cls, evaluate: Evaluate | None, batches: Iterable[object] | None) -> HeldOut | None:
        """Both or neither.

        Raises:
            UsageError: for one without the other.
        """
        if evaluate is None and batches is None:
            return None
        if evaluate is None or batches is None:
            given, missing = ("batches", "evaluate") if evaluate is None else ("evaluate", "batches")
            raise UsageError(
                f"Probe got `{given}` without `{missing}`",
                hint="`evaluate(model, batch)` gives the loss of each row of the held-out `batches`",
            )
        return cls(evaluate, batches)

    def table(self, model: nn.Module, products: Mapping[str, Sequence[ProductRecipe]]) -> LossTable:
        """The change of the loss when one site's forward product is switched, for each alone.

        Raises:
            UsageError: for losses that are not one finite number a row, or no batches.
        """
        from loka.probe.sensitivity import loss_changes

        return loss_changes(model, self._evaluate, self._batches, products)
