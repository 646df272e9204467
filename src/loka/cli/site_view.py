"""Everything that is known of some sites: their errors in a profile, their kernels in a plan."""

from __future__ import annotations

from typing import Any

from loka.artifacts import Plan, Profile
from loka.cli.plan_view import plan_rows, plan_table_at
from loka.cli.profile_view import errors_table, matching, profile_rows, site_rows, sites_table

__all__ = ["site_json", "site_parts"]


def _names(profile: Profile | None, plan: Plan | None) -> list[str]:
    in_profile = [] if profile is None else profile.sites.name
    in_plan = [] if plan is None else [*(site.name for site in plan.sites), *plan.unplanned]
    return list(dict.fromkeys([*in_profile, *in_plan]))


def site_json(pattern: str, profile: Profile | None, plan: Plan | None) -> dict[str, Any]:
    """As `site_parts`, as plain values.

    Raises:
        UnknownNameError: for a pattern that matches nothing.
    """
    names = matching(_names(profile, plan), pattern)
    result: dict[str, Any] = {}
    if profile is not None:
        result["sites"] = [row for row in site_rows(profile) if row["site"] in names]
        result["errors"] = profile_rows(profile, names)
    if plan is not None:
        result["plan"] = plan_rows(plan, names)
    return result


def site_parts(pattern: str, profile: Profile | None, plan: Plan | None) -> list[Any]:
    """Renderables: the matching sites, then for each its errors and what the plan says.

    Raises:
        UnknownNameError: for a pattern that matches nothing.
    """
    names = matching(_names(profile, plan), pattern)
    parts: list[Any] = []
    if profile is not None:
        parts.append(sites_table([row for row in site_rows(profile) if row["site"] in names]))
    for name in names:
        if profile is not None and (rows := profile_rows(profile, [name])):
            parts.append(errors_table(rows, f"errors at {name}"))
        if plan is not None:
            parts.append(plan_table_at(plan, name))
    return parts
