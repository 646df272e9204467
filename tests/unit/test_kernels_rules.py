"""Rules of the product kernels: each constraint, and what is said where it does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.kernels import KERNELS, emulated_twin, kernel
from loka.kernels.registry import twin_of
from loka.vocab import Device, Format, GemmProblem, Granularity, Pass, ScaleLayout, ScaleRounding

H200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))
B200 = Device("cuda", "NVIDIA B200", (10, 0), (2, 11))
ADA = Device("cuda", "NVIDIA L4", (8, 9), (2, 11))
MI300X = Device("hip", "AMD Instinct MI300X", (9, 4), (2, 11))
MI350 = Device("hip", "AMD Instinct MI350X", (9, 5), (2, 11))
CPU = Device("cpu", "CPU", (0, 0), (2, 13))

PLAIN = GemmProblem(64, 32, 64)
E5M2 = replace(PLAIN, pass_=Pass.DGRAD, a_format=Format.E5M2)
TWO_E5M2 = replace(E5M2, b_format=Format.E5M2)
BF16 = replace(PLAIN, a_format=Format.BF16)
BLOCKS = ("torch.blockwise_1x128", "mslk.blockwise_1x128", "deep_gemm.blockwise_1x128")
GROUPWISE = "mslk.blockwise_1x128"
MSLK = ("mslk.rowwise", "mslk.rowwise.fast", "mslk.rowwise.grouped.fast")
HOPPER = (*BLOCKS[:1], *BLOCKS[2:], *MSLK)
FNUZ = ("torch.tensorwise.fnuz", "torch.rowwise.fnuz")
MX = ("torch.mx_1x32", "transformer_engine.mx_1x32")


def reason(name: str, problem: GemmProblem, device: Device) -> str:
    support = kernel(name).supports(problem, device)
    assert bool(support) is (support.reason == "")
    return support.reason


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernels_run_on_hopper_alone_and_in_e4m3_alone(name: str) -> None:
    assert reason(name, PLAIN, H200) == ""
    assert reason(name, replace(PLAIN, m=1, k=13), H200) == ""  # m is free, the cast pads k
    assert reason(name, replace(PLAIN, m=0), H200) == ""
    assert reason(name, PLAIN, ADA) == "needs SM 9.0, found 8.9"
    assert reason(name, PLAIN, B200) == "needs SM 9.0, found 10.0"
    assert reason(name, PLAIN, CPU) == "needs SM 9.0, found CPU"
    assert reason(name, PLAIN, MI300X) == "needs SM 9.0, found AMD Instinct MI300X"
    assert reason(name, E5M2, H200) == "needs e4m3 x e4m3, got e5m2 x e4m3"
    assert reason(name, TWO_E5M2, H200) == "needs e4m3 x e4m3, got e5m2 x e5m2"
    assert reason(name, replace(PLAIN, a_format=Format.E4M3FNUZ), H200).startswith("needs e4m3 x e4m3")
    assert reason(name, BF16, H200) == "needs 8-bit operands, got bf16 and e4m3"


@pytest.mark.parametrize(
    ("name", "multiple"),
    [("torch.blockwise_1x128", 16), *((n, 8) for n in ("deep_gemm.blockwise_1x128", *MSLK))],
)
def test_n_must_be_a_multiple_and_k_never(name: str, multiple: int) -> None:
    for n in range(1, 130):
        got = reason(name, replace(PLAIN, n=n, k=n), H200)
        assert got == ("" if n % multiple == 0 else f"needs N % {multiple} == 0, got N={n}")


def test_groupwise_takes_whole_tiles_alone() -> None:
    """At other shapes it ends in an illegal instruction, which costs the process its CUDA context."""
    whole = replace(PLAIN, m=256, n=384, k=200)
    assert reason(GROUPWISE, whole, H200) == ""
    assert reason(GROUPWISE, replace(whole, m=300), H200) == "needs M % 128 == 0, got M=300"
    assert reason(GROUPWISE, replace(whole, n=64), H200) == "needs N % 128 == 0, got N=64"
    assert reason(GROUPWISE, replace(whole, k=128), H200) == "needs K > 128, got K=128"
    assert reason(GROUPWISE, whole, ADA) == "needs SM 9.0, found 8.9"
    e5m2 = replace(whole, a_format=Format.E5M2)
    assert reason(GROUPWISE, e5m2, H200) == "needs e4m3 x e4m3, got e5m2 x e4m3"


def test_weight_gradients_of_deep_gemm_come_by_four_rows() -> None:
    wgrad = replace(PLAIN, pass_=Pass.WGRAD)
    assert reason("deep_gemm.blockwise_1x128", replace(wgrad, m=18), H200) == "needs M % 4 == 0, got M=18"
    assert reason("deep_gemm.blockwise_1x128", replace(wgrad, m=20), H200) == ""


def test_passes() -> None:
    """128x128 blocks exist for the weight alone, so MSLK's groupwise product has no weight gradient."""
    wgrad = replace(PLAIN, pass_=Pass.WGRAD)
    assert reason("mslk.blockwise_1x128", wgrad, H200) == "not defined for wgrad"
    for name in (*HOPPER, *MX, *FNUZ):
        if name != GROUPWISE:
            device = H200 if name in HOPPER else B200 if name in MX else MI300X
            assert all(not reason(name, replace(PLAIN, pass_=p), device) for p in Pass)


def test_mx_needs_blackwell() -> None:
    for name in MX:
        assert reason(name, PLAIN, H200) == "needs SM 10.0, found 9.0"
        assert reason(name, PLAIN, CPU) == "needs SM 10.0, found CPU"
        assert reason(name, PLAIN, B200) == ""
        assert reason(name, BF16, B200) == "needs 8-bit operands, got bf16 and e4m3"
    assert reason("torch.mx_1x32", replace(PLAIN, m=17), B200) == ""
    assert reason("torch.mx_1x32", E5M2, B200) == ""
    assert reason("torch.mx_1x32", TWO_E5M2, B200).startswith("e5m2 x e5m2 does not exist")
    assert reason("torch.mx_1x32", replace(PLAIN, n=24), B200) == "needs N % 16 == 0, got N=24"
    assert reason("torch.mx_1x32", replace(PLAIN, b_format=Format.E5M2FNUZ), B200) == (
        "e5m2fnuz is a format of AMD GPUs"
    )
    assert reason(MX[1], replace(PLAIN, m=17), B200) == "needs M % 32 == 0, got M=17"
    assert reason(MX[1], replace(PLAIN, n=48), B200) == "needs N % 32 == 0, got N=48"
    assert reason(MX[1], E5M2, B200) == "needs e4m3 x e4m3, got e5m2 x e4m3"


def test_fnuz_needs_an_mi300() -> None:
    for name in FNUZ:
        assert reason(name, PLAIN, MI300X) == ""
        assert reason(name, E5M2, MI300X) == ""
        assert reason(name, TWO_E5M2, MI300X).startswith("e5m2 x e5m2 does not exist")
        fnuz = replace(E5M2, a_format=Format.E5M2FNUZ, b_format=Format.E5M2FNUZ)
        assert reason(name, fnuz, MI300X).startswith("e5m2 x e5m2 does not exist")
        assert reason(name, replace(PLAIN, n=15), MI300X) == "needs N % 16 == 0, got N=15"
        assert reason(name, PLAIN, H200) == (
            "needs an AMD GPU of the MI300 series (gfx942), found NVIDIA H200"
        )
        assert reason(name, PLAIN, MI350) == (
            "needs an AMD GPU of the MI300 series (9.4), found AMD Instinct MI350X (9.5)"
        )
        assert reason(name, BF16, MI300X) == "needs 8-bit operands, got bf16 and e4m3"


def test_a_recipe_reaches_fnuz_without_knowing_it() -> None:
    """What is asked in OCP is cast in FNUZ; asked in FNUZ (as a stored plan does) it stays."""
    for name in FNUZ:
        for problem in (PLAIN, E5M2):
            a, b = kernel(name).operands(problem)
            assert a.format is (Format.E5M2FNUZ if problem is E5M2 else Format.E4M3FNUZ)
            assert b.format is Format.E4M3FNUZ
            again = kernel(name).operands(replace(problem, a_format=a.format, b_format=b.format))
            assert again == (a, b)


def test_layouts_of_block_scales() -> None:
    """Where each library reads its scales: a wrong one of these runs without an error."""
    mn, pad4, k = ScaleLayout.MN_MAJOR, ScaleLayout.MN_MAJOR_PAD4, ScaleLayout.K_MAJOR
    one, two = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
    want = {
        "torch.blockwise_1x128": {Pass.FWD: (mn, pad4), Pass.DGRAD: (mn, pad4), Pass.WGRAD: (mn, mn)},
        "mslk.blockwise_1x128": {Pass.FWD: (mn, mn), Pass.DGRAD: (mn, mn)},
        "deep_gemm.blockwise_1x128": {Pass.FWD: (mn, k), Pass.DGRAD: (mn, k), Pass.WGRAD: (mn, mn)},
    }
    for name, passes in want.items():
        for pass_, layouts in passes.items():
            specs = kernel(name).operands(replace(PLAIN, pass_=pass_))
            assert tuple(s.scale_layout for s in specs) == layouts
            assert tuple(s.granularity for s in specs) == (one, one if pass_ is Pass.WGRAD else two)
            assert all(s.pad == 128 and s.format is Format.E4M3 for s in specs)
            assert [s.transposed for s in specs] == {
                Pass.FWD: [False, False], Pass.DGRAD: [False, True], Pass.WGRAD: [True, True]
            }[pass_]  # fmt: skip
    a, b = kernel("torch.mx_1x32").operands(PLAIN)
    assert a.pad == b.pad == 32
    assert a.scale_rounding is b.scale_rounding is ScaleRounding.POWER_OF_TWO


def test_libraries_share_the_casts_that_they_can_share() -> None:
    for pass_ in Pass:
        problem = replace(PLAIN, pass_=pass_)
        assert kernel("mslk.rowwise").operands(problem) == kernel("torch.rowwise").operands(problem)
        firsts = {kernel(name).operands(problem)[0] for name in BLOCKS}
        assert len(firsts) == 1


def test_what_was_never_run_says_so() -> None:
    unverified = {name for name, k in KERNELS.items() if not k.verified}
    assert {*MX, *FNUZ} <= unverified
    assert unverified.isdisjoint({*HOPPER, "torch.tensorwise", "torch.rowwise.fast"})


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("torch.tensorwise.fast", "emulated.tensorwise"),
        ("torch.rowwise.tensorwise_weight.fast", "emulated.rowwise.tensorwise_weight"),
        ("torch.blockwise_1x128", "emulated.blockwise_1x128"),
        ("mslk.blockwise_1x128", "emulated.blockwise_1x128"),
        ("deep_gemm.blockwise_1x128", "emulated.blockwise_1x128"),
        ("mslk.rowwise.grouped.fast", "emulated.rowwise"),
        ("torch.rowwise.fnuz", "emulated.rowwise"),
        ("torch.tensorwise.fnuz", "emulated.tensorwise"),
        ("torch.mx_1x32", "emulated.mx_1x32"),
        ("transformer_engine.mx_1x32", "emulated.mx_1x32"),
        ("high_precision.bf16", "high_precision.bf16"),
        ("emulated.rowwise", "emulated.rowwise"),
    ],
)
def test_twins(name: str, twin: str) -> None:
    assert emulated_twin(name).name == twin


def test_a_twin_is_found_by_what_is_cast_not_by_the_name() -> None:
    from loka.kernels.backends.high_precision import HighPrecision
    from loka.kernels.backends.torch_scaled_mm import ScaledMM

    odd = ScaledMM("other.thing.rowwise", Granularity.TENSORWISE, Granularity.TENSORWISE)
    assert twin_of(odd, KERNELS.values()) is KERNELS["emulated.tensorwise"]
    assert twin_of(HighPrecision("other.bf16"), KERNELS.values()) is KERNELS["high_precision.bf16"]
    mixed = ScaledMM("other.mixed", Granularity.TENSORWISE, Granularity.ROWWISE)
    assert twin_of(mixed, KERNELS.values()) is None
