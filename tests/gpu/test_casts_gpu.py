"""LoKA's Triton casts on a GPU: equal to the oracle of `loka.numerics`, bit by bit.

The oracle runs on the GPU too, for speed; tests/gpu/test_kernels_gpu.py holds it to the oracle on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels import cast
from loka.kernels.gpu_casts import KNOWN_GRANULARITIES
from loka.numerics import Quantized, cast_operand
from loka.vocab import Format, Granularity, OperandSpec, ScaleLayout, ScaleRounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

# Each shape with one source dtype, format and rounding: they meet all the ways through the kernels, and each
# combination costs compilations.
CASES = [
    ((1, 1), torch.bfloat16, Format.E4M3, ScaleRounding.FP32),
    ((1, 4096), torch.float32, Format.E5M2, ScaleRounding.FP32),
    ((4096, 1), torch.float32, Format.E4M3, ScaleRounding.FP32),
    ((17, 33), torch.float32, Format.E4M3, ScaleRounding.FP32),
    ((300, 523), torch.float16, Format.E4M3, ScaleRounding.POWER_OF_TWO),
    ((129, 3456), torch.bfloat16, Format.E5M2, ScaleRounding.POWER_OF_TWO),
    ((1000, 20000), torch.bfloat16, Format.E4M3, ScaleRounding.FP32),
    ((2048, 1024), torch.float32, Format.E4M3, ScaleRounding.FP32),
    ((2048, 1024), torch.bfloat16, Format.E4M3, ScaleRounding.FP32),
]
LAYOUTS = (ScaleLayout.K_MAJOR, ScaleLayout.MN_MAJOR, ScaleLayout.MN_MAJOR_PAD4)


def data(R: int, C: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(R * 1000 + C)
    x = torch.randn(R, C, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (R, 1), generator=generator).float())
    if R > 16:
        x[3], x[5, C // 2], x[7, 0], x[9, -1] = 0.0, torch.nan, torch.inf, -torch.inf
    return x.to(dtype).cuda()


def check(made: Quantized, x: Tensor, spec: OperandSpec, *, scale: Tensor | None = None) -> None:
    want = cast_operand(x, spec, scale=scale)
    assert torch.equal(made.scale, want.scale)
    if want.scale.numel() > 1 and want.scale.dim() == 2 and min(want.scale.shape) > 1:
        assert made.scale.stride() == want.scale.stride()
    assert made.values.is_contiguous()
    ours, wanted = made.values, want.values
    assert ours.shape == wanted.shape
    number = ~wanted.float().isnan()
    assert torch.equal(ours.float().isnan(), ~number)
    assert torch.equal(ours.view(torch.uint8)[number], wanted.view(torch.uint8)[number])


@pytest.mark.parametrize("granularity", KNOWN_GRANULARITIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_and_scales(
    granularity: Granularity, case: tuple[tuple[int, int], torch.dtype, Format, ScaleRounding]
) -> None:
    shape, dtype, format_, rounding = case
    x = data(*shape, dtype)
    layout = OperandSpec.of(format_, granularity).scale_layout
    spec = OperandSpec(format_, granularity, False, rounding, layout, 16)
    twin = spec.with_transposed(True)
    for specs in ((spec,), (twin,), (spec, twin)):
        for made in cast(x, specs):
            check(made, x, made.spec)


@pytest.mark.parametrize("granularity", [Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scale_layouts(granularity: Granularity, layout: ScaleLayout) -> None:
    for shape in ((130, 700), (300, 256), (512, 3456)):
        x = data(*shape, torch.bfloat16)
        spec = OperandSpec(Format.E4M3, granularity, scale_layout=layout, pad=16)
        for made in cast(x, (spec, spec.with_transposed(True))):
            check(made, x, made.spec)


@pytest.mark.parametrize("granularity", KNOWN_GRANULARITIES)
def test_strides(granularity: Granularity) -> None:
    wide = data(400, 900, torch.bfloat16)
    for pick in (lambda t: t[:, 7:707], lambda t: t.t(), lambda t: t[:, 3:4], lambda t: t[::2, ::3]):
        spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
        for made in cast(pick(wide), (spec, spec.with_transposed(True))):
            check(made, pick(wide), made.spec)


@pytest.mark.parametrize("shape", [(1, 32), (300, 4096), (4097, 100)])
@pytest.mark.parametrize("format_", [Format.E4M3, Format.E5M2])
def test_blocks_of_mx(shape: tuple[int, int], format_: Format) -> None:
    spec = OperandSpec(format_, Granularity.MX_1X32, False, ScaleRounding.POWER_OF_TWO, pad=32)
    for dtype in (torch.float32, torch.bfloat16):
        for made in cast(data(*shape, dtype), (spec, spec.with_transposed(True))):
            check(made, data(*shape, dtype), made.spec)


def test_static_scale_zeros_and_empty() -> None:
    x = data(300, 523, torch.bfloat16)
    scale = torch.tensor(0.125, device="cuda")
    spec = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)
    for made in cast(x, (spec, spec.with_transposed(True)), scale=scale):
        check(made, x, made.spec, scale=scale)
    for granularity in KNOWN_GRANULARITIES:
        spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
        for shape in ((40, 50), (0, 50), (40, 0)):
            zero = torch.zeros(shape, device="cuda")
            for made in cast(zero, (spec, spec.with_transposed(True))):
                check(made, zero, made.spec)


@pytest.mark.parametrize("granularity", KNOWN_GRANULARITIES)
def test_compiled_whole_and_repeatable(granularity: Granularity) -> None:
    """One graph without a break; the same bits as eager; the same bits again."""
    spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
    specs = (spec, spec.with_transposed(True))

    def flat(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for made in cast(x, specs) for t in made[:2])

    compiled = torch.compile(flat, fullgraph=True)
    for seed in (0, 1):
        x = data(300, 512 + seed, torch.bfloat16)
        eager, again = flat(x), flat(x)
        for ours, theirs, third in zip(compiled(x), eager, again, strict=True):
            for other in (theirs, third):
                assert ours.shape == other.shape
                pair = [t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, other)]
                assert torch.equal(*pair)


def test_more_than_two_to_the_31_elements() -> None:
    """Offsets are 64-bit: the last rows of a tensor of 4.3e9 elements are cast like the same rows alone."""
    R, C = 1 << 21, 2064
    x = torch.empty(R, C, device="cuda", dtype=torch.bfloat16)
    x.fill_(1.0)
    tail = data(256, C, torch.bfloat16)
    x[-256:] = tail
    for granularity in (Granularity.ROWWISE, Granularity.BLOCKWISE_1X128):
        spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
        made = cast(x, (spec,))[0]
        want = cast_operand(tail, spec)
        number = ~want.values.float().isnan()
        ours = made.values[-256:]
        assert torch.equal(ours.view(torch.uint8)[number], want.values.view(torch.uint8)[number])
        assert torch.equal(made.scale[-256:], want.scale)


@pytest.mark.parametrize("format_", [Format.E4M3, Format.E5M2])
def test_every_mantissa_of_an_amax(format_: Format) -> None:
    """The scale is made without a division: all 2^23 mantissas, over many exponents, against the oracle."""
    bits = torch.arange(1 << 23, device="cuda", dtype=torch.int32)
    exponents = torch.randint(30, 224, (1 << 23,), generator=torch.Generator().manual_seed(0)).int().cuda()
    amax = (bits | (exponents << 23)).view(torch.float32)
    x = amax[:, None] * torch.rand(
        1 << 23, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    x[:, 3] = -amax
    spec = OperandSpec.of(format_, Granularity.ROWWISE)
    check(cast(x, (spec,))[0], x, spec)


def test_every_mantissa_of_a_reciprocal() -> None:
    """Blocks take 1 / s by Newton steps: amax of 2^23 blocks with every mantissa, against the oracle.

    Codes of numbers that lie on the midpoints of E4M3 tell a reciprocal that is one unit off.
    """
    k = torch.arange(1 << 16, device="cuda", dtype=torch.int32)
    generator = torch.Generator("cuda").manual_seed(2)
    for high in range(128):
        bits = (k << 7) | high | (120 << 23)
        amax = bits.view(torch.float32)
        odd = 1 + 2 * torch.randint(8, 14, (1 << 16, 128), device="cuda", generator=generator)
        x = amax[:, None] * odd / 28  # 448 is 28 steps of 16
        x[:, 0] = amax
        spec = OperandSpec.of(Format.E4M3, Granularity.BLOCKWISE_1X128, pad=16)
        for made in cast(x, (spec, spec.with_transposed(True))):
            check(made, x, made.spec)
