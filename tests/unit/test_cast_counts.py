"""What casts make 0 and cut off: counted one by one, by plain torch and by the Triton kernel, interpreted."""

from __future__ import annotations

import pytest
import torch

from loka.kernels.column_statistics import cast_counts_of, codes_beside
from loka.kernels.triton.statistics import counts_of_cast
from loka.numerics import cast_counts, cast_loss, cast_operand, torch_dtype
from loka.vocab import Format, Granularity, OperandSpec

FORMATS = [Format.E4M3, Format.E5M2, Format.E4M3FNUZ, Format.E5M2FNUZ]


def sample(rows: int, k: int) -> torch.Tensor:
    """Values over forty octaves, a tenth of them 0, some -0, some small and negative."""
    generator = torch.Generator().manual_seed(rows + k)
    x = torch.randn(rows, k, generator=generator)
    x = x * torch.exp2(torch.randint(-30, 10, (rows, k), generator=generator).float())
    x[torch.rand(rows, k, generator=generator) < 0.1] = 0.0
    return torch.where(torch.rand(rows, k, generator=generator) < 0.05, -0.0, x)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 40), (33, 300), (16, 257)])
@pytest.mark.parametrize("given", [False, True])
def test_every_element_is_counted(format_: Format, shape: tuple[int, int], given: bool) -> None:
    x = sample(*shape)
    scale = torch.tensor(2.0**-4 if given else float(x.abs().max()) / format_.max or 1.0)
    codes = (x / scale).clamp(-format_.max, format_.max).to(torch_dtype(format_))
    bits, limit = codes.view(torch.uint8), scale if given else None
    zeroed = nonzero = over = 0
    for value, decoded in zip(x.flatten().tolist(), codes.float().flatten().tolist(), strict=True):
        nonzero += value != 0
        zeroed += value != 0 and decoded == 0
        over += given and abs(value) > format_.max * (1 + 2.0**-20) * float(scale)
    wanted = [zeroed, nonzero, over, x.numel()]
    assert cast_counts(x, bits, format_, limit).tolist() == wanted
    assert counts_of_cast(x, bits, format_, limit).tolist() == wanted
    turned = x.t().contiguous().t(), bits.t().contiguous().t()
    assert counts_of_cast(*turned, format_, limit).tolist() == wanted
    assert cast_counts_of(x, bits, format_, limit).tolist() == wanted


def test_the_counts_are_those_of_the_loss_of_a_cast() -> None:
    """Also where k is padded, and where rows have scales of their own."""
    x = sample(20, 50)
    for granularity in (Granularity.TENSORWISE, Granularity.ROWWISE):
        made = cast_operand(x, OperandSpec.of(Format.E4M3, granularity, pad=16))
        bits = made.values[:, :50].view(torch.uint8)
        few, many, over, count = cast_counts(x, bits, Format.E4M3, None).tolist()
        assert (over, count) == (0, 1000)
        assert few > 0
        assert few / many == pytest.approx(float(cast_loss(x, made).underflow), rel=1e-15)


def test_values_that_are_no_numbers_count_as_not_0() -> None:
    x = torch.tensor([[float("nan"), float("inf"), 0.0, 1.0]])
    bits = torch.tensor([[0x7F, 0x7E, 0, 0]], dtype=torch.uint8)
    for count in (cast_counts, counts_of_cast):
        assert count(x, bits, Format.E4M3, None).tolist() == [1, 3, 0, 4]


def test_codes_that_lie_the_other_way_are_turned() -> None:
    x = sample(20, 48)
    bits = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    turned_x, turned_bits = x.t().contiguous().t(), bits.t().contiguous().t()
    wanted = cast_counts(x, bits, Format.E4M3, None).tolist()
    for values, codes in ((x, turned_bits), (turned_x, bits), (x, bits), (turned_x, turned_bits)):
        beside = codes_beside(values, codes)
        assert torch.equal(beside, bits)
        assert any(values.stride(d) == beside.stride(d) == 1 for d in (0, 1))
        assert counts_of_cast(values, beside, Format.E4M3, None).tolist() == wanted
