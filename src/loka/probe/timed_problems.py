"""What is timed for a plan: which products, and by which kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from loka.kernels import KERNELS, Kernel, usable
from loka.vocab import A_FORMATS, Device, Format, GemmProblem, Pass, Site

__all__ = ["timed_kernels", "timed_problems"]


def timed_problems(sites: Iterable[Site], *, weight_dtype: Format = Format.BF16) -> list[GemmProblem]:
    """Unique problems of all passes, both gradient formats; the weight's gradient in the weight's dtype."""
    found: dict[GemmProblem, None] = {}
    for site, pass_ in itertools.product(sites, Pass):
        for grad in A_FORMATS[pass_]:
            problem = GemmProblem.of_linear(
                pass_,
                rows=site.rows,
                out_features=site.n,
                in_features=site.k,
                grad_format=grad,
                out_dtype=weight_dtype if pass_ is Pass.WGRAD else Format.BF16,
            )
            found[problem] = None
    return list(found)


def timed_kernels(problem: GemmProblem, device: Device) -> list[Kernel]:
    """Every real kernel that can run the problem here, those that cast nothing included."""
    return [k for k in KERNELS.values() if not k.emulated and usable(k, problem, device)]
