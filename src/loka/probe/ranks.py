"""Probes on several ranks of one training: they decide together and reduce what they learned.

Bytes are exchanged as tensors, never as pickled objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from loka.errors import UsageError
from loka.probe.error_log import ErrorLog
from loka.probe.observer import SiteObservation
from loka.probe.state import sites_of_state, state_of_sites
from loka.vocab import Operand

__all__ = ["Ranks"]


class Ranks:
    """The ranks of the default process group, where there is one.

    Args:
        together: Whether every rank has its Probe. A Probe on one rank alone must not wait for others.
        where: The device of the model, on which ranks exchange tensors.
    """

    def __init__(self, *, together: bool, where: torch.device) -> None:
        self._together = together
        self._where = where

    @property
    def count(self) -> int:
        """Ranks that act together; 1 where this one acts alone."""
        if not self._together or not dist.is_available() or not dist.is_initialized():
            return 1
        return dist.get_world_size()

    def maximum(self, value: int) -> int:
        """The largest value of all ranks; waits for them."""
        if self.count == 1:
            return value
        shared = torch.tensor(value, device=self._where)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared)

    def check_agreement(self, options: Mapping[str, int]) -> None:
        """Refuse Probes that would observe different steps.

        Raises:
            UsageError: naming the first option that differs and its extremes.
        """
        if self.count == 1:
            return
        values = torch.tensor([*options.values(), *(-v for v in options.values())], device=self._where)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        most, least = values.view(2, -1).tolist()
        for name, high, low in zip(options, most, least, strict=True):
            if high != -low:
                raise UsageError(
                    f"the Probes of {self.count} ranks differ in `{name}`: from {-low} to {high}",
                    hint="give every rank the same options and the same model, or `across_ranks=False`",
                )

    def merged(self, log: ErrorLog) -> ErrorLog:
        """A log of the errors of all ranks; this one's is left as it is."""
        out = ErrorLog()
        for state in self.gathered(log.state()):
            out.merge(state)
        return out

    def reduced(self, sites: Mapping[str, SiteObservation]) -> dict[str, SiteObservation]:
        """What all ranks observed; this one's observations are left as they are."""
        if self.count == 1:
            return dict(sites)
        states = self.gathered(state_of_sites(sites))
        ranks = [sites_of_state(state, where=self._where) for state in states]
        out: dict[str, SiteObservation] = {}
        for rank in ranks:
            for name, site in rank.items():
                out[name] = _both(out[name], site) if name in out else site
        return out

    def gathered(self, state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The states of all ranks in their order; waits for them."""
        if self.count == 1:
            return [dict(state)]
        mine = torch.frombuffer(bytearray(save(dict(state))), dtype=torch.uint8).to(self._where)
        length = torch.tensor([mine.numel()], device=self._where)
        lengths = [torch.empty_like(length) for _ in range(self.count)]
        dist.all_gather(lengths, length)
        sizes = [int(n) for n in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._where)
        padded[: mine.numel()] = mine
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded)
        return [load(p[:n].cpu().numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)]


def _both(a: SiteObservation, b: SiteObservation) -> SiteObservation:
    """What two ranks saw of one site. The weight is one and the same on both."""
    operands = dict(b.operands) | dict(a.operands)
    for operand in a.operands.keys() & b.operands.keys() - {Operand.WEIGHT}:
        operands[operand] = a.operands[operand].merge(b.operands[operand])
    return replace(
        a,
        operands=operands,
        m_seen=a.m_seen + b.m_seen,
        passes=a.passes | b.passes,
        calls=max(a.calls, b.calls),
    )
