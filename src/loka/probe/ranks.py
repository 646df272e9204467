"""Probes on several ranks of one training: they decide together and reduce what they learned.

Bytes are exchanged as tensors, never as pickled objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from loka.errors import UsageError
from loka.probe.error_log import ErrorLog
from loka.probe.observation import SiteObservation
from loka.probe.reduce import exchange_device, gathered_bytes, reduce_over_ranks
from loka.vocab import Site

__all__ = ["Ranks"]


class Ranks:
    """The ranks of the default process group, where there is one.

    Args:
        together: Whether every rank has its Probe. A Probe on one rank alone must not wait for others.
    """

    def __init__(self, *, together: bool) -> None:
        self._together = together

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
        shared = torch.tensor(value, device=exchange_device())
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared)

    def check_agreement(self, options: Mapping[str, int]) -> None:
        """Refuse Probes that would observe different steps.

        Raises:
            UsageError: naming the first option that differs and its extremes.
        """
        if self.count == 1:
            return
        values = torch.tensor([*options.values(), *(-v for v in options.values())], device=exchange_device())
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

    def united(self, sites: Sequence[Site]) -> list[Site]:
        """The sites of all ranks, equal on each: one that any rank reached is as that rank found it."""
        if self.count == 1:
            return list(sites)
        found: dict[str, Site] = {}
        mine = torch.frombuffer(bytearray(msgspec.json.encode(list(sites))), dtype=torch.uint8)
        for state in self.gathered({"sites": mine}):
            for site in msgspec.json.decode(state["sites"].numpy().tobytes(), type=list[Site]):
                known = found.setdefault(site.name, site)
                if not known.rows and site.rows:
                    found[site.name] = site
        return list(found.values())

    def reduced(self, sites: Mapping[str, SiteObservation]) -> dict[str, SiteObservation]:
        """What all ranks observed; this one's observations are left as they are."""
        if self.count == 1:
            return dict(sites)
        return reduce_over_ranks(sites)

    def gathered(self, state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The states of all ranks in their order; waits for them."""
        if self.count == 1:
            return [dict(state)]
        mine = torch.frombuffer(bytearray(save(dict(state))), dtype=torch.uint8)
        return [load(part.numpy().tobytes()) for part in gathered_bytes(mine, exchange_device())]
