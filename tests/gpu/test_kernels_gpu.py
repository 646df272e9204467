"""The oracle's casts on a GPU, and every kernel once: `usable` never says yes to what raises."""

from __future__ import annotations

import itertools

import pytest
import torch

from loka.kernels import KERNELS, cast, device_of, kernel, usable
from loka.numerics import cast_operand, format_of, product_of_operands
from loka.vocab import Device, Format, GemmProblem, Granularity, OperandSpec, Pass, ScaleRounding

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

# Libraries' and LoKA's own products have files of their own with many shapes; here every kernel runs once
# at one shape off the tiles. Triton's are left to theirs: each would compile anew.
SHAPE = (300, 144, 479)
REAL = [k.name for k in KERNELS.values() if not k.emulated and not k.name.startswith("triton.")]


@pytest.fixture(scope="module")
def device() -> Device:
    return device_of("cuda")


def rows(m: int, k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(m, k, generator=generator, device="cuda")


@pytest.mark.parametrize("format_", [Format.E4M3, Format.E5M2])
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("transposed", [False, True])
def test_casts_are_bit_equal_to_those_of_a_cpu(
    format_: Format, granularity: Granularity, transposed: bool
) -> None:
    x = torch.randn(300, 523, generator=torch.Generator().manual_seed(0))
    x *= torch.exp2(torch.randint(-20, 20, (300, 1), generator=torch.Generator().manual_seed(1)).float())
    x[3, 5], x[9] = float("nan"), 0.0
    roundings = [ScaleRounding.POWER_OF_TWO]
    if granularity is not Granularity.MX_1X32:
        roundings.append(ScaleRounding.FP32)
    for rounding, dtype in itertools.product(roundings, (torch.float32, torch.bfloat16)):
        spec = OperandSpec(format_, granularity, transposed, rounding, pad=16)
        ours, theirs = cast_operand(x.to(dtype), spec), cast_operand(x.to(dtype).cuda(), spec)
        assert torch.equal(ours.scale, theirs.scale.cpu())
        same = ours.values.view(torch.uint8) == theirs.values.cpu().view(torch.uint8)
        nan = ours.values.float().isnan() & theirs.values.cpu().float().isnan()
        assert bool((same | nan).all())


def test_compiled_casts_are_bit_equal_to_eager_ones() -> None:
    x = rows(300, 512, 0)
    specs = [
        OperandSpec.of(Format.E4M3, granularity)
        for granularity in (Granularity.TENSORWISE, Granularity.ROWWISE, Granularity.BLOCKWISE_1X128)
    ]
    compiled = torch.compile(lambda t: [cast_operand(t, spec)[:2] for spec in specs], fullgraph=True)
    for (values, scale), spec in zip(compiled(x), specs, strict=True):
        want = cast_operand(x, spec)
        assert torch.equal(scale, want.scale)
        assert torch.equal(values.view(torch.uint8), want.values.view(torch.uint8))


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("pass_", list(Pass))
def test_products_against_fp64_of_the_same_operands(name: str, pass_: Pass, device: Device) -> None:
    m, n, k = SHAPE
    chosen = kernel(name)
    grads = [Format.E4M3] if pass_ is Pass.FWD else [Format.E4M3, Format.E5M2]
    for grad, out_dtype in itertools.product(grads, (torch.bfloat16, torch.float32)):
        problem = GemmProblem(m, n, k, pass_, grad, Format.E4M3, format_of(out_dtype))
        if not usable(chosen, problem, device):
            continue
        spec_a, spec_b = chosen.operands(problem)
        a = cast(rows(m, k, 1), (spec_a.with_transposed(False),))[0]
        b = cast(rows(n, k, 2), (spec_b.with_transposed(False),))[0]
        if not spec_a.is_quantized:
            a, b = (q._replace(values=q.values.bfloat16()) for q in (a, b))
        ref = product_of_operands(a, b, dtype=torch.float64)
        for bias in (None, torch.randn(n, device="cuda")) if pass_ is Pass.FWD else (None,):
            out = chosen.matmul(a, b, out_dtype=out_dtype, bias=bias)
            want = ref if bias is None else ref + bias.double()
            assert out.shape == (m, n)
            assert out.dtype == out_dtype
            worst = ((out.double() - want).norm(dim=1) / want.norm(dim=1)).max()
            # bf16 rounds to 2^-9; fast accumulation adds up to about 1e-3 at this k on data of both signs.
            assert worst < 8e-3


def test_fast_accumulation_is_biased_on_data_of_one_sign(device: Device) -> None:
    """Published for this hardware: 9 % at k = 16,384 for fast sums of positive data, 6e-4 for exact ones."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.rand(256, 16384, generator=generator, device="cuda")
    problem = GemmProblem(256, 256, 16384)
    error = {}
    for name in ("torch.tensorwise", "torch.tensorwise.fast"):
        if not usable(kernel(name), problem, device):
            pytest.skip("no tensorwise kernel here")
        a = cast(x, (kernel(name).operands(problem)[0],))[0]
        ref = product_of_operands(a, a, dtype=torch.float64)
        out = kernel(name).matmul(a, a, out_dtype=torch.float32)
        error[name] = float((out.double() - ref).norm() / ref.norm())
    assert error["torch.tensorwise"] < 2e-3
    assert error["torch.tensorwise.fast"] > 10 * error["torch.tensorwise"]
