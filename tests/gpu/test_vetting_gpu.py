"""Vetting on a GPU: the known faults of real libraries are caught by the very calls that commit them."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loka.kernels import HIGH_PRECISION, KERNELS, device_of, kernel, usable
from loka.kernels.base import BaseKernel
from loka.kernels.vetting import Data, Trial, examine, repro_script
from loka.kernels.vetting.poison import poison_free_memory
from loka.numerics import Quantized
from loka.vocab import (
    Accumulation,
    Device,
    Format,
    GemmProblem,
    Granularity,
    OperandSpec,
    Pass,
    ScaleLayout,
    Support,
)

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported; kernel libraries about theirs.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

GIB = 2**30
CANDIDATES = [name for name in KERNELS if name != HIGH_PRECISION and not KERNELS[name].emulated]
# On and off the tiles; 27 and 2 blocks of k; one row; rows that are no multiple of 4.
SHAPES = [(256, 256, 256), (300, 1024, 479), (64, 384, 3456), (1, 16, 16), (18, 64, 272), (130, 512, 48)]


@pytest.fixture(scope="module")
def device() -> Device:
    return device_of("cuda")


@dataclass(frozen=True, slots=True)
class _WholeBlocks(BaseKernel):
    """1 x 128 times 128 x 128, multiples of 128 only: neighbours off the tiles are not asked for."""

    right: bool = False

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        whole = not (problem.m % 128 or problem.n % 128 or problem.k % 128)
        return Support.yes() if whole else Support.no("needs whole blocks")

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        return (
            OperandSpec(Format.E4M3, Granularity.BLOCKWISE_1X128, scale_layout=ScaleLayout.MN_MAJOR),
            OperandSpec(Format.E4M3, Granularity.BLOCKWISE_128X128, scale_layout=ScaleLayout.K_MAJOR),
        )


class _UnpaddedV1(_WholeBlocks):
    """torch._scaled_mm with the scales of 128 x 128 blocks as its checks accept them: unpadded rows."""

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        return torch._scaled_mm(a.values, b.values.t(), a.scale, b.scale.t(), out_dtype=out_dtype)


class _KMajorGroupwise(_WholeBlocks):
    """mslk's groupwise product with scales that lie K-major; with `right`, as its own quantizers lay them."""

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        scales = [q.scale.t().contiguous() if self.right else q.scale.contiguous() for q in (a, b)]
        return torch.ops.mslk.f8f8bf16_groupwise(a.values, b.values, *scales).to(out_dtype)


@pytest.mark.parametrize("k", [256, 3456])
def test_fault_1_torch_v1_block_scales_unpadded(k: int) -> None:
    """Garbage without an error, unless K is a multiple of 512."""
    verdict = examine(_UnpaddedV1("faulty.torch_v1"), GemmProblem(256, 512, k), "cuda")
    assert not verdict.ok
    assert "raised" not in verdict.reason, verdict.reason


@pytest.mark.parametrize("k", [512, 2048])
def test_torch_v1_block_scales_are_right_where_nothing_is_padded(k: int) -> None:
    verdict = examine(_UnpaddedV1("faulty.torch_v1"), GemmProblem(256, 512, k), "cuda")
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("k", [512, 3456])
def test_fault_2_mslk_groupwise_with_k_major_scales(k: int) -> None:
    pytest.importorskip("mslk.gemm", reason="mslk is not installed", exc_type=ImportError)
    problem = GemmProblem(512, 256, k)
    verdict = examine(_KMajorGroupwise("faulty.mslk_groupwise"), problem, "cuda")
    assert not verdict.ok
    assert "raised" not in verdict.reason, verdict.reason
    verdict = examine(_KMajorGroupwise("mslk_groupwise", right=True), problem, "cuda")
    assert verdict.ok, verdict.reason


def test_fault_3_fast_accumulation_of_data_of_one_sign(device: Device) -> None:
    """Published for this hardware at k = 65,536: 31 % fast, 6e-4 exact; centred data show nothing."""
    problem = GemmProblem(256, 256, 65536)
    exact, fast = kernel("torch.tensorwise"), kernel("torch.tensorwise.fast")
    if not fast.supports(problem, device):
        pytest.skip(fast.supports(problem, device).reason)
    verdict = examine(fast, problem, "cuda")
    assert not verdict.ok
    assert verdict.one_sign_error is not None
    assert 0.1 < verdict.one_sign_error < 0.9
    assert verdict.failed is not None
    assert verdict.failed.data is Data.ONE_SIGNED
    verdict = examine(exact, problem, "cuda")
    assert verdict.support, verdict.reason
    assert verdict.one_sign_error is not None
    assert verdict.one_sign_error < 5e-3
    assert examine(fast, GemmProblem(256, 256, 4096), "cuda").support


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_kernel_is_right_where_it_claims_support(name: str, device: Device) -> None:
    for shape in SHAPES:
        for pass_ in Pass:
            problem = GemmProblem(*shape, pass_, bias=pass_ is Pass.FWD)
            if usable(kernel(name), problem, device):
                verdict = examine(kernel(name), problem, "cuda")
                assert verdict.ok, (name, problem, verdict.reason)


@pytest.mark.parametrize(
    ("shape", "pass_"),
    [((65536, 2048, 2048), Pass.FWD), ((2048, 512, 262144), Pass.WGRAD), ((2048, 1024, 123200), Pass.FWD)],
)
def test_a_large_problem_is_vetted_whole_in_bounded_memory(
    shape: tuple[int, int, int], pass_: Pass, device: Device
) -> None:
    problem = GemmProblem(*shape, pass_)
    chosen = kernel("torch.tensorwise")
    if not chosen.supports(problem, device):
        pytest.skip(chosen.supports(problem, device).reason)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    verdict = examine(chosen, problem, "cuda")
    assert verdict.support, verdict.reason
    assert torch.cuda.max_memory_allocated() - before < 2 * GIB


def test_a_product_gets_poisoned_memory() -> None:
    torch.cuda.empty_cache()
    poison_free_memory(300, 500, 2, torch.device("cuda"))
    outs = [torch.empty(300, 500, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    assert all(bool(out.isnan().all()) for out in outs)
    workspace = torch.empty(8, 300, 500, device="cuda")
    assert bool(workspace.isnan().all())


def test_an_unwritten_tile_of_a_product_shows(device: Device) -> None:
    whole = kernel("emulated.blockwise_1x128")

    class Forgetful(_WholeBlocks):
        def matmul(
            self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
        ) -> Tensor:
            done = whole.matmul(a, b, out_dtype=out_dtype)
            out = torch.empty_like(done)
            out[:-128] = done[:-128]
            return out

    verdict = examine(Forgetful("faulty.forgetful"), GemmProblem(512, 256, 384), "cuda")
    assert not verdict.ok


def test_scripts_of_real_kernels_run(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Right where the kernel is right."""
    for name in CANDIDATES:
        for pass_ in Pass:
            problem = GemmProblem(256, 384, 640, pass_)
            chosen = kernel(name)
            if not chosen.repro() or not usable(chosen, problem, device):
                continue
            code, out = _run(repro_script(chosen, Trial(problem), reason="", device="cuda"), tmp_path, capsys)
            assert code == 0, (name, pass_, out)


def test_a_script_shows_what_fast_accumulation_loses(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = kernel("torch.tensorwise.fast")
    trial = Trial(GemmProblem(256, 256, 65536), Data.ONE_SIGNED)
    if not fast.repro() or not fast.supports(trial.problem, device):
        pytest.skip("no script for torch.tensorwise.fast here")
    assert fast.accumulation is Accumulation.FAST
    code, out = _run(repro_script(fast, trial, reason="", device="cuda"), tmp_path, capsys)
    assert code == 1
    assert out.endswith("WRONG\n")


def _run(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    path = folder / "script.py"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    return stop.value.code, capsys.readouterr().out
