"""Find the sites of a model in a forward that somebody else runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

from torch import nn

from loka.sites.discover import module_names, sites_in_order
from loka.sites.reasons import why_not_plannable
from loka.sites.recorder import Recorder
from loka.vocab import Site

__all__ = ["SiteWatch", "plannable_linears"]


class SiteWatch:
    """Records the products of every forward inside its `with` block; changes no number.

    `find_sites` runs a batch itself; this one is for a training loop that is not ours. Compiled code must be
    made to run eagerly meanwhile (`torch.compiler.set_stance("force_eager")`).

    Args:
        model: Whose products.
        when: Asked at every product whether it counts, such as `lambda: model.training`; all do by default.
    """

    def __init__(self, model: nn.Module, *, when: Callable[[], bool] = lambda: True) -> None:
        self._model = model
        self._names = module_names(model)
        self._recorder = Recorder(model, self._names, when=when)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SiteWatch:
        self._stack.enter_context(self._recorder.following_modules())
        self._stack.enter_context(self._recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def sites(self) -> list[Site]:
        """The sites found so far in the model's order; empty when no product of the model ran."""
        if not self._recorder.found:
            return []
        return sites_in_order(self._model, self._names, self._recorder.found)


def plannable_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every nn.Linear of the model that `apply_plan` could switch, by its name without compile's prefixes."""
    return {
        name: module
        for module, name in module_names(model).items()
        if isinstance(module, nn.Linear) and not why_not_plannable(module)
    }
