"""The first step: which products run, and whether the model is called at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from loka.probe.attach import observable_sites
from loka.sites import SiteWatch
from loka.sites.hooks import PassingHook
from loka.vocab import Site

__all__ = ["SiteFinder"]


class SiteFinder:
    """Finds the sites in a step that somebody else runs.

    Attributes:
        ran: Whether a linear was called in training mode (True) and in evaluation mode (False), so far.

    Args:
        model: Whose sites.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ran: dict[bool, bool] = {}
        self._model = model
        self._linears: Mapping[str, nn.Linear] = {}
        self._watch: SiteWatch | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def is_watching(self) -> bool:
        """Whether a step is being watched."""
        return self._watch is not None

    def start(self, linears: Mapping[str, nn.Linear]) -> None:
        """Watch the next step; compiled code must be made to run eagerly meanwhile."""
        self._linears = linears
        self._watch = SiteWatch(self._model, when=lambda: self._model.training)
        self._watch.__enter__()

        def note(module: nn.Module, args: Any) -> None:
            self.ran[self._model.training] = True

        hook = PassingHook(note)
        self._handles = [linear.register_forward_pre_hook(hook) for linear in linears.values()]

    def stop(self) -> list[Site] | None:
        """End watching.

        Returns:
            The sites in the model's order; None where none ran in training mode.
        """
        watch, self._watch = self._watch, None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if watch is None:
            return None
        watch.__exit__(None, None, None)
        found = observable_sites(watch.sites(), self._linears)
        return found if any(site.rows for site in found) else None
