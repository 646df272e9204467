"""The norm kernels on a GPU: against plain torch on the same GPU, compiled whole, and as operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.kernels.block_norm import block_norm, block_norm_gradients, block_norm_operands, static_scale
from loka.kernels.triton.norms.forward import normalize_blocks
from loka.mods import BlockNorm, BlockNormHardSwish, Chain, HardSwish
from loka.numerics import block_rms_norm, block_rms_norm_gradients, cast_operand
from loka.vocab import BlockNormSpec, Format, Granularity, OperandSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

CASES = [
    (8192, 2048, 256, torch.bfloat16, False),
    (1000, 4096, 4096, torch.bfloat16, False),
    (333, 300, 128, torch.float16, True),
    (77, 1000, 256, torch.float32, True),
    (1, 16384, 16384, torch.bfloat16, False),
    (4096, 1, 256, torch.float32, False),
]
E4M3 = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)


def data(M: int, N: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + M + N)
    rows = torch.exp2(torch.randint(-6, 6, (M, 1), generator=generator).float())
    return (torch.randn(M, N, generator=generator) * rows).to(dtype).cuda()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-300))


@pytest.mark.parametrize(("M", "N", "block", "dtype", "affine"), CASES)
@pytest.mark.parametrize("swish", [False, True])
def test_as_close_to_fp64_as_torch(
    M: int, N: int, block: int, dtype: torch.dtype, affine: bool, swish: bool
) -> None:
    norm, x = BlockNormSpec(block, 1e-6, swish), data(M, N, dtype)
    g = data(M, N, dtype, seed=1) / 64  # over the smallest rows of x, and still within fp16
    weight = data(1, N, torch.float32, seed=2)[0] if affine else None
    wide = None if weight is None else weight.double()
    exact = block_rms_norm(x.double(), norm, wide)
    theirs = block_rms_norm(x, norm, weight).to(dtype)
    assert error(block_norm(x, norm, weight), exact) <= 2 * error(theirs, exact) + 1e-7
    dx, dweight, amax = block_norm_gradients(g, x, norm, weight)
    exact_dx, exact_dweight = block_rms_norm_gradients(g.double(), x.double(), norm, wide)
    theirs_dx = block_rms_norm_gradients(g, x, norm, weight)[0].to(dtype)
    if N > 1:
        assert error(dx, exact_dx) <= 2 * error(theirs_dx, exact_dx) + 1e-6
    assert bool(dx.isfinite().all())
    assert float(amax) == float(dx.float().abs().max())
    if dweight is not None:
        assert exact_dweight is not None
        assert error(dweight, exact_dweight) < 1e-5


def test_the_amax_is_of_what_is_finite() -> None:
    x, g = data(333, 300, torch.float16), 64 * data(333, 300, torch.float16, seed=1)
    dx, _, amax = block_norm_gradients(g, x, BlockNormSpec(128, 1e-6, False))
    assert not bool(dx.isfinite().all()), "nothing overflowed, so nothing was tested"
    assert float(amax) == float(dx[dx.isfinite()].float().abs().max())


@pytest.mark.parametrize(("M", "N", "block", "dtype", "affine"), CASES)
def test_codes_are_those_of_the_cast(M: int, N: int, block: int, dtype: torch.dtype, affine: bool) -> None:
    """But for one in a thousand, where sums in another order moved a number over the middle of two codes."""
    norm, x = BlockNormSpec(block, 1e-6, True), data(M, N, dtype)
    weight = data(1, N, torch.float32, seed=2)[0] if affine else None
    row = OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16)
    specs = (E4M3, E4M3.with_transposed(True), OperandSpec.high_precision(), row, row.with_transposed(True))
    y = block_rms_norm(x, norm, weight)
    for made in block_norm_operands(x, norm, specs, weight):
        if not made.spec.is_quantized:
            assert error(made.values, y.double()) < 2 * torch.finfo(dtype).eps
            continue
        wanted = cast_operand(y, made.spec, scale=static_scale(x, norm, made.spec, weight))
        assert made.values.shape == wanted.values.shape
        # Hard swish near -3 is a small difference of large numbers: its error is of their size.
        atol = 2e-7 * float(wanted.scale.max())
        torch.testing.assert_close(made.scale, wanted.scale, rtol=2e-6, atol=atol)
        off = made.values.view(torch.uint8) != wanted.values.view(torch.uint8)
        assert int(off.sum()) <= 2 + made.values.numel() // 1000


def test_the_operator_is_well_formed() -> None:
    x = data(64, 512, torch.float32).requires_grad_()
    torch.library.opcheck(normalize_blocks, (x, None, 256, 1e-6, True, False))


def test_modules_compile_whole_and_agree() -> None:
    torch.manual_seed(0)
    first = (nn.Linear(512, 1024, bias=False), BlockNormHardSwish(1024), nn.Linear(1024, 300))
    model = nn.Sequential(*first, BlockNorm(300, affine=True), HardSwish(), Chain.of((300, 256, 128))).cuda()
    x = data(256, 512, torch.float32).requires_grad_()

    def step(module: nn.Module) -> tuple[Tensor, Tensor]:
        x.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x)
        y.float().square().mean().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    eager = step(model)
    compiled = step(torch.compile(model, fullgraph=True))  # type: ignore[arg-type]
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2 * float(theirs.abs().max()))


def test_a_cuda_graph_replays_them() -> None:
    norm, x = BlockNormSpec(256, 1e-6, True), data(512, 1024, torch.bfloat16)
    block_norm_operands(x, norm, (E4M3, E4M3.with_transposed(True)))  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = block_norm_operands(x, norm, (E4M3, E4M3.with_transposed(True)))
    x.copy_(data(512, 1024, torch.bfloat16, seed=5))
    graph.replay()
    for ours, again in zip(
        made, block_norm_operands(x, norm, (E4M3, E4M3.with_transposed(True))), strict=True
    ):
        assert torch.equal(ours.values.view(torch.uint8), again.values.view(torch.uint8))
