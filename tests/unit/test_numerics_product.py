"""Products, errors, intervals and moments against direct computation."""

from __future__ import annotations

import math

import pytest
import torch

from loka.errors import UsageError
from loka.numerics import (
    Moments,
    amax_of,
    cast_loss,
    cast_operand,
    decode,
    exact_product,
    product_error,
    product_of_operands,
    sqnr_db,
)
from loka.vocab import Format, Granularity, OperandSpec


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_product_of_operands_by_loops() -> None:
    a = cast_operand(randn(3, 40), OperandSpec.of(Format.E4M3, Granularity.BLOCKWISE_1X128))
    b = cast_operand(randn(2, 40, seed=1), OperandSpec.of(Format.E5M2, Granularity.ROWWISE))
    got = product_of_operands(a, b, dtype=torch.float64)
    for i in range(3):
        for j in range(2):
            want = math.fsum(
                float(a.values[i, t].float()) * float(a.scale[i, 0])
                * float(b.values[j, t].float()) * float(b.scale[j])
                for t in range(40)
            )  # fmt: skip
            assert got[i, j].item() == pytest.approx(want, rel=1e-12)


def test_operands_that_disagree_in_k_are_refused() -> None:
    spec = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE)
    with pytest.raises(UsageError, match="disagree in k"):
        product_of_operands(cast_operand(randn(2, 8), spec), cast_operand(randn(2, 9), spec))


@pytest.mark.parametrize("granularity", list(Granularity))
def test_ground_facts_of_fp8_error(granularity: Granularity) -> None:
    """rel of e4m3 x e4m3 on N(0, 1): 3.0 to 3.8 %; cast errors 2.6 and 5.3 %."""
    x, w = randn(256, 512), randn(128, 512, seed=1)
    a, b = (cast_operand(t, OperandSpec.of(Format.E4M3, granularity)) for t in (x, w))
    error = product_error(product_of_operands(a, b), exact_product(x, w))
    rel = math.sqrt(error.noise / error.signal)
    assert 0.030 <= rel <= 0.040


def test_d14_long_sums_in_the_emulated_product() -> None:
    for k in (1024, 16384, 65536):
        a = cast_operand(torch.rand(4, k, generator=torch.Generator().manual_seed(k)),
                         OperandSpec.of(Format.E4M3, Granularity.TENSORWISE))  # fmt: skip
        exact = product_of_operands(a, a, dtype=torch.float64)
        rel = (product_of_operands(a, a).double() - exact).norm() / exact.norm()
        assert rel <= 1e-6


def test_product_error_by_hand() -> None:
    ref = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    out = torch.tensor([[3.0, 4.5], [0.0, 0.0], [0.5, 0.0]])
    e = product_error(out, ref)
    assert e.signal.item() == 26
    assert e.noise.item() == 0.5
    assert e.row_max.item() == 0.5
    assert e.row_p50.item() == pytest.approx(0.1)
    assert e.bias.item() == pytest.approx((0.5 - 0.5) / 6 / (8 / 6))
    assert e.mere.item() == pytest.approx((0 + 0.125 + 0.5) / 3)


def test_ruined_row_shows_in_rows_and_hides_in_the_norm() -> None:
    """A row below the smallest value of a shared scale is lost; rel over all rows stays small."""
    x = randn(100, 64)
    x[0] *= 1e7
    w = randn(32, 64, seed=1)
    spec = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE)
    error = product_error(
        product_of_operands(cast_operand(x, spec), cast_operand(w, spec)), exact_product(x, w)
    )
    assert math.sqrt(error.noise / error.signal) < 0.06
    assert error.row_p50 > 0.5


def test_product_error_of_nothing_and_of_zero_rows() -> None:
    empty = product_error(torch.empty(0, 4), torch.empty(0, 4))
    assert all(v.item() == 0 for v in empty)
    broken = product_error(torch.ones(1, 2), torch.zeros(1, 2))
    assert broken.row_max.item() == math.inf
    assert sqnr_db(0.0, 1.0) == -300
    assert sqnr_db(1.0, 0.0) == 300
    assert sqnr_db(100.0, 1.0) == pytest.approx(20)


def test_cast_loss_by_counting() -> None:
    x = torch.tensor([[1.0, 2.0**-11, 2.0**-9, 0.0, 600.0, math.nan]])
    spec = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)
    loss = cast_loss(x, cast_operand(x, spec, scale=torch.tensor(1.0)))
    assert loss.underflow.item() == pytest.approx(1 / 4)
    assert loss.saturation.item() == pytest.approx(1 / 5)
    assert loss.nonfinite.item() == 1
    assert cast_loss(x, cast_operand(x, spec)).saturation.item() == 0


@pytest.mark.parametrize("granularity", list(Granularity))
def test_a_dynamic_scale_never_saturates_and_underflow_is_what_became_zero(granularity: Granularity) -> None:
    x = randn(5, 300) * torch.logspace(-6, 6, 300)
    q = cast_operand(x, OperandSpec.of(Format.E4M3, granularity))
    loss = cast_loss(x, q)
    assert loss.saturation.item() == 0
    assert loss.underflow.item() == pytest.approx(float((decode(q) == 0).double().mean()))


def test_merged_moments_equal_the_moments_of_all_rows() -> None:
    x = randn(1000, 7).mul(torch.tensor([1.0, 1e3, 1e-3, 1, 1, 0, 5])) + torch.tensor(
        [0.0, 1e4, 0, 0, 0, 0, 3]
    )
    x[::3, 3] = 0.0
    parts = [Moments.of(p) for p in x.split([400, 0, 1, 599])]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert merged.count.item() == 1000
    assert torch.allclose(merged.mean, x.double().mean(dim=0), rtol=1e-12, atol=1e-15)
    assert torch.allclose(merged.std, x.double().std(dim=0), rtol=1e-9, atol=1e-15)
    assert torch.equal(merged.amax, x.abs().amax(dim=0))
    assert merged.zeros.item() == int((x == 0).sum())
    assert merged.negatives.item() == int((x < 0).sum())
    assert merged.exponents.sum().item() == int((x != 0).sum())


def test_exponent_histogram_by_hand() -> None:
    m = Moments.of(torch.tensor([[1.0, 1.99, 2.0, -0.5, 0.0, 2.0**-60, 2.0**60]]))
    bins = {i - 48: int(c) for i, c in enumerate(m.exponents) if c}
    assert bins == {0: 2, 1: 1, -1: 1, -48: 1, 15: 1}


def test_rows_with_a_nonfinite_element_are_counted_and_left_out() -> None:
    x = randn(10, 3)
    clean = Moments.of(x[:9])
    x[9, 1] = math.inf
    m = Moments.of(x)
    assert m.nonfinite_rows.item() == 1
    assert torch.equal(m.mean, clean.mean)
    assert torch.equal(m.amax, clean.amax)


def test_d12_statistics_of_fp8_tensors_are_those_of_the_upcast_tensor() -> None:
    x = randn(20, 5).to(torch.float8_e4m3fn)
    for name, t in Moments.of(x).tensors().items():
        assert torch.equal(t, Moments.of(x.float()).tensors()[name])
    assert torch.equal(amax_of(x, Granularity.ROWWISE), x.float().abs().amax(dim=1))
