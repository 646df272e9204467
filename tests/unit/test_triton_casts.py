"""LoKA's Triton casts against the oracle, through Triton's interpreter on the CPU.

Scales and codes must be equal to the bit, as on a GPU (tests/gpu/test_casts_gpu.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from loka.kernels import gpu_casts
from loka.kernels.gpu_casts import cast_pair
from loka.numerics import Quantized, cast_operand
from loka.vocab import Format, Granularity, OperandSpec, ScaleLayout, ScaleRounding

G = Granularity
GRANULARITIES = gpu_casts.KNOWN_GRANULARITIES
# The last lies in runs of 1,024, and in whole tiles.
SHAPES = [(1, 2), (1, 130), (130, 1), (17, 33), (129, 257), (300, 128), (128, 256)]
LAYOUTS = (ScaleLayout.K_MAJOR, ScaleLayout.MN_MAJOR, ScaleLayout.MN_MAJOR_PAD4)


def data(R: int, C: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers whose size varies over rows and columns, with what is not finite and with zeros."""
    generator = torch.Generator().manual_seed(R * 1000 + C)
    x = torch.randn(R, C, generator=generator)
    x *= torch.exp2(torch.randint(-8, 8, (R, 1), generator=generator).float())
    x *= torch.exp2(torch.randint(-3, 4, (1, C), generator=generator).float())
    if R > 16:
        x[3], x[5, C // 2], x[7, 0], x[9, -1] = 0.0, torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def check(made: Quantized, x: Tensor, spec: OperandSpec, *, scale: Tensor | None = None) -> None:
    want = cast_operand(x, spec, scale=scale)
    assert made.spec == spec
    assert made.scale.shape == want.scale.shape
    assert torch.equal(made.scale, want.scale)
    assert made.values.shape == want.values.shape
    assert made.values.is_contiguous()
    ours, theirs = made.values.float(), want.values.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    number = ~ours.isnan()  # NaN has two codes in E4M3 and six in E5M2
    codes, wanted = made.values.view(torch.uint8), want.values.view(torch.uint8)
    assert torch.equal(codes[number], wanted[number])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_orientations(granularity: Granularity, shape: tuple[int, int]) -> None:
    x = data(*shape)
    spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
    first, second = cast_pair(x, spec, spec.with_transposed(True))
    assert second is not None
    check(first, x, spec)
    check(second, x, spec.with_transposed(True))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transposed", [False, True])
def test_one_orientation_formats_dtypes_and_roundings(granularity: Granularity, transposed: bool) -> None:
    for dtype, format_, rounding in itertools.product(
        (torch.float32, torch.float16, torch.bfloat16), (Format.E4M3, Format.E5M2), ScaleRounding
    ):
        x = data(40, 150, dtype)
        spec = OperandSpec(format_, granularity, transposed, rounding, pad=1)
        check(cast_pair(x, spec, None)[0], x, spec)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_strides(granularity: Granularity) -> None:
    """Row gaps, a transposed view, a single row or column, and a stride in both directions."""
    wide = data(40, 300)
    for x in (wide[:, 7:207], wide.t(), wide[:, 3:4], wide[2:3], wide[::2, ::3], wide[:, :1].t()):
        for transposed in (False, True):
            spec = OperandSpec.of(Format.E4M3, granularity, transposed=transposed, pad=16)
            made, twin = cast_pair(x, spec, spec.with_transposed(not transposed))
            assert twin is not None
            check(made, x, spec)
            check(twin, x, twin.spec)


@pytest.mark.parametrize("granularity", [G.BLOCKWISE_1X128, G.BLOCKWISE_128X128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(130, 700), (300, 256), (5, 128)])
def test_scale_layouts(granularity: Granularity, layout: ScaleLayout, shape: tuple[int, int]) -> None:
    x = data(*shape)
    for transposed in (False, True):
        spec = OperandSpec(Format.E4M3, granularity, transposed, scale_layout=layout, pad=16)
        made = cast_pair(x, spec, None)[0]
        check(made, x, spec)
        want = cast_operand(x, spec).scale
        if want.numel() > 1 and min(want.shape) > 1:
            assert made.scale.stride() == want.stride()


@pytest.mark.parametrize("pads", [(16, 128), (1, 16), (128, 1)])
def test_orientations_padded_differently(pads: tuple[int, int]) -> None:
    x = data(70, 90)
    for granularity in GRANULARITIES:
        straight = OperandSpec.of(Format.E4M3, granularity, pad=pads[0])
        turned = OperandSpec.of(Format.E4M3, granularity, transposed=True, pad=pads[1])
        for spec, twin in ((straight, turned), (turned, straight)):
            made, other = cast_pair(x, spec, twin)
            assert other is not None
            check(made, x, spec)
            check(other, x, twin)


@pytest.mark.parametrize("shape", [(1, 32), (64, 160), (33, 96), (40, 50)])
@pytest.mark.parametrize("format_", [Format.E4M3, Format.E5M2])
def test_blocks_of_mx(shape: tuple[int, int], format_: Format) -> None:
    """Either orientation, of what lies either way, padded to whole blocks or whole already."""
    for x, transposed in itertools.product((data(*shape), data(*reversed(shape)).t()), (False, True)):
        spec = OperandSpec(format_, G.MX_1X32, transposed, ScaleRounding.POWER_OF_TWO, pad=32)
        assert gpu_casts.can_cast(x, spec, None)
        made, twin = cast_pair(x, spec, spec.with_transposed(not transposed))
        assert twin is not None
        check(made, x, spec)
        check(twin, x, twin.spec)


def test_a_cut_block_of_mx_is_left_to_plain_torch() -> None:
    spec = OperandSpec(Format.E4M3, G.MX_1X32, scale_rounding=ScaleRounding.POWER_OF_TWO, pad=16)
    assert not gpu_casts.can_cast(torch.ones(8, 40), spec, None)
    assert gpu_casts.can_cast(torch.ones(8, 50), spec, None)
    assert not gpu_casts.can_cast(torch.ones(8, 64), spec, torch.ones(()))


def test_a_static_scale_takes_no_amax() -> None:
    x = data(70, 90)
    scale = torch.tensor(0.125)
    for format_ in (Format.E4M3, Format.E5M2):
        spec = OperandSpec.of(format_, G.TENSORWISE, pad=16)
        made, twin = cast_pair(x, spec, spec.with_transposed(True), scale=scale)
        assert twin is not None
        check(made, x, spec, scale=scale)
        check(twin, x, twin.spec, scale=scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_all_zero_and_extreme_values(granularity: Granularity) -> None:
    zero = torch.zeros(20, 140)
    tiny, huge = torch.full((20, 140), 1e-42), torch.full((20, 140), 3e38)
    for x in (zero, tiny, huge):
        spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
        made, twin = cast_pair(x, spec, spec.with_transposed(True))
        assert twin is not None
        check(made, x, spec)
        check(twin, x, twin.spec)


def test_rows_longer_than_a_tile() -> None:
    x = data(1, 16500)
    spec = OperandSpec.of(Format.E4M3, G.ROWWISE, pad=16)
    check(cast_pair(x, spec, None)[0], x, spec)
    check(cast_pair(x.t(), spec, None)[0], x.t(), spec)


def test_a_weight_with_one_scale_repeated_over_its_rows() -> None:
    x = data(20, 40)
    spec = OperandSpec(Format.E4M3, G.TENSORWISE, True, scale_layout=ScaleLayout.VECTOR)
    check(cast_pair(x, spec, None)[0], x, spec)
