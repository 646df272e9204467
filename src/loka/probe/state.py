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
from loka.numerics import Covariance, Marginals, Moments, OperandStatistics
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
        raise UsageError(
            f"this state of a Probe is damaged: {error}", hint="load what `state_dict()` of a Probe gave"
        ) from error


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
            sites.setdefault(rest, SiteObservation()).m_seen = Counter(dict(tensor.tolist()))
        elif kind == "passes":
            ran = {pass_ for pass_, runs in zip(Pass, tensor.tolist(), strict=True) if runs}
            sites.setdefault(rest, SiteObservation()).passes = ran
        elif kind == "calls":
            sites.setdefault(rest, SiteObservation()).calls = int(tensor)
    for (name, operand_), tensors in fields.items():
        if "moments.mean" not in tensors:
            raise UsageError(f"this state of a Probe is damaged: {operand_} of `{name}` has no moments")
        mean = tensors["moments.mean"]
        tensors.setdefault("moments.row_exponents", Moments.empty(mean.numel(), where).row_exponents)
        known = OperandStatistics.from_tensors(tensors)
        _check_shapes(known, f"{operand_} of `{name}`")
        sites.setdefault(name, SiteObservation()).operands[operand_] = known
    return sites


def _check_shapes(known: OperandStatistics, whose: str) -> None:
    """Every tensor must have the shape and dtype that statistics of so many features have.

    The covariance's size follows from the features as well; a history and a drift window may hold more steps.
    """
    features = known.moments.mean.numel()
    fresh = OperandStatistics.empty(features, "meta")
    expected = {f"moments.{name}": t for name, t in fresh.moments.tensors().items()}
    found = {f"moments.{name}": t for name, t in known.moments.tensors().items()}
    for part, like in (("covariance", Covariance), ("marginals", Marginals)):
        own = getattr(known, part)
        if own is not None:
            expected |= {f"{part}.{name}": t for name, t in like.empty(features, "meta").tensors().items()}
            found |= {f"{part}.{name}": t for name, t in own.tensors().items()}
    for name, tensor in found.items():
        like_ = expected[name]
        if tensor.shape != like_.shape or tensor.dtype != like_.dtype:
            raise UsageError(
                f"this state of a Probe is damaged: {name} of {whose} is {tensor.dtype} {list(tensor.shape)}",
                hint=f"expected {like_.dtype} {list(like_.shape)}: load what `state_dict()` of a Probe gave",
            )
