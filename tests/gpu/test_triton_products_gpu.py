"""LoKA's Triton products on a GPU: errors against FP64, determinism, odd shapes, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels import cast, device_of, vet
from loka.kernels.backends.triton_products import KERNELS, TritonBF16, TritonFP8
from loka.numerics import Quantized, decode, product_of_operands
from loka.vocab import Format, GemmProblem, Granularity, Pass

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

FP8 = [k for k in KERNELS if isinstance(k, TritonFP8)]
# One of every class of tiles, off-tile, unaligned and small.
SHAPES = [
    (1, 1, 1),
    (17, 13, 130),
    (64, 300, 479),
    (300, 1, 64),
    (512, 512, 3456),
    (1000, 250, 24),
    (2048, 4096, 1024),
    (20000, 400, 128),
    (130, 250, 50_000),
]


def rows(m: int, k: int, seed: int) -> Tensor:
    """Normal numbers whose size differs from row to row and block to block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x *= torch.exp2(torch.randint(-4, 5, (m, 1), generator=generator).float())
    blocks = torch.exp2(torch.randint(-3, 4, (1, -(-k // 32)), generator=generator).float())
    return (x * blocks.repeat_interleave(32, dim=1)[:, :k]).cuda()


def operands(kernel: TritonFP8 | TritonBF16, problem: GemmProblem) -> tuple[Quantized, Quantized]:
    specs = [spec.with_transposed(False) for spec in kernel.operands(problem)]
    a = cast(rows(problem.m, problem.k, 1), (specs[0],))[0]
    b = cast(rows(problem.n, problem.k, 2), (specs[1],))[0]
    if not specs[0].is_quantized:
        a, b = (q._replace(values=q.values.bfloat16()) for q in (a, b))
    return a, b


def worst_row(out: Tensor, ref: Tensor, a: Quantized | None = None, b: Quantized | None = None) -> float:
    """Against the size that |a_i| |b_j| gives a row: one result alone may be a difference near 0."""
    if a is None or b is None:
        return float(((out.double() - ref).norm(dim=1) / ref.norm(dim=1).clamp(min=1e-30)).max())
    size = decode(a, dtype=torch.float64).norm(dim=1) * decode(b, dtype=torch.float64).norm(dim=1).norm()
    usual = torch.maximum(ref.norm(dim=1), size / a.values.shape[1] ** 0.5)
    return float(((out.double() - ref).norm(dim=1) / usual.clamp(min=1e-30)).max())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_against_fp64(kernel: TritonFP8 | TritonBF16, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for pass_, a_format in ((Pass.FWD, Format.E4M3), (Pass.DGRAD, Format.E5M2), (Pass.WGRAD, Format.E4M3)):
        problem = GemmProblem(m, n, k, pass_, a_format)
        a, b = operands(kernel, problem)
        ref = product_of_operands(a, b, dtype=torch.float64)
        # Exact sums leave fp32's rounding and that of 128 products in the FP8 unit's 14 bits; fast ones grow
        # with k, 4e-3 at 65,536 on data of both signs. bf16 rounds to 2^-9 of an element.
        exact = 3e-4 if kernel.name == "triton.bf16" else 2e-3
        limit = 2e-2 if kernel.name.endswith(".fast") else exact
        for out_dtype in (torch.float32, torch.bfloat16):
            first = kernel.matmul(a, b, out_dtype=out_dtype)
            assert first.dtype == out_dtype
            rounding = 0.0 if out_dtype is torch.float32 else 2.0**-8
            assert worst_row(first, ref, a, b) < limit + rounding, (problem, out_dtype)
            assert torch.equal(first, kernel.matmul(a, b, out_dtype=out_dtype)), "two runs differ"
        bias = rows(1, n, 3)[0]
        out = kernel.matmul(a, b, out_dtype=torch.float32, bias=bias)
        assert worst_row(out, ref + bias.double(), a, b) < limit


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_vetting_passes(kernel: TritonFP8 | TritonBF16) -> None:
    for m, n, k in SHAPES:
        for pass_ in Pass:
            problem = GemmProblem(m, n, k, pass_)
            assert kernel.supports(problem, device_of("cuda"))
            verdict = vet(kernel, problem, "cuda")
            assert verdict, (kernel.name, problem, verdict.reason)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_warm_up_runs(kernel: TritonFP8 | TritonBF16) -> None:
    for pass_ in Pass:
        kernel.warm_up(GemmProblem(100, 50, 30, pass_, bias=pass_ is Pass.FWD), torch.device("cuda"))


def test_exact_sums_of_positive_data_are_not_biased() -> None:
    x = torch.rand(256, 16384, generator=torch.Generator().manual_seed(0)).cuda()
    problem = GemmProblem(256, 256, 16384)
    for kernel in FP8:
        spec_a, spec_b = kernel.operands(problem)
        a, b = cast(x, (spec_a,))[0], cast(x, (spec_b,))[0]
        ref = product_of_operands(a, b, dtype=torch.float64)
        out = kernel.matmul(a, b, out_dtype=torch.float32)
        error = float((out.double() - ref).norm() / ref.norm())
        if kernel.name.endswith(".fast"):
            assert error > 1e-3  # it is the fast one
        else:
            assert error < 2e-3


@pytest.mark.parametrize("kernel", FP8, ids=lambda k: k.name)
def test_one_graph_for_changing_scales(kernel: TritonFP8) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    problem = GemmProblem(300, 130, 260)
    a, b = operands(kernel, problem)
    counter = CompileCounterWithBackend("inductor")

    def product(av: Tensor, asc: Tensor, bv: Tensor, bsc: Tensor, bias: Tensor) -> Tensor:
        out = kernel.matmul(
            Quantized(av, asc, a.spec), Quantized(bv, bsc, b.spec), out_dtype=torch.bfloat16, bias=bias
        )
        return out.relu()

    compiled = torch.compile(product, fullgraph=True, backend=counter)
    bias = torch.randn(130, device="cuda")
    for factor in (1.0, 0.25, 3.0):
        arguments = (a.values, a.scale * factor, b.values, b.scale, bias)
        assert torch.equal(compiled(*arguments), product(*arguments))
    assert counter.frame_count == 1


@pytest.mark.parametrize("pass_", list(Pass))
def test_bf16_views_in_a_compiled_function(pass_: Pass) -> None:
    kernel = KERNELS[-1]
    x, w, g = (t.bfloat16() for t in (rows(4000, 120, 1), rows(40, 120, 2), rows(4000, 40, 3)))
    a, b = {Pass.FWD: (x, w), Pass.DGRAD: (g, w.t()), Pass.WGRAD: (g.t(), x.t())}[pass_]
    spec_a, spec_b = kernel.operands(GemmProblem(a.shape[0], b.shape[0], a.shape[1], pass_))
    one = torch.ones((), device="cuda")

    def product(p: Tensor, q: Tensor) -> Tensor:
        return kernel.matmul(Quantized(p, one, spec_a), Quantized(q, one, spec_b), out_dtype=torch.float32)

    want = a.double() @ b.double().t()
    assert worst_row(product(a, b), want) < 3e-4
    assert torch.equal(torch.compile(product, fullgraph=True)(a, b), product(a, b))


@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("fast", [False, True])
def test_block_norm_and_hard_swish_in_the_epilogue(block: int, fast: bool) -> None:
    from loka.kernels.triton.products.blocks import ACTIVATIONS
    from loka.kernels.triton.products.scaled import scaled_product

    a, b = operands(FP8[2], GemmProblem(1000, 1024, 512))
    y = product_of_operands(a, b, dtype=torch.float64).view(1000, -1, block)
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(1000, 1024)
    y = y * (y + 3).clamp(0, 6) / 6
    out = scaled_product(
        a.values,
        b.values,
        a.scale,
        b.scale,
        None,
        torch.float32,
        fast,
        ACTIVATIONS["hard_swish"],
        block,
        1e-5,
    )
    assert float((out.double() - y).norm() / y.norm()) < (1e-2 if fast else 2e-3)


FEATURES = [
    (8192, 128, 128, (24, 32, 64)),
    (600, 192, 256, (32, 64, 128)),
    (33, 13, 17, (3, 1)),
    (65, 400, 64, (8, 16, 400)),
    (9, 700, 40, (24,)),
    (40, 26, 16, (5, 6, 7, 8, 9)),
]


@pytest.mark.parametrize(
    ("case", "x_dtype", "compiled"),
    [
        *((case, dtype, False) for case in FEATURES for dtype in (torch.bfloat16, torch.float32)),
        (FEATURES[0], torch.bfloat16, True),
        (FEATURES[1], torch.float32, True),
        (FEATURES[2], torch.float32, True),
    ],
)
def test_feature_products(
    case: tuple[int, int, int, tuple[int, ...]], x_dtype: torch.dtype, compiled: bool
) -> None:
    from loka.kernels.triton.products.features import feature_products

    B, n, d, counts = case
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, n, d, generator=generator).to("cuda", x_dtype).requires_grad_()
    weights = [torch.randn(c, n, generator=generator).cuda().requires_grad_() for c in counts]

    def run(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return feature_products(x, weights, compute_dtype=torch.bfloat16)

    outs = torch.compile(run, fullgraph=True)(x, weights) if compiled else run(x, weights)
    upstream = [torch.randn(o.shape, generator=generator).to("cuda", torch.bfloat16) for o in outs]
    grads = torch.autograd.grad(outs, [x, *weights], upstream)

    x64 = x.detach().bfloat16().double()
    w64 = [w.detach().bfloat16().double() for w in weights]
    for out, w in zip(outs, w64, strict=True):
        assert float((out.detach().double() - w @ x64).norm() / (w @ x64).norm()) < 2.0**-8
    dx = sum(w.t() @ g.double() for w, g in zip(w64, upstream, strict=True))
    assert isinstance(dx, Tensor)
    assert grads[0].dtype == x_dtype
    assert float((grads[0].double() - dx).norm() / dx.norm()) < (
        1e-4 if x_dtype is torch.float32 else 2.0**-7
    )
    for grad, g in zip(grads[1:], upstream, strict=True):
        want = torch.einsum("bid,bjd->ij", g.double(), x64)
        assert grad.dtype == torch.float32
        assert float((grad.double() - want).norm() / want.norm()) < 1e-4
    again = torch.autograd.grad(run(x, weights), [x, *weights], upstream)
    if not compiled:
        assert all(torch.equal(p, q) for p, q in zip(grads, again, strict=True))


def test_feature_products_read_x_where_it_lies() -> None:
    from loka.kernels.triton.products.features import feature_products

    x, w = torch.randn(50, 64, 40, device="cuda"), torch.randn(24, 40, device="cuda")
    (out,) = feature_products(x.transpose(1, 2), [w], compute_dtype=torch.bfloat16)
    want = w.bfloat16().double() @ x.bfloat16().double().transpose(1, 2)
    assert float((out.double() - want).norm() / want.norm()) < 2.0**-8


def test_granularities_meet_as_the_recipes_say() -> None:
    a, b = FP8[4].operands(GemmProblem(64, 64, 64, Pass.WGRAD))
    assert a.granularity is b.granularity is Granularity.BLOCKWISE_1X128
