"""Everything that is known of some sites: distributions, errors, the loss, and the kernels of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loka.artifacts import Plan, Profile
from loka.cli.distribution_view import distribution_parts
from loka.cli.distributions import operand_numbers
from loka.cli.error_view import error_parts, loss_rows, loss_table
from loka.cli.plan_view import plan_rows, plan_table_at
from loka.cli.profile_view import matching, profile_rows, site_rows, sites_table
from loka.numerics import OperandStatistics
from loka.vocab import Operand

__all__ = ["Known", "site_json", "site_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a run's folder says of sites; each part may be missing.

    Attributes:
        profile: Errors, times, the loss.
        plan: What was chosen.
        statistics: Site to operand to its learned statistics.
    """

    profile: Profile | None = None
    plan: Plan | None = None
    statistics: Mapping[str, Mapping[Operand, OperandStatistics]] | None = None

    def names(self) -> list[str]:
        """Every site that a part speaks of."""
        in_profile = [] if self.profile is None else self.profile.sites.name
        in_plan = [] if self.plan is None else [*(s.name for s in self.plan.sites), *self.plan.unplanned]
        return list(dict.fromkeys([*in_profile, *in_plan, *(self.statistics or {})]))

    def operands(self, name: str) -> dict[str, dict[str, Any]]:
        """Operand to its numbers at a site, in the order of `Operand`."""
        found = (self.statistics or {}).get(name, {})
        return {str(o): operand_numbers(found[o]) for o in Operand if o in found}


def site_json(pattern: str, known: Known) -> dict[str, Any]:
    """As `site_parts`, as plain values.

    Raises:
        UnknownNameError: for a pattern that matches nothing.
    """
    names = matching(known.names(), pattern)
    result: dict[str, Any] = {}
    if known.profile is not None:
        result["sites"] = [row for row in site_rows(known.profile) if row["site"] in names]
        result["errors"] = profile_rows(known.profile, names)
        result["loss"] = loss_rows(known.profile, names)
    if known.statistics is not None:
        result["statistics"] = {name: known.operands(name) for name in names if name in known.statistics}
    if known.plan is not None:
        result["plan"] = plan_rows(known.plan, names)
    return result


def site_parts(pattern: str, known: Known) -> list[Any]:
    """Renderables: the matching sites, then for each its distributions, errors, loss and plan.

    Distributions are drawn in full where one site matches, and as one line an operand where several do.

    Raises:
        UnknownNameError: for a pattern that matches nothing.
    """
    names = matching(known.names(), pattern)
    parts: list[Any] = []
    if known.profile is not None:
        parts.append(sites_table([row for row in site_rows(known.profile) if row["site"] in names]))
    for name in names:
        for operand, numbers in known.operands(name).items():
            title = f"{operand} of {name}"
            parts += ["", *distribution_parts(title, numbers, brief=len(names) > 1)]
        if known.profile is not None and (rows := profile_rows(known.profile, [name])):
            parts += ["", *error_parts(f"at {name}", rows)]
        if known.profile is not None and (changes := loss_rows(known.profile, [name])):
            parts += ["", f"change of the loss, relative, when one product at {name} is switched"]
            parts.append(loss_table(changes))
        if known.plan is not None:
            parts += ["", plan_table_at(known.plan, name)]
    return parts
