"""How much of a model's products a plan puts into FP8."""

from __future__ import annotations

from loka.artifacts import Plan, Profile
from loka.recsys.evaluation.comparison import Coverage
from loka.vocab import Pass

__all__ = ["coverage_of"]


def coverage_of(plan: Plan, profile: Profile) -> tuple[Coverage, ...]:
    """Sites and GEMM FLOPs in FP8 by pass, over every product that the profile lists.

    Products that cannot be planned count in the total. A pass that never runs at a site (no gradient for a
    first layer's input) does not: the profile has no error for it.
    """
    table = profile.sites
    ran = set(zip(profile.errors.site, profile.errors.pass_, strict=True))
    parts = []
    for pass_ in Pass:
        sites = sites_fp8 = flops = flops_fp8 = 0
        for i, name in enumerate(table.name):
            if table.calls[i] == 0 or (not table.not_planned[i] and (name, pass_) not in ran):
                continue
            work = 2 * table.m_p50[i] * table.n[i] * table.k[i] * table.calls[i]
            site = plan.site(name)
            fp8 = site is not None and any(
                c.spec_a.is_quantized or c.spec_b.is_quantized for c in site.choices(pass_)
            )
            sites, flops = sites + 1, flops + work
            sites_fp8, flops_fp8 = sites_fp8 + fp8, flops_fp8 + work * fp8
        parts.append(Coverage(pass_, sites, sites_fp8, flops, flops_fp8))
    return tuple(parts)
