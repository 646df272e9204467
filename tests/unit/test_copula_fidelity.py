"""SQNR of FP8 products of drawn rows against that of fresh rows of the same known distribution."""

from collections.abc import Callable

import pytest
import torch

from loka.numerics import OperandStatistics
from loka.probe.distributions import Copula
from loka.probe.sampler import row_model

F, ROWS, BATCHES = 64, 256, 48
Rows = Callable[[int, torch.Generator], torch.Tensor]


def correlated(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Four directions and half as much of each feature's own, variance 1."""
    loadings = torch.randn(4, F, generator=torch.Generator().manual_seed(5)) / 2
    z = torch.randn(rows, 4, generator=generator) @ loadings
    z = z + 0.5 * torch.randn(rows, F, generator=generator)
    return z / (loadings.square().sum(dim=0) + 0.25).sqrt()


def per_row(rows: int, generator: torch.Generator, freedom: int) -> torch.Tensor:
    """What makes normal rows Student t rows."""
    return torch.randn(rows, freedom, generator=generator).square().mean(dim=1, keepdim=True).rsqrt()


def scales() -> torch.Tensor:
    return 10 ** (6 * torch.rand(F, generator=torch.Generator().manual_seed(6)) - 3)


DISTRIBUTIONS: dict[str, Rows] = {
    "lognormal, one sign": lambda n, g: (1.5 * torch.randn(n, F, generator=g)).exp(),
    "lognormal, correlated": lambda n, g: correlated(n, g).exp(),
    "relu": lambda n, g: (correlated(n, g) - 1).relu(),
    "hard swish": lambda n, g: torch.nn.functional.hardswish(2 * correlated(n, g)),
    "student t rows": lambda n, g: torch.randn(n, F, generator=g) * per_row(n, g, 3),
    "relu of student t rows": lambda n, g: (correlated(n, g) * per_row(n, g, 3)).relu(),
    "scales over six decades": lambda n, g: (1.5 * correlated(n, g)).exp() * scales(),
    "nearly constant": lambda n, g: (1 + 0.02 * correlated(n, g)) * scales(),
    "nearly constant, a few rows beside": lambda n, g: (
        1.7 + 0.003 * correlated(n, g) - 0.3 * (torch.rand(n, 1, generator=g) < 0.01)
    ),
}


def e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()


def sqnr_db(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> float:
    """Of the product in E4M3, x [batches, rows, F] by this scale and w by its rows', against FP64.

    The mean in dB over batches.
    """
    wanted = x.double() @ w.double().t()
    noise = e4m3(x, scale) @ e4m3(w, w.abs().amax(dim=1, keepdim=True) / 448).t() - wanted
    sums = [t.square().sum(dim=(1, 2)) for t in (wanted, noise)]
    return float((10 * torch.log10(sums[0] / sums[1])).mean())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_drawn_rows_lose_as_much_in_fp8_as_real_ones(name: str) -> None:
    rows, generator = DISTRIBUTIONS[name], torch.Generator().manual_seed(0)
    w = torch.randn(F, F, generator=generator)
    statistics = OperandStatistics.empty(F)
    for _ in range(BATCHES):
        statistics.add(rows(ROWS, generator).bfloat16())
    real = rows(BATCHES * ROWS, generator).bfloat16().float().view(BATCHES, ROWS, F)
    drawn = row_model(statistics).draw(BATCHES * ROWS, generator).view(BATCHES, ROWS, F)
    found = {}
    for which, x in (("real", real), ("drawn", drawn)):
        by_row = x.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 448
        by_batch = by_row.amax(dim=1, keepdim=True)
        power = torch.exp2(torch.log2(by_batch).ceil())
        found[which] = [sqnr_db(x, w, scale) for scale in (by_row, by_batch, power)]
    assert found["drawn"] == pytest.approx(found["real"], abs=0.35)


def test_heavy_tails_of_single_features_are_no_scale_of_rows() -> None:
    for name, has_scale in (
        ("lognormal, one sign", False),
        ("relu", False),
        ("student t rows", True),
        ("relu of student t rows", True),
    ):
        statistics = OperandStatistics.empty(F)
        statistics.add(DISTRIBUTIONS[name](BATCHES * ROWS, torch.Generator().manual_seed(1)))
        fitted = row_model(statistics)
        assert isinstance(fitted, Copula)
        assert fitted.scales.is_none is not has_scale, name
