"""Libraries' products on a GPU: kernels, passes and odd shapes against FP64, captured, compiled, alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from loka.kernels import KERNELS, Kernel, cast, device_of, kernel, usable
from loka.numerics import Quantized, decode, product_of_operands
from loka.vocab import Accumulation, Device, Format, GemmProblem, Pass

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

NAMES = [n for n, k in KERNELS.items() if n.startswith(("torch.", "mslk.", "deep_gemm.")) and k.verified]
BLOCKS = [n for n in NAMES if n.endswith("blockwise_1x128")]
UNVERIFIED = [n for n, k in KERNELS.items() if not k.verified]
# Off every tile, one row, one block of k, a k whose number of blocks is 1, 2 or 3 more than a multiple of 4.
SHAPES = [
    (1, 16, 16), (17, 32, 64), (2, 24, 128), (130, 272, 300), (257, 144, 256), (64, 400, 479),
    (300, 1024, 640), (512, 512, 3456), (33, 128, 131), (1027, 2048, 512),
]  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Device:
    return device_of("cuda")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def runs(chosen: Kernel, problem: GemmProblem, device: Device) -> bool:
    """Whether to go on; a library that is not installed skips the test with its own reason."""
    if not chosen.supports(problem, device):
        return False
    support = usable(chosen, problem, device)
    if not support:
        pytest.skip(support.reason)
    return True


def uneven(rows: int, k: int, seed: int) -> Tensor:
    """Scales differ 2^12-fold between rows and 2^6-fold between stretches of k."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).float())
    steps = torch.randint(-3, 4, (1, -(-k // 64)), generator=generator).float()
    return (x * torch.exp2(steps).repeat_interleave(64, dim=1)[:, :k]).cuda()


def operands(chosen: Kernel, problem: GemmProblem) -> tuple[Quantized, Quantized]:
    spec_a, spec_b = (spec.with_transposed(False) for spec in chosen.operands(problem))
    a = cast(uneven(problem.m, problem.k, 1), (spec_a,))[0]
    return a, cast(uneven(problem.n, problem.k, 2), (spec_b,))[0]


def worst_row(out: Tensor, want: Tensor, a: Quantized, b: Quantized, bias: Tensor | None = None) -> float:
    """Error of a row against the size that its sums of random signs have: rows that cancel show no more."""
    squares = decode(a, dtype=torch.float64).square() @ decode(b, dtype=torch.float64).square().sum(0)
    if bias is not None:
        squares = squares + bias.double().square().sum()
    return float(((out.double() - want).norm(dim=1) / squares.sqrt().clamp(min=1e-300)).max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pass_", list(Pass))
def test_against_fp64(name: str, pass_: Pass, device: Device) -> None:
    """bf16 rounds to 2^-8 of an element at worst; exact sums are off by up to 4e-3 in a short row."""
    chosen = kernel(name)
    limit = 2e-2 if chosen.accumulation is Accumulation.FAST else 8e-3
    checked = 0
    for shape, grad in itertools.product(SHAPES, (Format.E4M3, Format.E5M2)):
        problem = GemmProblem(*shape, pass_, grad)
        if (pass_ is Pass.FWD and grad is Format.E5M2) or not runs(chosen, problem, device):
            continue
        a, b = operands(chosen, problem)
        ref = product_of_operands(a, b, dtype=torch.float64)
        usual = float(ref.abs().mean())
        bias = torch.randn(problem.n, generator=torch.Generator().manual_seed(3)).bfloat16().cuda() * usual
        for dtype in (torch.bfloat16, torch.float32):
            for given in (None, bias, bias.float()) if pass_ is Pass.FWD else (None,):
                out = chosen.matmul(a, b, out_dtype=dtype, bias=given)
                want = ref if given is None else ref + given.double()
                assert out.shape == (problem.m, problem.n)
                assert out.dtype is dtype
                error = worst_row(out, want, a, b, given)
                # A bias that is added after adds a rounding.
                assert error < limit + (0 if given is None else 2**-8), (problem, dtype, given is not None)
        again = chosen.matmul(a, b, out_dtype=torch.float32)
        assert torch.equal(again, chosen.matmul(a, b, out_dtype=torch.float32)), problem
        checked += 1
    assert checked or not any(chosen.supports(GemmProblem(*s, pass_), device) for s in SHAPES)


@pytest.mark.parametrize("name", BLOCKS)
def test_fp32_weight_gradients_have_no_bf16_inside(name: str, device: Device) -> None:
    chosen, problem = kernel(name), GemmProblem(256, 272, 4099, Pass.WGRAD)
    if runs(chosen, problem, device):
        a, b = operands(chosen, problem)
        ref = product_of_operands(a, b, dtype=torch.float64)
        out = chosen.matmul(a, b, out_dtype=torch.float32)
        assert float((out.double() - ref).norm() / ref.norm()) < 1e-3  # bf16 alone leaves 1.7e-3


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name: str, device: Device) -> None:
    chosen, problem = kernel(name), GemmProblem(0, 128, 256, Pass.DGRAD)
    if runs(chosen, problem, device):
        a, b = operands(chosen, problem)
        assert chosen.matmul(a, b, out_dtype=torch.bfloat16).shape == (0, 128)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pass_", list(Pass))
def test_in_a_cuda_graph(name: str, pass_: Pass, device: Device) -> None:
    """Replayed on other values of the same buffers."""
    chosen, problem = kernel(name), GemmProblem(130, 272, 640, pass_)
    if not runs(chosen, problem, device):
        return
    chosen.warm_up(problem, torch.device("cuda"))
    a, b = operands(chosen, problem)
    first = chosen.matmul(a, b, out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chosen.matmul(a, b, out_dtype=torch.bfloat16)
    graph.replay()
    assert torch.equal(out, first)
    a.scale.mul_(2)
    graph.replay()
    assert torch.equal(out, 2 * first)  # exact: powers of two


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("n", [128, 48])
def test_one_graph_whatever_the_scales(name: str, pass_: Pass, n: int, device: Device) -> None:
    chosen, problem = kernel(name), GemmProblem(64, n, 300, pass_)
    if not runs(chosen, problem, device):
        return
    chosen.warm_up(problem, torch.device("cuda"))
    counter = CompileCounterWithBackend("inductor")

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        spec_a, spec_b = (spec.with_transposed(False) for spec in chosen.operands(problem))
        qa, qb = Quantized(a, scale_a, spec_a), Quantized(b, scale_b, spec_b)
        return chosen.matmul(qa, qb, out_dtype=torch.bfloat16)

    compiled = torch.compile(product, fullgraph=True, backend=counter)
    a, b = operands(chosen, problem)
    for factor in (1.0, 2.0**-20, 2.0**15):
        tensors = (a.values, b.values, a.scale * factor, b.scale)
        assert torch.equal(compiled(*tensors), product(*tensors))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", NAMES)
def test_cast_and_product_compile_together(name: str, device: Device) -> None:
    chosen, problem = kernel(name), GemmProblem(64, 128, 256, Pass.DGRAD)
    if not runs(chosen, problem, device):
        return
    chosen.warm_up(problem, torch.device("cuda"))
    counter = CompileCounterWithBackend("inductor")

    def product(x: Tensor, w: Tensor) -> Tensor:
        spec_a, spec_b = (spec.with_transposed(False) for spec in chosen.operands(problem))
        return chosen.matmul(cast(x, (spec_a,))[0], cast(w, (spec_b,))[0], out_dtype=torch.bfloat16)

    compiled = torch.compile(product, fullgraph=True, backend=counter)
    for seed in (1, 3, 5):
        x, w = uneven(64, 256, seed), uneven(128, 256, seed + 1)
        assert torch.equal(compiled(x, w), product(x, w))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pass_", list(Pass))
def test_reproductions_give_the_same_bits(name: str, pass_: Pass, device: Device) -> None:
    chosen = kernel(name)
    for shape in ((130, 272, 300), (512, 512, 3456)):
        problem = GemmProblem(*shape, pass_)
        if runs(chosen, problem, device):
            found: dict[str, object] = {}
            exec(chosen.repro(), found)
            a, b = operands(chosen, problem)
            theirs = found["product"](a.values, b.values, a.scale, b.scale, torch.bfloat16)  # type: ignore[operator]
            assert torch.equal(theirs, chosen.matmul(a, b, out_dtype=torch.bfloat16)), shape


def test_groups_of_rows(device: Device) -> None:
    chosen, sizes = kernel("mslk.rowwise.grouped.fast"), [64, 0, 130, 17, 1]
    problem = GemmProblem(sum(sizes), 528, 640)
    if not runs(chosen, problem, device):
        pytest.skip(chosen.supports(problem, device).reason)
    spec_a, spec_b = chosen.operands(problem)
    a = cast(uneven(sum(sizes), 640, 1), (spec_a,))[0]
    each = [cast(uneven(528, 640, 10 + g), (spec_b,))[0] for g in range(len(sizes))]
    b = Quantized(torch.stack([q.values for q in each]), torch.stack([q.scale for q in each]), spec_b)
    out = chosen.matmul_groups(a, b, torch.tensor(sizes).cuda())  # type: ignore[attr-defined]
    start = 0
    for size, weight in zip(sizes, each, strict=True):
        rows = Quantized(a.values[start : start + size], a.scale[start : start + size], spec_a)
        if size:
            want = product_of_operands(rows, weight, dtype=torch.float64)
            assert worst_row(out[start : start + size], want, rows, weight) < 2e-2
        start += size


def test_what_cannot_run_here_says_why(device: Device) -> None:
    if device.arch != (9, 0):
        pytest.skip(f"needs SM 9.0, found {device.sm}")
    reasons = {name: kernel(name).supports(GemmProblem(64, 64, 64), device).reason for name in UNVERIFIED}
    assert reasons["torch.mx_1x32"] == "needs SM 10.0, found 9.0"
    assert reasons["transformer_engine.mx_1x32"] == "needs SM 10.0, found 9.0"
    assert reasons["torch.rowwise.fnuz"].startswith("needs an AMD GPU of the MI300 series (gfx942), found")
    assert all(reasons.values())
