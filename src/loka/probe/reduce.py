"""What every rank observed, merged: plain tensors are gathered, nothing is pickled.

First every rank tells what it has (sites, operands, widths), then operand after operand is gathered, so that
never more than one operand of all ranks is in memory at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from loka.errors import UsageError
from loka.numerics import OperandStatistics
from loka.probe.observation import SiteObservation
from loka.vocab import Operand, Pass

__all__ = ["exchange_device", "gathered_bytes", "reduce_over_ranks"]


class _Held(msgspec.Struct):
    """What one rank has of an operand: features, and which distributions."""

    features: int
    covariance: bool
    marginals: bool


class _Told(msgspec.Struct):
    """What one rank tells of a site."""

    operands: dict[Operand, _Held]
    m_seen: list[tuple[int, int]]
    passes: list[Pass]
    calls: int


def reduce_over_ranks(
    sites: Mapping[str, SiteObservation], *, group: dist.ProcessGroup | None = None
) -> dict[str, SiteObservation]:
    """The observations of all ranks, the same on every one of them; those given are left as they are.

    Every rank of the group must call it. A site or operand that some ranks did not see is that of the others.
    A weight is one and the same everywhere, so the first rank's counts.

    Args:
        sites: What this rank observed.
        group: The ranks; all of them by default.

    Returns:
        A copy of `sites` where torch.distributed is not initialised.

    Raises:
        UsageError: if an operand has another number of features on another rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        return dict(sites)
    device = exchange_device(group)
    told = [
        msgspec.json.decode(bytes(part.tolist()), type=dict[str, _Told])
        for part in gathered_bytes(_told(sites), device, group)
    ]
    out: dict[str, SiteObservation] = {}
    for name in dict.fromkeys(name for rank in told for name in rank):
        here = [rank[name] for rank in told if name in rank]
        merged = SiteObservation(
            m_seen=sum((Counter(dict(site.m_seen)) for site in here), Counter[int]()),
            passes={pass_ for site in here for pass_ in site.passes},
            calls=max(site.calls for site in here),
        )
        for operand in dict.fromkeys(operand for site in here for operand in site.operands):
            held = [rank[name].operands.get(operand) if name in rank else None for rank in told]
            known = sites[name].operands.get(operand) if name in sites else None
            where = f"{name}/{operand}"
            merged.operands[operand] = _reduced(known, held, operand, where, device=device, group=group)
        out[name] = merged
    return out


def _told(sites: Mapping[str, SiteObservation]) -> Tensor:
    told = {
        name: _Told(
            operands={
                operand: _Held(known.features, known.covariance is not None, known.marginals is not None)
                for operand, known in site.operands.items()
            },
            m_seen=sorted(site.m_seen.items()),
            passes=sorted(site.passes),
            calls=site.calls,
        )
        for name, site in sites.items()
    }
    return torch.frombuffer(bytearray(msgspec.json.encode(told)), dtype=torch.uint8)


def _reduced(
    known: OperandStatistics | None,
    held: list[_Held | None],
    operand: Operand,
    where: str,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> OperandStatistics:
    """One operand of all ranks, in their order."""
    features = {one.features for one in held if one is not None}
    if len(features) > 1:
        raise UsageError(f"`{where}` has {' and '.join(map(str, sorted(features)))} features on other ranks")
    layouts = [None if one is None else _layout(one) for one in held]
    length = max(sum(t.nbytes for t in layout.values()) for layout in layouts if layout is not None)
    mine = torch.zeros(length, dtype=torch.uint8, device=device)
    target = device if known is None else known.moments.mean.device
    if known is not None:
        flat = [t.to(device).reshape(-1).contiguous().view(torch.uint8) for t in known.tensors().values()]
        torch.cat(flat, out=mine[: sum(t.numel() for t in flat)])
    parts = [torch.empty_like(mine) for _ in held]
    dist.all_gather(parts, mine, group=group)
    merged: OperandStatistics | None = None
    for layout, part in zip(layouts, parts, strict=True):
        if layout is None:
            continue
        one = OperandStatistics.from_tensors(_apart(part.to(target), layout))
        if merged is None:
            merged = one
        elif operand is not Operand.WEIGHT:
            merged = merged.merge(one)
    if merged is None:
        raise UsageError(f"no rank has `{where}`")
    return merged


def _layout(held: _Held) -> dict[str, Tensor]:
    """Name to tensor on no device, of the shapes and dtypes that the operand's statistics have."""
    whole = OperandStatistics.empty(held.features, "meta", distributions=True)
    if not held.covariance:
        whole.covariance = None
    if not held.marginals:
        whole.marginals = None
    return whole.tensors()


def _apart(flat: Tensor, layout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    at = 0
    for name, like in layout.items():
        # A copy starts at its own memory, as a view in another dtype must.
        out[name] = flat[at : at + like.nbytes].clone().view(like.dtype).reshape(like.shape)
        at += like.nbytes
    return out


def gathered_bytes(
    mine: Tensor, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The bytes uint8 [n] of every rank, on the CPU; n may differ."""
    ranks = dist.get_world_size(group)
    length = torch.tensor([mine.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length, group=group)
    sizes = torch.cat(lengths).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine.to(device)
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return [part[:size].cpu() for part, size in zip(parts, sizes, strict=True)]


def exchange_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must lie to be gathered."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
