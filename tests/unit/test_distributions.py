"""Models of operands: matrix normal, multivariate normal and copula against what they are fitted to."""

import math

import pytest
import torch

from loka.errors import UsageError
from loka.numerics import OperandStatistics
from loka.numerics.covariance import Covariance
from loka.numerics.marginals import Marginals
from loka.probe.distributions import Copula, IndependentNormal, MatrixNormal, MultivariateNormal
from loka.probe.distributions.copula import hermite_coefficients, latent_correlation
from loka.probe.distributions.correlated import CorrelatedNormal, nystroem_loadings
from loka.probe.distributions.row_scales import RowScales


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def low_rank_rows(rows: int, features: int, rank: int, seed: int = 0) -> torch.Tensor:
    g = generator(seed)
    loadings = torch.randn(features, rank, generator=g) / rank**0.5
    return torch.randn(rows, rank, generator=g) @ loadings.t() + 0.3 * torch.randn(
        rows, features, generator=g
    )


def second_moment_ratios(drawn: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """E[(v x)^2] of drawn over real rows along each leading direction v of the real ones, top 4."""
    wide = real.double()
    if wide.shape[0] < wide.shape[1]:
        _, vectors = torch.linalg.eigh(wide @ wide.t())
        directions = torch.linalg.qr(wide.t() @ vectors[:, -4:]).Q
    else:
        directions = torch.linalg.eigh(wide.t() @ wide).eigenvectors[:, -4:]
    along = (drawn.double() @ directions).square().mean(dim=0)
    return along / (wide @ directions).square().mean(dim=0)


# --- multivariate normal ------------------------------------------------------------------------------------


def test_a_normal_draw_has_the_learned_mean_and_covariance() -> None:
    x = 2 + low_rank_rows(3000, 12, 3)
    drawn = MultivariateNormal.of(Covariance.of(x)).draw(60000, generator(1))
    torch.testing.assert_close(drawn.mean(dim=0), x.mean(dim=0), rtol=0, atol=0.02)
    torch.testing.assert_close(torch.cov(drawn.t()), torch.cov(x.t()), rtol=0, atol=0.04)


def test_a_constant_feature_stays_constant() -> None:
    x = low_rank_rows(300, 5, 2)
    x[:, 3] = 7.0
    covariance, marginals = Covariance.of(x), Marginals.of(x)
    assert bool((MultivariateNormal.of(covariance).draw(50, generator())[:, 3] == 7).all())
    assert bool((Copula.of(covariance, marginals).draw(50, generator())[:, 3] == 7).all())


def test_fewer_rows_than_features_are_enough() -> None:
    x = low_rank_rows(6, 20, 2)
    for model in (
        MultivariateNormal.of(Covariance.of(x)),
        Copula.of(Covariance.of(x), Marginals.of(x)),
    ):
        drawn = model.draw(4000, generator())
        assert bool(drawn.isfinite().all())
        torch.testing.assert_close(drawn.std(dim=0), x.std(dim=0), rtol=0.25, atol=0)


def test_wide_rows_keep_their_leading_directions() -> None:
    x = low_rank_rows(400, 2100, 8)
    ratios = second_moment_ratios(MultivariateNormal.of(Covariance.of(x)).draw(1500, generator(1)), x)
    torch.testing.assert_close(ratios, torch.ones(4, dtype=torch.float64), rtol=0.1, atol=0)


def test_the_nystroem_diagonal_is_never_above_what_was_seen() -> None:
    x = low_rank_rows(40, 2050, 60)
    loadings, std = nystroem_loadings(Covariance.of(x))
    explained = loadings.square().sum(dim=1)
    assert loadings.shape[1] <= 64
    assert bool((explained <= std.square() * 1.01).all())


def test_independent_features_follow_the_moments() -> None:
    from loka.numerics import Moments

    x = torch.tensor([[1.0, 10.0], [3.0, 10.0]])
    drawn = IndependentNormal.of(Moments.of(x)).draw(20000, generator())
    assert drawn[:, 0].mean().item() == pytest.approx(2, abs=0.05)
    assert drawn[:, 0].std().item() == pytest.approx(math.sqrt(2), abs=0.05)
    assert bool((drawn[:, 1] == 10).all())


def test_a_matrix_that_is_no_correlation_is_brought_to_the_nearest() -> None:
    impossible = torch.tensor([[1.0, 0.9, -0.9], [0.9, 1.0, 0.9], [-0.9, 0.9, 1.0]], dtype=torch.float64)
    drawn = CorrelatedNormal.of_matrix(impossible, device=torch.device("cpu")).draw(40000, generator())
    found = torch.corrcoef(drawn.t())
    torch.testing.assert_close(drawn.std(dim=0), torch.ones(3), rtol=0.03, atol=0)
    # Higham (2002): by symmetry the nearest has off-diagonals +-1/2.
    expected = torch.tensor([[1.0, 0.5, -0.5], [0.5, 1.0, 0.5], [-0.5, 0.5, 1.0]])
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


def test_loadings_longer_than_one_are_shortened() -> None:
    loadings = torch.tensor([[2.0, 0.0], [0.6, 0.0], [0.0, 0.0]])
    drawn = CorrelatedNormal.of_loadings(loadings, device=torch.device("cpu")).draw(40000, generator())
    found = torch.corrcoef(drawn.t())
    torch.testing.assert_close(drawn.std(dim=0), torch.ones(3), rtol=0.03, atol=0)
    assert found[0, 1].item() == pytest.approx(0.6, abs=0.02)
    assert found[0, 2].item() == pytest.approx(0, abs=0.02)


# --- copula -------------------------------------------------------------------------------------------------


def spiky_rows(rows: int = 6000) -> torch.Tensor:
    """ReLU of correlated numbers, lognormal ones, bounded ones and a binary one."""
    z = low_rank_rows(rows, 16, 3)
    x = z.clone()
    x[:, :6] = z[:, :6].relu()
    x[:, 6:9] = (1.2 * z[:, 6:9]).exp()
    x[:, 9:12] = z[:, 9:12].clamp(-0.5, 0.5)
    x[:, 12] = (z[:, 12] > 0.4).float()
    return x


def test_a_copula_keeps_marginals_and_second_moments() -> None:
    x = spiky_rows()
    drawn = Copula.of(Covariance.of(x), Marginals.of(x)).draw(40000, generator(1))
    zeros, expected = (drawn == 0).float().mean(dim=0), (x == 0).float().mean(dim=0)
    torch.testing.assert_close(zeros, expected, rtol=0, atol=0.01)
    assert bool((drawn.amin(dim=0) >= x.amin(dim=0)).all())
    assert bool((drawn.amax(dim=0) <= x.amax(dim=0)).all())
    torch.testing.assert_close(drawn.mean(dim=0), x.mean(dim=0), rtol=0.05, atol=0.02)
    torch.testing.assert_close(drawn.square().mean(dim=0), x.square().mean(dim=0), rtol=0.12, atol=0.01)
    torch.testing.assert_close(
        second_moment_ratios(drawn, x), torch.ones(4, dtype=torch.float64), rtol=0.12, atol=0
    )


def test_a_copula_corrects_what_squeezing_takes_from_the_correlation() -> None:
    x = spiky_rows()
    drawn = Copula.of(Covariance.of(x), Marginals.of(x)).draw(60000, generator(2))
    error = (torch.corrcoef(drawn.t()) - torch.corrcoef(x.t())).abs()
    assert float(error.max()) < 0.06


def test_rows_that_are_multiples_of_one_vector_stay_so() -> None:
    g = generator(3)
    direction = torch.randn(10, generator=g)
    x = torch.randn(4000, 1, generator=g).pow(3) * direction
    drawn = Copula.of(Covariance.of(x), Marginals.of(x)).draw(4000, generator(4))
    values = torch.linalg.svdvals(drawn.double())
    assert float(values[1] / values[0]) < 0.1


def test_a_wide_copula_keeps_zeros_and_leading_directions() -> None:
    x = low_rank_rows(400, 2100, 6).relu()
    drawn = Copula.of(Covariance.of(x), Marginals.of(x)).draw(1500, generator(5))
    zeros = (drawn == 0).float().mean()
    assert zeros.item() == pytest.approx((x == 0).float().mean().item(), abs=0.01)
    torch.testing.assert_close(
        second_moment_ratios(drawn, x), torch.ones(4, dtype=torch.float64), rtol=0.2, atol=0
    )


def test_hermite_coefficients_of_a_step_function_are_exact() -> None:
    # A feature that is 0 or 1 with equal shares: Q(Phi(z)) = [z > 0], so a_1 = phi(0), a_2 = 0 and
    # a_3 = E[He_3(z) ; z > 0] / sqrt(6) = -phi(0) / sqrt(6); its variance is 1/4.
    x = torch.tensor([[0.0], [1.0]]).repeat(50, 1)
    found = hermite_coefficients(Marginals.of(x), RowScales.none(), orders=3)[:, 0, 0]
    density = 1 / math.sqrt(2 * math.pi)
    assert found.tolist() == pytest.approx([0, 2 * density, 0, -2 * density / math.sqrt(6)], abs=1e-9)


def test_hermite_coefficients_at_a_scale_are_those_of_the_squeezed_function() -> None:
    g = generator(8)
    x = torch.randn(3000, 1, generator=g).exp()
    marginals = Marginals.of(x)
    scales = RowScales(torch.tensor([0.2, 5.0]).double(), torch.tensor([0.7, 0.3]).double())
    found = hermite_coefficients(marginals, scales, orders=2)[:, 0]
    z = torch.linspace(-9, 9, 60001, dtype=torch.float64)[:, None]
    weight = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    mean = x.double().mean()
    hermite = (torch.ones_like(z), z, (z.square() - 1) / math.sqrt(2))
    for column, level in enumerate((0.2, 5.0)):
        squeezed = (marginals.quantile(scales.cdf(z * level)).double() - mean) / x.double().std()
        expected = [float((squeezed * h * weight).sum()) for h in hermite]
        assert found[:, column].tolist() == pytest.approx(expected, abs=0.03)


def test_latent_correlation_of_two_signs_follows_the_arcsine_law() -> None:
    # Two signs of normal numbers with correlation r correlate by 2/pi arcsin r (Sheppard 1899).
    x = torch.tensor([[-1.0, -1.0], [1.0, 1.0]]).repeat(50, 1)
    coefficients = hermite_coefficients(Marginals.of(x), RowScales.none())
    weights = RowScales.none().weights
    for latent in (-0.6, 0.1, 0.5, 0.8):
        wanted = 2 / math.pi * math.asin(latent)
        matrix = torch.tensor([[1.0, wanted], [wanted, 1.0]], dtype=torch.float64)
        found = latent_correlation(matrix, coefficients, weights)[0, 1].item()
        assert found == pytest.approx(latent, abs=0.01)


def test_rows_of_very_different_length_keep_their_directions() -> None:
    # Gradients: a direction of normal numbers times a length over decades. Squeezed into a Gaussian copula,
    # every row would be heavy-tailed in itself.
    g = generator(9)
    direction = torch.randn(6000, 2, generator=g) @ torch.randn(2, 24, generator=g)
    x = direction * (3 * torch.randn(6000, 1, generator=g)).exp()
    statistics = OperandStatistics.empty(24)
    statistics.add(x)
    exponents = statistics.moments.row_exponents
    covariance, marginals = Covariance.of(x), Marginals.of(x)

    def share_of_two(rows: torch.Tensor) -> float:
        unit = (rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)).double()
        values = torch.linalg.eigvalsh(unit.t() @ unit)
        return float(values[-2:].sum() / values.sum())

    elliptical = Copula.of(covariance, marginals, row_exponents=exponents).draw(4000, generator(1))
    gaussian = Copula.of(covariance, marginals).draw(4000, generator(1))
    assert share_of_two(x) > 0.999
    assert share_of_two(elliptical) > 0.9
    assert share_of_two(gaussian) < share_of_two(elliptical) - 0.1


def test_large_features_keep_their_correlation_where_not_every_pair_can() -> None:
    # ReLU of a product with raw features over decades: the largest raw one leads large rows along one
    # direction, and the Pearson correlations of all features at once are those of no Gaussian copula.
    g = generator(11)
    raw = (3 * torch.randn(6000, 8, generator=g)).exp().clamp(max=3e4) * 10.0 ** (
        -2 * torch.arange(8).clamp(max=2)
    )
    x = (raw @ torch.randn(8, 48, generator=g)).relu()

    def beyond_the_leading(rows: torch.Tensor) -> float:
        values = torch.linalg.eigvalsh(rows.double().t() @ rows.double())
        return float(values[:-1].sum() / values.sum())

    assert beyond_the_leading(x) < 0.01
    drawn = Copula.of(Covariance.of(x), Marginals.of(x)).draw(6000, generator(12))
    assert beyond_the_leading(drawn) < beyond_the_leading(x) + 1e-3


# --- row scales ---------------------------------------------------------------------------------------------


def test_rows_of_one_length_have_no_scale() -> None:
    x = low_rank_rows(2000, 32, 8)
    statistics = OperandStatistics.empty(32)
    statistics.add(x)
    assert RowScales.of(statistics.moments.row_exponents, low_rank_rows(2000, 32, 8, seed=1)).is_none
    assert RowScales.of(torch.zeros(64, dtype=torch.int64), x).is_none


def test_row_scales_scatter_as_the_rows_do_beyond_normal_ones() -> None:
    g = generator(10)
    normal = torch.randn(20000, 16, generator=g)
    x = normal * (2 * torch.randn(20000, 1, generator=g)).exp2()
    statistics = OperandStatistics.empty(16)
    statistics.add(x)
    scales = RowScales.of(statistics.moments.row_exponents, normal)
    drawn = scales.draw(40000, g).log2()
    assert float(scales.weights.sum()) == pytest.approx(1)
    assert float(drawn.std()) == pytest.approx(2, rel=0.05)


def test_quantile_and_cdf_of_scaled_numbers_are_inverse() -> None:
    scales = RowScales(torch.tensor([0.01, 1.0, 30.0]).double(), torch.tensor([0.5, 0.3, 0.2]).double())
    u = torch.tensor([1e-6, 0.01, 0.3, 0.5, 0.7, 0.95, 1 - 1e-6], dtype=torch.float64)
    torch.testing.assert_close(scales.cdf(scales.quantile(u)), u, rtol=1e-4, atol=1e-9)
    assert scales.quantile(torch.tensor([0.0, 1.0]).double()).tolist() == [-math.inf, math.inf]


def test_many_numbers_go_through_a_table_that_agrees() -> None:
    scales = RowScales(torch.tensor([0.01, 1.0, 30.0]).double(), torch.tensor([0.5, 0.3, 0.2]).double())
    z = torch.cat([torch.linspace(-500, 500, 10001), torch.linspace(-0.05, 0.05, 10001)]).view(2, -1)
    alone = torch.cat([scales.cdf(part) for part in z.flatten().split(1000)]).view_as(z)
    torch.testing.assert_close(scales.cdf(z), alone, rtol=0, atol=1e-5)


# --- matrix normal ------------------------------------------------------------------------------------------


def test_flip_flop_steps_are_the_published_equations() -> None:
    w = torch.randn(3, 4, generator=generator(6), dtype=torch.float64)
    model = MatrixNormal(3, 4, momentum=0.9)
    model.update(w)
    centred = w - w.mean()
    u, v = torch.eye(3, dtype=torch.float64), torch.eye(4, dtype=torch.float64) * centred.square().mean()

    def inverse(matrix: torch.Tensor) -> torch.Tensor:
        side = matrix.shape[0]
        return torch.linalg.inv(matrix + 1e-6 * matrix.trace() / side * torch.eye(side, dtype=torch.float64))

    # (Wc L^-T)(Wc L^-T)^T = Wc (L L^T)^-1 Wc^T
    u = 0.9 * u + 0.1 * centred @ inverse(v) @ centred.t() / 4
    v = 0.9 * v + 0.1 * centred.t() @ inverse(u) @ centred / 3
    scale = u.trace() / 3
    torch.testing.assert_close(model.row_covariance, u / scale, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model.column_covariance, v * scale, rtol=1e-9, atol=1e-12)
    assert model.row_covariance.trace().item() == pytest.approx(3)
    assert torch.equal(model.row_covariance, model.row_covariance.t())


def test_a_matrix_normal_finds_the_scales_of_rows_and_columns() -> None:
    g = generator(7)
    rows, columns = torch.linspace(0.5, 2, 60).double(), torch.linspace(1, 4, 80).double()
    model = MatrixNormal(60, 80, momentum=0.9)
    for _ in range(60):
        w = rows[:, None] * torch.randn(60, 80, generator=g, dtype=torch.float64) * columns
        model.update(w)
    drawn = torch.stack([model.draw(g) for _ in range(40)]).double()
    expected = (rows[:, None] * columns).square()
    found = drawn.square().mean(dim=0)
    by_row, by_column = found.mean(dim=1) / expected.mean(dim=1), found.mean(dim=0) / expected.mean(dim=0)
    torch.testing.assert_close(by_row, torch.ones_like(by_row), rtol=0.25, atol=0)
    torch.testing.assert_close(by_column, torch.ones_like(by_column), rtol=0.25, atol=0)


def test_a_zero_weight_and_wrong_use() -> None:
    model = MatrixNormal(2, 3)
    model.update(torch.zeros(2, 3))
    assert float(model.draw(generator()).abs().max()) < 1e-9
    with pytest.raises(UsageError, match=r"is of \(2, 3\), the weight of \(3, 2\)"):
        model.update(torch.zeros(3, 2))
    with pytest.raises(UsageError, match="a 4096 x 64 weight needs sides of 1 to 2048"):
        MatrixNormal(4096, 64)
    with pytest.raises(UsageError, match=r"MatrixNormal\(momentum=1.0\) must be in \[0, 1\)"):
        MatrixNormal(2, 2, momentum=1.0)
