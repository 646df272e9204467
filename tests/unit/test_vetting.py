"""Each known fault is caught, by a double that commits it on a kernel's own memory; what is right passes."""

from __future__ import annotations

import faulty_kernels as faulty
import pytest
import torch
from faulty_kernels import Double
from torch import Tensor

from loka.kernels import HIGH_PRECISION, KERNELS, device_of, kernel, vet
from loka.kernels.vetting import Data, Vetting, examine
from loka.kernels.vetting.examine import neighbour
from loka.numerics import Quantized
from loka.vocab import Accumulation, Format, GemmProblem, Granularity, Pass

ROWWISE, TENSORWISE = Granularity.ROWWISE, Granularity.TENSORWISE
B1, B2 = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
CPU = device_of("cpu")


def blockwise(product: faulty.Product) -> Double:
    return Double("double.blockwise", product=product, granularity=B1, of_b=B2)


@pytest.mark.parametrize("k", [256, 3456])
@pytest.mark.parametrize(
    "fault", [faulty.unpadded_block_scales, faulty.unpadded_block_scales_to_the_end], ids=lambda f: f.__name__
)
def test_fault_1_block_scales_read_unpadded(fault: faulty.Product, k: int) -> None:
    verdict = examine(blockwise(fault), GemmProblem(40, 384, k), "cpu")
    assert not verdict.ok
    assert verdict.failed is not None
    assert examine(blockwise(faulty.right), GemmProblem(40, 384, k), "cpu").ok


@pytest.mark.parametrize("k", [512, 1024])
def test_unpadded_block_scales_are_right_where_nothing_is_padded(k: int) -> None:
    assert examine(blockwise(faulty.unpadded_block_scales), GemmProblem(40, 384, k), "cpu").ok


@pytest.mark.parametrize("k", [256, 512, 3456])
def test_fault_2_k_major_scales_read_as_mn_major(k: int) -> None:
    verdict = examine(blockwise(faulty.k_major_read_as_mn_major), GemmProblem(200, 128, k), "cpu")
    assert not verdict.ok
    assert "is off by" in verdict.reason


def test_fault_3_fast_accumulation_of_data_of_one_sign() -> None:
    """On centred data the same kernel passes; a sum that only grows loses what is cut in each step."""
    problem = GemmProblem(6, 16, 65536)
    fast = Double(
        "double.fast",
        product=faulty.fast_accumulation,
        granularity=TENSORWISE,
        accumulation=Accumulation.FAST,
        needs_n=16,
    )
    verdict = examine(fast, problem, "cpu")
    assert not verdict.ok
    assert verdict.one_sign_error is not None
    assert verdict.one_sign_error > 0.1
    assert "one-signed data: off by" in verdict.reason
    assert verdict.failed is not None
    assert verdict.failed.data is Data.ONE_SIGNED
    assert verdict.worst_row is not None
    assert verdict.worst_row < 2e-2


def test_promoted_sums_pass_as_exact_and_fast_ones_do_not() -> None:
    problem = GemmProblem(6, 16, 2048)
    tensorwise = {"granularity": TENSORWISE, "needs_n": 16}
    exact = examine(Double("double", product=faulty.exact_accumulation, **tensorwise), problem, "cpu")
    assert exact.ok, exact.reason
    assert exact.one_sign_error is not None
    assert exact.one_sign_error < 5e-3
    called_exact = Double("double", product=faulty.fast_accumulation, **tensorwise)
    assert "one-signed data" in examine(called_exact, problem, "cpu").reason
    short = Double(
        "double.fast", product=faulty.fast_accumulation, accumulation=Accumulation.FAST, **tensorwise
    )
    assert examine(short, problem, "cpu").ok


@pytest.mark.parametrize(
    ("product", "granularity", "of_b", "shape"),
    [
        (faulty.unwritten_tile, ROWWISE, None, (70, 48, 200)),
        (faulty.swapped_scales, ROWWISE, None, (48, 48, 200)),
        (faulty.swapped_scales, B1, B1, (48, 48, 300)),
        (faulty.shifted_scales, ROWWISE, None, (70, 48, 200)),
        (faulty.shifted_scales, B1, B2, (70, 48, 200)),
        (faulty.one_scale_for_all, ROWWISE, None, (70, 48, 200)),
        (faulty.a_block_late, B1, B2, (70, 130, 300)),
        (faulty.a_block_late, B1, B1, (70, 48, 300)),
        (faulty.without_the_last_of_k, TENSORWISE, None, (20, 48, 4097)),
        (faulty.without_the_last_of_k, B1, B2, (20, 48, 4097)),
        (faulty.sixteen_past_k, ROWWISE, None, (70, 48, 208)),
        (faulty.a_row_past_the_end, ROWWISE, None, (70, 48, 208)),
    ],
)
def test_planted_faults(
    product: faulty.Product, granularity: Granularity, of_b: Granularity | None, shape: tuple[int, int, int]
) -> None:
    for pass_ in Pass:
        double = Double("double", product=product, granularity=granularity, of_b=of_b)
        verdict = examine(double, GemmProblem(*shape, pass_), "cpu")
        assert not verdict.ok, pass_
        assert not vet(double, GemmProblem(*shape, pass_), "cpu")
        right = Double("double", granularity=granularity, of_b=of_b)
        verdict = examine(right, GemmProblem(*shape, pass_), "cpu")
        assert verdict.ok, verdict.reason
        assert verdict.reason == ""


@pytest.mark.parametrize("shape", [(48, 48, 200), (70, 48, 200)])
def test_a_transposed_output(shape: tuple[int, int, int]) -> None:
    verdict = examine(Double("double", transposes=True), GemmProblem(*shape), "cpu")
    assert not verdict.ok
    if shape[0] != shape[1]:
        assert verdict.reason.startswith("the output is torch.bfloat16 (48, 70), not torch.bfloat16 (70, 48)")


def test_a_dropped_bias_shows_where_the_problem_has_one() -> None:
    double = Double("double", drops_bias=True)
    assert examine(double, GemmProblem(70, 48, 200), "cpu").ok
    verdict = examine(double, GemmProblem(70, 48, 200, bias=True), "cpu")
    assert not verdict.ok
    assert "with bias" in verdict.reason
    assert examine(Double("double"), GemmProblem(70, 48, 200, bias=True), "cpu").ok


def test_sixteen_bits_inside_an_fp32_result() -> None:
    """A failure where fp32 was asked for; a remark where bf16 was and fp32 is claimed."""
    hiding = Double("double", hides_bf16=True)
    wide = GemmProblem(48, 64, 130, Pass.WGRAD, out_dtype=Format.FP32)
    verdict = examine(hiding, wide, "cpu")
    assert not verdict.ok
    assert "the whole is off by 0.0017 (limit 0.001)" in verdict.reason
    verdict = examine(hiding, GemmProblem(48, 64, 130, Pass.WGRAD), "cpu")
    assert verdict.ok
    assert "rounded to 16 bits inside" in verdict.reason
    assert verdict.support.ok
    assert verdict.fp32_error == pytest.approx(1.7e-3, rel=0.1)
    exact = examine(Double("double"), wide, "cpu")
    assert exact.ok
    assert exact.rel_err is not None
    assert exact.rel_err < 1e-6


class _Unsteady:
    """One element of each second run is the next number up."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        self.runs += 1
        out = faulty.right(a, b)
        if self.runs % 2:
            out[0, 0] *= 1 + 2.0**-7
        return out


def test_runs_that_differ_are_not_wrong_and_not_for_plans() -> None:
    verdict = examine(Double("double", product=_Unsteady()), GemmProblem(70, 48, 200), "cpu")
    assert verdict.ok
    assert not verdict.deterministic
    assert "two runs on the same operands differ in 1 of 3360 elements" in verdict.reason
    assert not verdict.support
    assert verdict.support.reason == verdict.reason


def test_a_kernel_that_raises_what_it_claims_to_support() -> None:
    def raising(a: Quantized, b: Quantized) -> Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling it\nwith more lines")

    verdict = examine(Double("double", product=raising), GemmProblem(70, 48, 200), "cpu")
    assert not verdict.ok
    assert verdict.reason.startswith("raised RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED when calling it; ")
    assert "more lines" not in verdict.reason


def test_a_large_result_is_checked_whole() -> None:
    """Most rows are repeated; one wrong element of one row among 3,000 shows."""

    def one_wrong(a: Quantized, b: Quantized) -> Tensor:
        out = faulty.right(a, b)
        out[2311, 40] = -3 * out[2311, 40]
        return out

    problem = GemmProblem(3000, 48, 64)
    verdict = examine(Double("double", product=one_wrong), problem, "cpu")
    assert "worst row 2311 is off by" in verdict.reason
    assert examine(Double("double"), problem, "cpu").ok


def test_the_kernels_of_this_machine_pass() -> None:
    for chosen in KERNELS.values():
        if chosen.name == HIGH_PRECISION:
            continue
        for pass_ in Pass:
            for shape in ((70, 48, 200), (1, 16, 16), (33, 16, 300)):
                problem = GemmProblem(*shape, pass_, bias=pass_ is Pass.FWD)
                if chosen.supports(problem, CPU) and chosen.available():
                    verdict = examine(chosen, problem, "cpu")
                    assert verdict.support, (chosen.name, problem, verdict.reason)
    assert examine(kernel(HIGH_PRECISION), GemmProblem(70, 48, 200, Pass.WGRAD), "cpu").ok


@pytest.mark.parametrize("shape", [(0, 16, 32), (1, 1, 1), (5, 16, 1), (2, 3, 5)])
def test_smallest_shapes(shape: tuple[int, int, int]) -> None:
    for granularity, of_b in ((ROWWISE, None), (TENSORWISE, None), (B1, B2)):
        verdict = examine(Double("double", granularity=granularity, of_b=of_b), GemmProblem(*shape), "cpu")
        assert verdict.ok, verdict.reason


def test_fp16_results_stay_in_range() -> None:
    for shape in ((70, 48, 200), (16, 16, 65536)):
        verdict = examine(Double("double"), GemmProblem(*shape, out_dtype=Format.FP16), "cpu")
        assert verdict.ok, verdict.reason


def test_neighbours_are_the_least_that_the_kernel_supports() -> None:
    free, strict = Double("double"), Double("double", needs_n=16)
    assert neighbour(free, GemmProblem(256, 128, 512), CPU) == GemmProblem(255, 127, 511)
    assert neighbour(strict, GemmProblem(256, 128, 512), CPU) == GemmProblem(255, 112, 511)
    assert neighbour(strict, GemmProblem(1, 16, 1), CPU) is None
    assert neighbour(strict, GemmProblem(2, 16, 1), CPU) == GemmProblem(1, 16, 1)


def test_a_fault_off_the_tiles_is_found_from_a_problem_on_them() -> None:
    def last_column(a: Quantized, b: Quantized) -> Tensor:
        out = faulty.right(a, b)
        if out.shape[1] % 8:
            out[:, -1] = 0.0
        return out

    verdict = examine(Double("double", product=last_column), GemmProblem(64, 128, 256), "cpu")
    assert verdict.reason.startswith("63x127x255: worst column 126 is off by")


def test_one_verdict_a_shape_class() -> None:
    class Counting:
        calls = 0

        def __call__(self, a: Quantized, b: Quantized) -> Tensor:
            Counting.calls += 1
            return faulty.right(a, b)

    vetting = Vetting()
    double = Double("double", product=Counting())
    first = vetting.vetted(double, GemmProblem(60, 48, 200), "cpu")
    calls = Counting.calls
    assert vetting.vetted(double, GemmProblem(58, 48, 200, bias=True), "cpu") is first
    assert Counting.calls == calls
    assert any("with bias" in trial for trial in first.checked)
    others = [
        GemmProblem(70, 48, 200),  # another power of two
        GemmProblem(60, 48, 208),  # another alignment
        GemmProblem(60, 48, 200, Pass.DGRAD),
        GemmProblem(60, 48, 200, Pass.DGRAD, Format.E5M2),
        GemmProblem(60, 48, 200, out_dtype=Format.FP32),
    ]
    for count, other in enumerate(others, 2):
        vetting.vetted(double, other, "cpu")
        assert len(vetting) == count
    vetting.vetted(Double("other"), others[0], "cpu")
    assert len(vetting) == len(others) + 2
    assert len(Vetting()) == 0


def test_vetting_leaves_the_callers_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    examine(Double("double"), GemmProblem(1100, 16, 40, bias=True), "cpu")
    assert torch.equal(torch.get_rng_state(), before)
