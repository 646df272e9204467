"""Site selection by glob patterns on qualified names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from loka.errors import UnknownNameError
from loka.vocab import Site

__all__ = ["check_site_patterns", "matches", "select_sites"]


def matches(name: str, patterns: Sequence[str]) -> str:
    """The first glob pattern that matches a qualified name, `*` crossing dots; empty when none does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")


def check_site_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise where a pattern matches no name.

    Raises:
        UnknownNameError: naming the pattern and the nearest names.
    """
    for pattern in patterns:
        if pattern == "*" or any(fnmatchcase(name, pattern) for name in names):
            continue
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names[:5])
        raise UnknownNameError(
            f"site pattern `{pattern}` matches none of {len(names)} sites",
            lines=near,
            hint="patterns are globs on qualified names, such as `tower.*` or `*.mlp.0`",
        )


def select_sites(
    sites: Sequence[Site], *, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()
) -> list[Site]:
    """All sites, those that are not selected marked as not planned.

    Args:
        sites: As `find_sites` gives them.
        include: A site must match one of these.
        exclude: And none of these.

    Raises:
        UnknownNameError: for a pattern that matches nothing.
    """
    check_site_patterns([*include, *exclude], [site.name for site in sites])
    chosen = []
    for site in sites:
        reason = site.not_planned
        if not reason and not matches(site.name, include):
            reason = "no include pattern matches"
        elif not reason and (pattern := matches(site.name, exclude)):
            reason = f"excluded by `{pattern}`"
        chosen.append(replace(site, not_planned=reason))
    return chosen
