"""What a planned site is: the linear, its autograd function, chains of them, and swapping them in and out."""

from loka.planned.chain import PlannedChain, is_chain, link, unlink
from loka.planned.function import planned_product
from loka.planned.linear import PlannedLinear, compute_dtype_of
from loka.planned.routes import Route, Routes, is_high_precision, routes_of
from loka.planned.swap import is_planned, swap_in, swap_out, why_not_revertible
from loka.planned.weights import weights_fixed

__all__ = [
    "PlannedChain",
    "PlannedLinear",
    "Route",
    "Routes",
    "compute_dtype_of",
    "is_chain",
    "is_high_precision",
    "is_planned",
    "link",
    "planned_product",
    "routes_of",
    "swap_in",
    "swap_out",
    "unlink",
    "weights_fixed",
    "why_not_revertible",
]
