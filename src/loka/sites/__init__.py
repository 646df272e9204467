"""The products of a model: found by running a batch, selected by name."""

from loka.sites.discover import find_sites
from loka.sites.reasons import why_not_plannable
from loka.sites.select import check_site_patterns, matches, select_sites
from loka.sites.watch import SiteWatch, plannable_linears

__all__ = [
    "SiteWatch",
    "check_site_patterns",
    "find_sites",
    "matches",
    "plannable_linears",
    "select_sites",
    "why_not_plannable",
]
