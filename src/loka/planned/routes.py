"""What runs a pass: the kernel and how its operands are cast, by the number of rows."""

from __future__ import annotations

from typing import NamedTuple

from loka.artifacts.plan import Choice, SitePlan
from loka.errors import ArtifactError
from loka.kernels import HIGH_PRECISION, Kernel, kernel
from loka.vocab import PASS_OPERANDS, GemmProblem, OperandSpec, Pass

__all__ = ["Route", "Routes", "is_high_precision", "routes_of"]


class Route(NamedTuple):
    """One choice with its kernel looked up.

    Attributes:
        m_below: Upper bound of M, exclusive; None for any.
        kernel: What computes the product.
        a: How operand A is cast.
        b: How operand B is cast.
    """

    m_below: int | None
    kernel: Kernel
    a: OperandSpec
    b: OperandSpec


class Routes(NamedTuple):
    """The routes of the three passes, each in rising m_below."""

    fwd: tuple[Route, ...]
    dgrad: tuple[Route, ...]
    wgrad: tuple[Route, ...]

    def for_rows(self, rows: int) -> tuple[Route, Route, Route]:
        """The route of fwd, dgrad and wgrad at M = rows."""
        fwd, dgrad, wgrad = self.places(rows)
        return self.fwd[fwd], self.dgrad[dgrad], self.wgrad[wgrad]

    def places(self, rows: int) -> tuple[int, int, int]:
        """Which route of fwd, dgrad and wgrad that is."""
        return _place(self.fwd, rows), _place(self.dgrad, rows), _place(self.wgrad, rows)


def _place(routes: tuple[Route, ...], rows: int) -> int:
    for place, route in enumerate(routes[:-1]):
        # routes_of has checked that only the last one is open.
        if route.m_below is not None and rows < route.m_below:
            return place
    return len(routes) - 1


def routes_of(site_plan: SitePlan) -> Routes:
    """Look up the kernels of a site's plan.

    Raises:
        ArtifactError: for a pass without choices, or whose bounds do not rise to an open end.
        UnknownNameError: for a kernel that does not exist.
    """
    fwd, dgrad, wgrad = (_routes(site_plan, pass_) for pass_ in Pass)
    return Routes(fwd, dgrad, wgrad)


def _routes(site_plan: SitePlan, pass_: Pass) -> tuple[Route, ...]:
    choices = site_plan.choices(pass_)
    bounds = [choice.m_below for choice in choices]
    closed = [bound for bound in bounds[:-1] if bound is not None]
    rising = len(closed) == len(bounds) - 1 and all(a < b for a, b in zip([0, *closed], closed, strict=False))
    if not bounds or bounds[-1] is not None or not rising:
        raise ArtifactError(
            f"the plan of `{site_plan.name}` gives {pass_} the bounds m_below = {bounds}",
            hint="they must rise, and the last must be open (null)",
        )
    return tuple(_route(choice, pass_) for choice in choices)


def _route(choice: Choice, pass_: Pass) -> Route:
    found = kernel(choice.kernel)
    a, b = choice.spec_a, choice.spec_b
    if not found.operands(GemmProblem(1, 1, 1, pass_))[0].is_quantized:
        # Nothing is cast, so only the orientation matters, and the pass gives that.
        (_, a_transposed), (_, b_transposed) = PASS_OPERANDS[pass_]
        a = OperandSpec.high_precision(transposed=a_transposed)
        b = OperandSpec.high_precision(transposed=b_transposed)
    return Route(choice.m_below, found, a, b)


def is_high_precision(site_plan: SitePlan) -> bool:
    """True when no pass is switched: the site stays the nn.Linear it is."""
    return all(
        kernel(choice.kernel).name == HIGH_PRECISION for pass_ in Pass for choice in site_plan.choices(pass_)
    )
