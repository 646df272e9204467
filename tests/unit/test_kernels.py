"""Rules, registry, cast engine and vetting. The rules are pure: a CPU enforces none of the GPU's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loka.errors import UnknownNameError, UsageError
from loka.kernels import (
    KERNELS,
    candidates,
    cast,
    check_patterns,
    device_of,
    emulated_twin,
    kernel,
    kernel_names,
    vet,
)
from loka.kernels.backends.torch_scaled_mm import ScaledMM
from loka.numerics import Quantized, cast_operand, product_of_operands
from loka.vocab import A_FORMATS, Device, Format, GemmProblem, Granularity, OperandSpec, Pass

H200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))
CPU_213 = Device("cpu", "CPU", (0, 0), (2, 13))
CPU_211 = Device("cpu", "CPU", (0, 0), (2, 11))


def gpu(major: int, minor: int) -> Device:
    return Device("cuda", "some GPU", (major, minor), (2, 11))


@pytest.mark.parametrize(
    ("problem", "device", "name", "reason"),
    [
        (GemmProblem(64, 32, 64), H200, "torch.tensorwise", ""),
        (GemmProblem(17, 32, 13), H200, "torch.rowwise", ""),  # M is free, k is padded by the cast
        (GemmProblem(0, 32, 64), H200, "torch.rowwise.fast", ""),
        (GemmProblem(64, 15, 64), H200, "torch.tensorwise", "needs N % 16 == 0, got N=15"),
        (GemmProblem(64, 1, 256), H200, "torch.rowwise", "needs N % 16 == 0, got N=1"),
        (GemmProblem(64, 32, 64), gpu(8, 0), "torch.tensorwise", "needs SM 8.9, 9.0, 10.0, found 8.0"),
        (GemmProblem(64, 32, 64), gpu(8, 6), "torch.tensorwise", "needs SM 8.9, 9.0, 10.0, found 8.6"),
        (GemmProblem(64, 32, 64), gpu(8, 9), "torch.tensorwise", ""),
        (GemmProblem(64, 32, 64), gpu(8, 9), "torch.rowwise", "needs SM 9.0, found 8.9"),
        (GemmProblem(64, 32, 64), gpu(10, 0), "torch.rowwise", "needs SM 9.0, found 10.0"),
        (GemmProblem(64, 32, 64), gpu(10, 0), "torch.tensorwise", ""),
        (GemmProblem(64, 32, 64), gpu(12, 1), "torch.rowwise", "needs SM 9.0, found 12.1"),
        (GemmProblem(64, 32, 64, a_format=Format.E4M3FNUZ), H200, "torch.tensorwise",
         "e4m3fnuz is a format of AMD GPUs"),
        (GemmProblem(64, 32, 64, a_format=Format.E5M2, b_format=Format.E5M2), H200, "torch.tensorwise",
         "e5m2 x e5m2 does not exist in hardware; use e4m3 for one operand"),
        (GemmProblem(64, 32, 64, a_format=Format.E5M2, b_format=Format.E5M2), CPU_213, "emulated.rowwise",
         "e5m2 x e5m2 does not exist in hardware; use e4m3 for one operand"),
        (GemmProblem(64, 15, 13), CPU_213, "torch.rowwise", ""),
        (GemmProblem(64, 32, 64), CPU_211, "torch.rowwise",
         "rowwise on a CPU needs torch >= 2.13, found 2.11"),
        (GemmProblem(64, 32, 64), CPU_211, "torch.tensorwise", ""),
        (GemmProblem(64, 32, 64), CPU_213, "torch.tensorwise.fast", "a CPU ignores fast accumulation"),
        (GemmProblem(64, 32, 64), Device("hip", "MI300X", (9, 4)), "torch.tensorwise",
         "unverified on AMD GPUs, found MI300X"),
        (GemmProblem(64, 32, 64), H200, "torch.rowwise.tensorwise_weight", "not defined for fwd"),
        (GemmProblem(64, 32, 64, Pass.DGRAD), H200, "torch.rowwise.tensorwise_weight", ""),
        (GemmProblem(7, 3, 5), gpu(7, 0), "emulated.mx_1x32", ""),
        (GemmProblem(7, 3, 5), gpu(7, 0), "high_precision.bf16", ""),
        (GemmProblem(64, 32, 64, a_format=Format.BF16), H200, "torch.tensorwise",
         "needs 8-bit operands, got bf16 and e4m3"),
    ],
)  # fmt: skip
def test_rules(problem: GemmProblem, device: Device, name: str, reason: str) -> None:
    support = kernel(name).supports(problem, device)
    assert bool(support) is (reason == "")
    assert support.reason == reason


def test_swapping_n_and_k_never_mixes_the_two_rules() -> None:
    """D5: N must divide by 16, K is padded; the mirror of a refused shape is accepted."""
    tensorwise = kernel("torch.tensorwise")
    assert not tensorwise.supports(GemmProblem(7, 575, 128), H200)
    assert tensorwise.supports(GemmProblem(7, 128, 575), H200)
    assert tensorwise.operands(GemmProblem(7, 128, 575))[0].pad == 16


def test_every_kernel_states_a_reason_when_it_says_no() -> None:
    for device in (H200, CPU_213, CPU_211, gpu(8, 0), gpu(12, 1)):
        for pass_ in Pass:
            for _, support in candidates(GemmProblem(64, 30, 64, pass_), device):
                assert support.ok == (not support.reason)


def test_unknown_names_list_what_exists() -> None:
    with pytest.raises(UnknownNameError, match="unknown kernel") as caught:
        kernel("torch.rowwize")
    assert "did you mean `torch.rowwise`?" in str(caught.value)
    with pytest.raises(UnknownNameError, match="matches no kernel"):
        check_patterns(("torch.*", "cutlass.*"))
    assert kernel("bf16").name == "high_precision.bf16"
    assert len(set(kernel_names())) == len(KERNELS)


def test_twins_keep_the_recipe() -> None:
    for name in kernel_names():
        twin = emulated_twin(name)
        for pass_ in Pass:
            problem = GemmProblem(64, 32, 64, pass_)
            if kernel(name).supports(problem, H200):
                ours = [s.recipe_key for s in kernel(name).operands(problem)]
                assert ours == [s.recipe_key for s in twin.operands(problem)]


@pytest.mark.parametrize("pad", [1, 16])
def test_one_cast_for_both_orientations_equals_two(pad: int) -> None:
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    for granularity in Granularity:
        specs = tuple(OperandSpec.of(Format.E4M3, granularity, transposed=t, pad=pad) for t in (False, True))
        for got, spec in zip(cast(x, (*specs, specs[0])), (*specs, specs[0]), strict=True):
            want = cast_operand(x, spec)
            assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
            assert torch.equal(got.scale, want.scale)
            assert got.values.is_contiguous()


def test_real_kernels_of_a_cpu_equal_the_emulated_ones() -> None:
    here = device_of("cpu")
    x = torch.randn(33, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 33)[:, None]
    w = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    for pass_ in Pass:
        problem = GemmProblem(33, 24, 40, pass_)
        for real in KERNELS.values():
            if real.emulated or not real.supports(problem, here) or "torch" not in real.name:
                continue
            twin = emulated_twin(real.name)
            bias = torch.randn(24, generator=torch.Generator().manual_seed(2))
            outs = []
            for k in (real, twin):
                a, b = (s.with_transposed(False) for s in k.operands(problem))
                q = cast(x, (a,))[0], cast(w, (b,))[0]
                outs.append(k.matmul(*q, out_dtype=torch.float32, bias=bias))
            assert torch.allclose(*outs, rtol=1e-5, atol=1e-5)


def test_d15_bias_with_fp32_output() -> None:
    x, w, b = torch.randn(8, 32), torch.randn(16, 32), torch.randn(16)
    for name in ("torch.tensorwise", "emulated.rowwise", "high_precision.bf16"):
        k = kernel(name)
        spec_a, spec_b = k.operands(GemmProblem(8, 16, 32))
        q = cast(x, (spec_a,))[0], cast(w, (spec_b,))[0]
        with_bias = k.matmul(*q, out_dtype=torch.float32, bias=b)
        difference = with_bias - k.matmul(*q, out_dtype=torch.float32)
        assert torch.allclose(difference, b.expand(8, 16), rtol=0, atol=float(with_bias.abs().max()) * 2**-23)


@dataclass(frozen=True, slots=True)
class _Faulty(ScaledMM):
    fault: str = "swap"

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        if self.fault == "scales":  # the rows' scales in the wrong order
            a = a._replace(scale=a.scale.roll(1))
        out = product_of_operands(a, b)
        if self.fault == "nan":
            out[0, 0] = torch.nan
        if self.fault == "random":
            out = out * (1 + 1e-2 * torch.rand(()))
        return out.to(out_dtype)


@pytest.mark.parametrize(
    ("fault", "found"), [("scales", "worst row"), ("nan", "non-finite"), ("random", "two runs"), ("", "")]
)
def test_vetting_catches_planted_faults(fault: str, found: str) -> None:
    faulty = _Faulty("torch.faulty", Granularity.ROWWISE, Granularity.ROWWISE, fault=fault)
    verdict = vet(faulty, GemmProblem(70, 48, 200), "cpu")
    assert bool(verdict) is (found == "")
    assert found in verdict.reason


def test_devices() -> None:
    assert device_of("cpu").type == "cpu"
    with pytest.raises(UsageError, match="not supported"):
        device_of("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch sees none"):
            device_of("cuda")


def test_the_formats_tried_are_those_that_some_kernel_runs() -> None:
    for pass_, formats in A_FORMATS.items():
        for format_ in Format:
            problem = GemmProblem(64, 32, 64, pass_, format_)
            runs = any(k.supports(problem, H200) for k in KERNELS.values() if "torch" in k.name)
            assert runs or format_ not in formats
    assert Format.E5M2 not in A_FORMATS[Pass.FWD]
