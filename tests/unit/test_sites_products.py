"""Shapes of products against the FLOPs that torch's own counter finds at the ATen level."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from loka.sites import find_sites


class Run(nn.Module):
    """Calls one function of an activation and a Parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], w: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(w))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


CASES = {
    "linear": (nn.functional.linear, (2, 5, 16), (24, 16), (10, 24, 16)),
    "matmul": (torch.matmul, (2, 5, 16), (16, 24), (10, 24, 16)),
    "operator": (lambda x, w: x @ w, (5, 16), (16, 24), (5, 24, 16)),
    "transposed view": (lambda x, w: x @ w.t(), (5, 16), (24, 16), (5, 24, 16)),
    "row of a stack": (lambda x, w: x @ w[1], (5, 16), (3, 16, 24), (5, 24, 16)),
    "method": (lambda x, w: x.mm(w), (5, 16), (16, 24), (5, 24, 16)),
    "weight left": (lambda x, w: w @ x, (7, 16, 1), (24, 16), (7, 24, 16)),
    "vector": (torch.mv, (5, 16), (16,), (5, 1, 16)),
    "experts": (torch.bmm, (4, 5, 16), (4, 16, 24), (20, 24, 16)),
    "broadcast experts": (torch.matmul, (1, 5, 16), (4, 16, 24), (20, 24, 16)),
    "addmm": (lambda x, w: torch.addmm(_zeros(24), x, w), (5, 16), (16, 24), (5, 24, 16)),
    "addmm by name": (
        lambda x, w: torch.addmm(input=_zeros(24), mat1=x, mat2=w),
        (5, 16),
        (16, 24),
        (5, 24, 16),
    ),
    "baddbmm": (lambda x, w: torch.baddbmm(_zeros(4, 1, 24), x, w), (4, 5, 16), (4, 16, 24), (20, 24, 16)),
    "einsum": (lambda x, w: torch.einsum("bfd, de -> bfe", x, w), (2, 5, 16), (16, 24), (10, 24, 16)),
    "einsum implicit": (lambda x, w: torch.einsum("bd,de", x, w), (5, 16), (16, 24), (5, 24, 16)),
    "einsum dots": (lambda x, w: torch.einsum("...d,ed->...e", x, w), (2, 5, 16), (24, 16), (10, 24, 16)),
    "einsum batch": (lambda x, w: torch.einsum("bfd,fde->bfe", x, w), (2, 5, 16), (5, 16, 24), (10, 24, 16)),
    "einsum dots both": (
        lambda x, w: torch.einsum("...ij,...jk->...ik", x, w),
        (4, 5, 16),
        (1, 16, 24),
        (20, 24, 16),
    ),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), (2, 5, 16), (16, 24), (10, 24, 16)),
    "tensordot axes": (lambda x, w: torch.tensordot(x, w, ([1], [0])), (2, 16, 5), (16, 24), (10, 24, 16)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sites_shape_and_flops_of_a_functional_product(
    case: tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], tuple[int, int, int]],
) -> None:
    function, x_shape, w_shape, (rows, n, k) = case
    model, x = Run(function, w_shape), torch.randn(x_shape)
    (site,) = find_sites(model, lambda: model(x))
    assert (site.name, site.kind) == ("w", "functional")
    assert (site.rows, site.n, site.k) == (rows, n, k)
    with FlopCounterMode(display=False) as counter:
        model(x)
    if w_shape != (16,):  # torch counts no matrix-vector product
        assert site.flops == counter.get_total_flops()


def test_sites_einsum_of_three_operands_is_listed_without_a_shape() -> None:
    model = Run(lambda x, w: torch.einsum("bd,de,be->b", x, w, x), (8, 8))
    sites = find_sites(model, lambda: model(torch.randn(4, 8)))
    assert {s.name: s.not_planned for s in sites} == {
        "w": "functional (an einsum of 3 operands)",
        "einsum": "not FP8: both operands are activations (an einsum of 3 operands)",
    }


def test_sites_bias_of_a_functional_product() -> None:
    biased = Run(lambda x, w: torch.addmm(_zeros(24), x, w), (16, 24))
    added = Run(lambda x, w: torch.addmm(_zeros(5, 24), x, w), (16, 24))
    x = torch.randn(5, 16)
    assert find_sites(biased, lambda: biased(x))[0].bias
    assert not find_sites(added, lambda: added(x))[0].bias


def test_sites_two_products_in_one_module_get_two_names() -> None:
    model = Run(lambda x, w: torch.bmm(x, x.mT).sum() + torch.bmm(x.mT, x).sum() + w.sum(), (1,))
    sites = find_sites(model, lambda: model(torch.randn(2, 3, 4)))
    assert [(s.name, s.rows, s.n, s.k) for s in sites] == [("bmm", 6, 3, 4), ("bmm_2", 8, 4, 3)]


def test_sites_bilinear_counts_its_first_product() -> None:
    model = nn.Bilinear(6, 5, 4)
    (site,) = find_sites(model, lambda: model(torch.randn(3, 6), torch.randn(3, 5)))
    assert (site.name, site.rows, site.n, site.k, site.bias) == ("weight", 3, 20, 6, True)
