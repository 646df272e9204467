"""Backends of GPUs on a CPU: against doubles that read memory as the libraries do, and traced as fakes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_doubles import (
    install_block_scaled_mm,
    install_deep_gemm,
    install_mslk,
    install_transformer_engine,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from loka.errors import UsageError
from loka.kernels import Kernel, cast, device_of, kernel, kernel_names
from loka.kernels.operands import blank_operands
from loka.numerics import Quantized, product_of_operands
from loka.vocab import Accumulation, Device, GemmProblem, Pass

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

SHAPES = [
    (1, 16, 16),
    (17, 48, 200),
    (5, 144, 128),
    (130, 272, 300),
    (64, 128, 512),
    (33, 16, 3456),
    (128, 256, 300),
]
BF16_STEP, FP32_STEP = 2.0**-8, 2.0**-23
BLOCKS = ("torch.blockwise_1x128", "mslk.blockwise_1x128", "deep_gemm.blockwise_1x128")
DOUBLED = (*BLOCKS, "mslk.rowwise", "mslk.rowwise.fast", "mslk.rowwise.grouped.fast")
H200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))
B200 = Device("cuda", "NVIDIA B200", (10, 0), (2, 11))


@pytest.fixture(autouse=True)
def _doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_block_scaled_mm(monkeypatch)
    install_mslk(monkeypatch)
    install_deep_gemm(monkeypatch)
    install_transformer_engine(monkeypatch)
    yield
    torch._dynamo.reset()


def uneven(rows: int, k: int, seed: int) -> Tensor:
    """Scales differ 2^20-fold between rows and between stretches of k."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x *= torch.exp2(torch.randint(-5, 6, (rows, 1), generator=generator).float())
    steps = torch.randint(-5, 6, (1, -(-k // 64)), generator=generator).float()
    return x * torch.exp2(steps).repeat_interleave(64, dim=1)[:, :k]


def operands(chosen: Kernel, problem: GemmProblem) -> tuple[Quantized, Quantized]:
    spec_a, spec_b = (spec.with_transposed(False) for spec in chosen.operands(problem))
    a = cast(uneven(problem.m, problem.k, 1), (spec_a,))[0]
    return a, cast(uneven(problem.n, problem.k, 2), (spec_b,))[0]


def worst_row(out: Tensor, want: Tensor) -> float:
    return float(((out.double() - want).norm(dim=1) / want.norm(dim=1)).max())


@pytest.mark.parametrize("name", DOUBLED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pass_", list(Pass))
def test_scales_arrive_where_the_library_reads_them(
    name: str, shape: tuple[int, int, int], pass_: Pass
) -> None:
    chosen, problem = kernel(name), GemmProblem(*shape, pass_)
    if not chosen.supports(problem, H200):
        # Whole tiles alone, and no weight gradient; DeepGEMM's weight gradient wants rows by fours.
        whole = name == "mslk.blockwise_1x128" and (shape != (128, 256, 300) or pass_ is Pass.WGRAD)
        assert whole or (name == "deep_gemm.blockwise_1x128" and pass_ is Pass.WGRAD and shape[0] % 4)
        return
    a, b = operands(chosen, problem)
    ref = product_of_operands(a, b, dtype=torch.float64)
    bias = torch.randn(problem.n, generator=torch.Generator().manual_seed(3)) * float(ref.abs().mean())
    for dtype, given in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), (None, bias, bias.bfloat16())
    ):
        small = ref.abs().max() * 4 < torch.finfo(dtype).max
        if not small:  # beyond fp16
            continue
        out = chosen.matmul(a, b, out_dtype=dtype, bias=given)
        assert out.dtype is dtype
        assert out.shape == (problem.m, problem.n)
        want = ref if given is None else ref + given.double()
        assert worst_row(out, want) < 2 * BF16_STEP


@pytest.mark.parametrize("name", ["torch.blockwise_1x128", "deep_gemm.blockwise_1x128"])
def test_fp32_where_the_library_writes_it(name: str) -> None:
    """The weight gradient has no bf16 inside; nor has torch's forward."""
    for pass_ in Pass if name.startswith("torch") else (Pass.WGRAD,):
        problem = GemmProblem(64, 48, 300, pass_)
        a, b = operands(kernel(name), problem)
        bias = torch.full((48,), 3.0)
        want = product_of_operands(a, b, dtype=torch.float64, bias=bias)
        out = kernel(name).matmul(a, b, out_dtype=torch.float32, bias=bias)
        assert worst_row(out, want) < 4 * FP32_STEP


def test_each_form_is_called_as_its_pass_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, recipes = install_block_scaled_mm(monkeypatch), install_deep_gemm(monkeypatch)
    fast = install_mslk(monkeypatch)
    for pass_ in Pass:
        for name in (BLOCKS[0], BLOCKS[2]):
            a, b = operands(kernel(name), GemmProblem(16, 48, 128, pass_))
            kernel(name).matmul(a, b, out_dtype=torch.bfloat16)
    assert calls == ["5 torch.bfloat16", "5 torch.bfloat16", "4 torch.bfloat16"]
    assert recipes == [(1, 128, 128), (1, 128, 128), (1, 1, 128)]
    for name, is_fast in (("mslk.rowwise", False), ("mslk.rowwise.fast", True)):
        kernel(name).matmul(*operands(kernel(name), GemmProblem(8, 8, 32)), out_dtype=torch.bfloat16)
        assert fast[-1] is is_fast
        assert (kernel(name).accumulation is Accumulation.FAST) is is_fast


def test_k_major_scales_would_show() -> None:
    """The doubles are worth something: the layout of another library gives another number."""
    chosen = kernel("mslk.blockwise_1x128")
    a, b = operands(chosen, GemmProblem(130, 272, 512))
    ref = product_of_operands(a, b, dtype=torch.float64)
    out = torch.ops.mslk.f8f8bf16_groupwise(a.values, b.values, a.scale.contiguous(), b.scale.contiguous())
    assert worst_row(out, ref) > 0.1


def test_groups_of_rows() -> None:
    chosen = kernel("mslk.rowwise.grouped.fast")
    sizes = [3, 0, 9, 1]
    spec_a, spec_b = chosen.operands(GemmProblem(sum(sizes), 24, 50))
    a = cast(uneven(sum(sizes), 50, 1), (spec_a,))[0]
    each = [cast(uneven(24, 50, 10 + g), (spec_b,))[0] for g in range(len(sizes))]
    b = Quantized(torch.stack([q.values for q in each]), torch.stack([q.scale for q in each]), spec_b)
    out = chosen.matmul_groups(a, b, torch.tensor(sizes), out_dtype=torch.float32)  # type: ignore[attr-defined]
    assert out.shape == (sum(sizes), 24)
    start = 0
    for size, weight in zip(sizes, each, strict=True):
        rows = Quantized(a.values[start : start + size], a.scale[start : start + size], spec_a)
        want = product_of_operands(rows, weight, dtype=torch.float64)
        if size:
            assert worst_row(out[start : start + size], want) < 2 * BF16_STEP
        start += size

    for wrong_b, wrong_sizes in (
        (each[0], torch.tensor(sizes)),
        (b, torch.tensor(sizes, dtype=torch.int32)),
        (b, torch.tensor(sizes[:2])),
        (b._replace(scale=b.scale[:, :3]), torch.tensor(sizes)),
    ):
        with pytest.raises(UsageError, match="does not fit"):
            chosen.matmul_groups(a, wrong_b, wrong_sizes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("pass_", list(Pass))
def test_transformer_engine_gets_its_own_tensors(pass_: Pass) -> None:
    chosen, problem = kernel("transformer_engine.mx_1x32"), GemmProblem(96, 160, 330, pass_)
    assert chosen.supports(problem, B200)
    a, b = operands(chosen, problem)
    bias = torch.randn(160, generator=torch.Generator().manual_seed(3))
    for given in (None, bias):
        want = product_of_operands(a, b, dtype=torch.float64, bias=given)
        assert worst_row(chosen.matmul(a, b, out_dtype=torch.float32, bias=given), want) < 4 * FP32_STEP


@pytest.mark.parametrize("name", [*BLOCKS, "torch.mx_1x32"])
@pytest.mark.parametrize("pass_", list(Pass))
def test_shapes_without_a_gpu(name: str, pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU, torch's shape functions check formats, scales, strides and swizzles as the GPU would."""
    monkeypatch.undo()  # the real operators
    chosen, meta = kernel(name), torch.device("meta")
    for shape, dtype in itertools.product(SHAPES, (torch.bfloat16, torch.float16, torch.float32)):
        problem = GemmProblem(*shape, pass_)
        if not chosen.supports(problem, B200 if name == "torch.mx_1x32" else H200):
            continue
        a, b = blank_operands(chosen, problem, meta)
        bias = torch.empty(problem.n, device=meta) if pass_ is Pass.FWD else None
        out = chosen.matmul(a, b, out_dtype=dtype, bias=bias)
        assert out.shape == (problem.m, problem.n)
        assert out.dtype is dtype
        assert out.device == meta


def test_torch_refuses_what_lies_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above checks something: unpadded or k-major scales do not pass torch's shape function."""
    monkeypatch.undo()
    chosen, problem = kernel(BLOCKS[0]), GemmProblem(17, 128, 256)
    a, b = blank_operands(chosen, problem, torch.device("meta"))
    unpadded = b._replace(scale=b.scale[:, :2].contiguous())
    with pytest.raises(RuntimeError, match="128x128 blockwise scaling"):
        chosen.matmul(a, unpadded, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", DOUBLED)
def test_no_rows(name: str) -> None:
    a, b = operands(kernel(name), GemmProblem(0, 48, 300, Pass.DGRAD))
    out = kernel(name).matmul(a, b, out_dtype=torch.float32)
    assert out.shape == (0, 48)
    assert out.dtype is torch.float32


def test_blank_operands_look_like_cast_ones() -> None:
    for name in kernel_names():
        problem = GemmProblem(17, 160, 300, Pass.DGRAD)
        if not kernel(name).operands(problem)[0].is_quantized:
            continue
        blanks = blank_operands(kernel(name), problem, torch.device("cpu"))
        for blank, spec, rows in zip(blanks, kernel(name).operands(problem), (17, 160), strict=True):
            made = cast(torch.zeros(rows, 300), (spec.with_transposed(False),))[0]
            assert blank.spec == spec
            assert blank.values.dtype is made.values.dtype
            assert blank.values.shape == made.values.shape
            assert (blank.scale.shape, blank.scale.stride()) == (made.scale.shape, made.scale.stride())


def test_deep_gemm_warms_up_the_very_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = install_deep_gemm(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)
    for pass_ in Pass:
        kernel(BLOCKS[2]).warm_up(GemmProblem(40, 24, 300, pass_), torch.device("cpu"))
    assert recipes == [(1, 128, 128), (1, 128, 128), (1, 1, 128)]


@pytest.mark.parametrize(
    ("name", "pass_"),
    [(BLOCKS[0], Pass.DGRAD), (BLOCKS[1], Pass.FWD), (BLOCKS[2], Pass.FWD), (BLOCKS[2], Pass.WGRAD)],
)
def test_one_graph_whatever_the_scales(name: str, pass_: Pass) -> None:
    """Operators opaque to the compiler: what is behind them, a double or a library, is not traced."""
    chosen, problem = kernel(name), GemmProblem(33, 48, 300, pass_)
    counter = CompileCounter()

    def product(x: Tensor, w: Tensor) -> Tensor:
        spec_a, spec_b = (spec.with_transposed(False) for spec in chosen.operands(problem))
        return chosen.matmul(cast(x, (spec_a,))[0], cast(w, (spec_b,))[0], out_dtype=torch.bfloat16)

    compiled = torch.compile(product, fullgraph=True, backend=counter)
    for factor in (1.0, 1e-6, 1e4):
        x, w = uneven(33, 300, 1) * factor, uneven(48, 300, 2)
        assert torch.equal(compiled(x, w), product(x, w))
    assert counter.frame_count == 1


def _source(name: str) -> Callable[..., Tensor]:
    found: dict[str, Callable[..., Tensor]] = {}
    exec(kernel(name).repro(), found)
    return found["product"]


def test_reproductions_are_sources_of_a_product() -> None:
    for name in kernel_names():
        source = kernel(name).repro()
        real = not name.startswith(("emulated", "high_precision", "triton"))
        assert bool(source) is real
        if real:
            compile(source, name, "exec")
            assert "def product(a, b, scale_a, scale_b, out_dtype):" in source
            assert "loka" not in source


@pytest.mark.parametrize("name", ["torch.tensorwise", "torch.rowwise", "torch.rowwise.tensorwise_weight"])
def test_reproductions_that_run_here_give_the_same_bits(name: str) -> None:
    chosen, problem = kernel(name), GemmProblem(33, 48, 40, Pass.DGRAD)
    if not chosen.supports(problem, device_of("cpu")):
        return
    a, b = operands(chosen, problem)
    ours = chosen.matmul(a, b, out_dtype=torch.float32)
    assert torch.equal(_source(name)(a.values, b.values, a.scale, b.scale, torch.float32), ours)


def test_reproductions_on_doubles_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mslk", "mslk.gemm"):
        monkeypatch.setitem(sys.modules, module, torch)  # only its import is wanted
    names = [n for n in DOUBLED if not n.startswith("torch.")]
    for name, pass_ in itertools.product(names, Pass):
        problem = GemmProblem(130, 272, 300, pass_)
        if kernel(name).supports(problem, H200):
            a, b = operands(kernel(name), problem)
            ours = kernel(name).matmul(a, b, out_dtype=torch.bfloat16)
            theirs = _source(name)(a.values, b.values, a.scale, b.scale, torch.bfloat16)
            assert torch.equal(ours, theirs)
            if name == "mslk.rowwise.fast":
                assert "use_fast_accum=True" in kernel(name).repro()
