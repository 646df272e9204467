"""What Probe learned of a model's sites, as plain tensors to be saved beside the model's.

Keys, their parts separated by tabs: `statistics site operand field`, the field dotted as in `moments.mean`;
`m_seen site`, int64 [n, 2]: rows of a call and how often; `passes site`, bool [3] in the order of `Pass`;
`calls site`, int64 (): calls in the last observed step. A state of 0.1.0 has `moments site operand field`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from loka.errors import UsageError
from loka.numerics import Moments, OperandStatistics
from loka.probe.observer import SiteObservation
from loka.vocab import Operand, Pass

__all__ = ["sites_of_state", "state_of_sites"]


def state_of_sites(sites: Mapping[str, SiteObservation]) -> dict[str, Tensor]:
    """The observations of every site as tensors on the CPU."""
    state: dict[str, Tensor] = {}
    for name, site in sites.items():
        for operand, known in site.operands.items():
            for field, tensor in known.tensors().items():
                state[f"statistics\t{name}\t{operand}\t{field}"] = tensor.cpu()
        state[f"m_seen\t{name}"] = torch.tensor(sorted(site.m_seen.items())).reshape(-1, 2)
        state[f"passes\t{name}"] = torch.tensor([pass_ in site.passes for pass_ in Pass])
        state[f"calls\t{name}"] = torch.tensor(site.calls)
    return state


def sites_of_state(state: Mapping[str, Tensor], *, where: torch.device) -> dict[str, SiteObservation]:
    """The inverse of `state_of_sites`, statistics on the device `where`; other keys are left alone.

    Raises:
        UsageError: for keys or tensors that `state_of_sites` does not make.
    """
    try:
        return _sites_of_state(state, where)
    except UsageError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise _damaged(str(error)) from error


def _sites_of_state(state: Mapping[str, Tensor], where: torch.device) -> dict[str, SiteObservation]:
    sites: dict[str, SiteObservation] = {}
    fields: dict[tuple[str, Operand], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        kind, _, rest = key.partition("\t")
        if kind in ("statistics", "moments"):
            name, operand, field = rest.split("\t")
            dotted = field if kind == "statistics" else f"moments.{field}"
            fields.setdefault((name, Operand(operand)), {})[dotted] = tensor.to(where)
        elif kind == "m_seen":
            sites.setdefault(rest, SiteObservation()).m_seen = _counts_of(tensor, rest)
        elif kind == "passes":
            if tensor.dtype is not torch.bool:
                raise _damaged(f"`passes` of `{rest}` is {tensor.dtype}, expected torch.bool")
            ran = {pass_ for pass_, runs in zip(Pass, tensor.tolist(), strict=True) if runs}
            sites.setdefault(rest, SiteObservation()).passes = ran
        elif kind == "calls":
            if int(tensor) < 0:
                raise _damaged(f"`calls` of `{rest}` is {int(tensor)}")
            sites.setdefault(rest, SiteObservation()).calls = int(tensor)
    for (name, operand_), tensors in fields.items():
        if "moments.mean" not in tensors:
            raise _damaged(f"{operand_} of `{name}` has no moments")
        mean = tensors["moments.mean"]
        tensors.setdefault("moments.row_exponents", Moments.empty(mean.numel(), where).row_exponents)
        _check(tensors, f"{operand_} of `{name}`")
        known = OperandStatistics.from_tensors(tensors)
        sites.setdefault(name, SiteObservation()).operands[operand_] = known
    return sites


def _check(tensors: Mapping[str, Tensor], whose: str) -> None:
    """Every tensor must have the shape, dtype and range that statistics of so many features have."""
    features = tensors["moments.mean"].numel()
    expected = OperandStatistics.empty(features, "meta", distributions=True).tensors()
    for field, tensor in tensors.items():
        like = expected.get(field)
        if like is None:
            raise _damaged(f"`{field}` is no part of the statistics of {whose}")
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise _damaged(
                f"`{field}` of {whose} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {like.dtype} {list(like.shape)}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise _damaged(f"`{field}` of {whose} holds a number that is not finite")
        least = -1 if field.endswith(".steps") else 0  # -1: no step
        if field != "marginals.origin" and not tensor.is_floating_point() and bool((tensor < least).any()):
            raise _damaged(f"`{field}` of {whose} holds a count below {least}")


def _counts_of(tensor: Tensor, whose: str) -> Counter[int]:
    if tensor.dim() != 2 or tensor.shape[1] != 2 or tensor.is_floating_point() or bool((tensor < 0).any()):
        raise _damaged(f"`m_seen` of `{whose}` is no table [n, 2] of rows and how often they were seen")
    return Counter(dict(tensor.tolist()))


def _damaged(what: str) -> UsageError:
    return UsageError(
        f"this state of a Probe is damaged: {what}", hint="load what `state_dict()` of a Probe gave"
    )
