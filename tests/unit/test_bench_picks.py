"""How a kernel is picked, judged and counted: on given samples and rows, against sums by hand."""

from __future__ import annotations

import math

import pytest

from loka.bench.accounting import Pair
from loka.bench.assemble import Times, assembled
from loka.bench.picks import fastest, judged, pick
from loka.bench.results import KernelRow, PairResult, columns_of, rows_of
from loka.bench.shapes import Shape
from loka.bench.summary import metrics_of
from loka.kernels import kernel
from loka.timing import PEAKS, Timing
from loka.vocab import Pass

BF16 = "high_precision.bf16"
FP8 = ("torch.tensorwise", "torch.rowwise")


def steady(us: float, rounds: int = 16) -> Timing:
    return Timing((us,) * rounds)


def halves(even_us: float, odd_us: float, rounds: int = 16) -> Timing:
    """One time in the rounds that choose, another in the rounds that judge."""
    return Timing(tuple(odd_us if i % 2 else even_us for i in range(rounds)))


@pytest.mark.parametrize(
    ("fp8_us", "expected"),
    [
        (90.0, "torch.rowwise"),
        (100 / 1.051, "torch.rowwise"),
        (100 / 1.049, BF16),  # faster, but by less than 5 %
        (110.0, BF16),
    ],
)
def test_fp8_is_picked_where_it_saves_a_twentieth(fp8_us: float, expected: str) -> None:
    totals = {BF16: steady(100.0), "torch.tensorwise": steady(150.0), "torch.rowwise": steady(fp8_us)}
    assert pick(totals, FP8) == expected


def test_a_gain_inside_the_noise_is_not_picked() -> None:
    # Five of eight choosing rounds are 1.7 times as fast; the interval of the median still reaches below 1.
    choosing = [60.0] * 5 + [120.0] * 3
    samples = [us for us in choosing for _ in range(2)]
    assert pick({BF16: steady(100.0), "torch.rowwise": Timing(tuple(samples))}, FP8) == BF16


def test_the_choice_sees_only_the_even_rounds_and_the_judgement_only_the_odd_ones() -> None:
    totals = {
        BF16: steady(100.0),
        "torch.rowwise": halves(80.0, 125.0),
        "torch.tensorwise": halves(99.0, 50.0),
    }
    assert fastest(totals, FP8) == "torch.rowwise"
    assert pick(totals, FP8) == "torch.rowwise"
    assert judged(totals, "torch.rowwise").median == pytest.approx(0.8)


def test_fp8_must_beat_the_fastest_bf16_product() -> None:
    totals = {BF16: steady(100.0), "triton.bf16": steady(70.0), "torch.rowwise": steady(68.0)}
    assert pick(totals, FP8) == "triton.bf16"
    totals["torch.rowwise"] = steady(60.0)
    assert pick(totals, FP8) == "torch.rowwise"


def test_another_bf16_product_is_taken_only_where_it_is_surely_faster() -> None:
    noisy = Timing(tuple(90.0 if i % 4 < 2 else 111.0 for i in range(16)))
    assert pick({BF16: steady(100.0), "triton.bf16": noisy}, FP8) == BF16
    assert pick({BF16: steady(100.0)}, FP8) == BF16


def row(name: str, **values: object) -> KernelRow:
    known = {"quantized": name.split(".")[0] != "high_precision", "exact": True, "vetted": True}
    return KernelRow(kernel=name, **{**known, **values})  # type: ignore[arg-type]


def test_metrics_are_the_sums_by_hand() -> None:
    bf16 = row(BF16, speedup=1.0, product_us=50.0, p50_us=60.0, roofline=0.5)
    quick = row("torch.rowwise", speedup=1.5, product_us=30.0, cast_us=10.0, roofline=0.4)
    fast = row("mslk.rowwise.fast", exact=False, speedup=1.2, product_us=20.0, cast_us=20.0, roofline=0.8)
    worse = row("torch.tensorwise", speedup=0.97, product_us=40.0, cast_us=40.0, roofline=0.2)
    pairs = [
        PairResult(
            key="64x32x16.fwd",
            flops=100,
            pick=quick.kernel,
            pick_exact=quick.kernel,
            fastest=quick.kernel,
            kernels=(bf16, quick),
        ),
        PairResult(
            key="64x32x16.dgrad",
            flops=200,
            pick=fast.kernel,
            pick_exact=BF16,
            fastest=fast.kernel,
            kernels=(bf16, fast),
        ),
        PairResult(
            key="64x32x16.wgrad",
            flops=300,
            pick=BF16,
            pick_exact=BF16,
            fastest="torch.rowwise",
            kernels=(bf16,),
        ),
        PairResult(
            key="8x8x8.fwd",
            flops=400,
            pick=worse.kernel,
            pick_exact=worse.kernel,
            fastest=worse.kernel,
            kernels=(bf16, worse),
        ),
        PairResult(key="8x8x8.dgrad", flops=10**9, failed="out of memory"),
    ]
    metrics = metrics_of(pairs)
    assert metrics["pairs"] == 4
    assert metrics["pairs_failed"] == 1
    assert metrics["fp8_share_of_pairs"] == 3 / 4
    assert metrics["fp8_share_of_flops"] == 700 / 1000
    assert metrics["slower_than_bf16_share"] == 1 / 4
    assert metrics["fp8_total_speedup_geomean"] == pytest.approx((1.5 * 1.2 * 0.97) ** (1 / 3))
    assert metrics["fp8_total_speedup_geomean_exact"] == pytest.approx(math.sqrt(1.5 * 0.97))
    assert metrics["quantization_share_percent"] == pytest.approx(100 * 70 / 160)
    assert metrics["roofline_fraction_geomean"] == pytest.approx((0.4 * 0.8 * 0.5 * 0.2) ** (1 / 4))
    counts = {name: value for name, value in metrics.items() if "_count@" in name}
    assert counts == {
        "best_count@high_precision": 0,
        "best_count@mslk": 1,
        "best_count@torch": 3,
        "pick_count@high_precision": 1,
        "pick_count@mslk": 1,
        "pick_count@torch": 2,
    }
    assert metrics["speedup@64x32x16.fwd"] == 1.5
    assert metrics["speedup@64x32x16.wgrad"] == 1.0
    assert "speedup@8x8x8.dgrad" not in metrics


def test_metrics_without_an_fp8_pick_leave_out_what_is_not_defined() -> None:
    pair = PairResult(
        key="8x8x8.fwd", flops=1, pick=BF16, pick_exact=BF16, fastest=BF16, kernels=(row(BF16),)
    )
    metrics = metrics_of([pair])
    assert metrics["fp8_share_of_pairs"] == 0.0
    assert not {"fp8_total_speedup_geomean", "quantization_share_percent", "roofline_fraction_geomean"} & set(
        metrics
    )
    assert metrics_of([]) == {"pairs": 0, "pairs_failed": 0}


def test_a_pair_is_assembled_from_its_timings() -> None:
    pair = Pair(Shape(4096, 1024, 2048), Pass.WGRAD)
    names = (BF16, "torch.tensorwise", "torch.tensorwise.fast", "torch.rowwise", "torch.rowwise.fast")
    times = Times(
        totals={
            BF16: steady(100.0),
            "torch.tensorwise": steady(80.0),
            "torch.tensorwise.fast": steady(75.0),
            "torch.rowwise": steady(400.0, rounds=3),
        },
        products={BF16: steady(90.0, 8), "torch.tensorwise": steady(45.0, 8)},
        casts={"torch.tensorwise": steady(30.0, 8)},
        reasons={"torch.rowwise": "dropped after 3 rounds"},
    )
    result = assembled(
        pair,
        [kernel(name) for name in names],
        times,
        unfit={"torch.rowwise.fast": "worst row 3 is off by 0.5"},
        refused={"mslk.rowwise": "not installed"},
        rounds=16,
        peak=PEAKS["H200"],
    )
    assert result.key == "4096x1024x2048.wgrad"
    assert result.flops == 2 * 4096 * 1024 * 2048
    assert (result.pick, result.pick_exact) == ("torch.tensorwise.fast", "torch.tensorwise")
    assert (result.fastest, result.best_fp8) == ("torch.tensorwise.fast", "torch.tensorwise.fast")
    assert result.refused == {"mslk.rowwise": "not installed"}
    exact = result.row("torch.tensorwise")
    assert exact is not None
    assert (exact.p50_us, exact.product_us, exact.cast_us, exact.rounds) == (80.0, 45.0, 30.0, 16)
    assert (exact.speedup, exact.speedup_low, exact.product_speedup) == (1.25, 1.25, 2.0)
    # (m, n, k) = (1024, 2048, 4096): arithmetic takes longer than the bytes, an fp32 result included.
    assert exact.roofline == pytest.approx(2 * 1024 * 2048 * 4096 / 1979e6 / 45.0)
    bf16 = result.row(BF16)
    assert bf16 is not None
    assert bf16.roofline == pytest.approx(2 * 1024 * 2048 * 4096 / 989e6 / 90.0)
    dropped = result.row("torch.rowwise")
    assert dropped is not None
    assert (dropped.rounds, dropped.speedup, dropped.reason) == (3, None, "dropped after 3 rounds")
    wrong = result.row("torch.rowwise.fast")
    assert wrong is not None
    assert (wrong.vetted, wrong.p50_us, wrong.reason) == (False, None, "worst row 3 is off by 0.5")


def test_a_pair_without_bf16_says_why_and_picks_nothing() -> None:
    times = Times(totals={"torch.rowwise": steady(1.0)}, reasons={BF16: "out of memory"})
    result = assembled(
        Pair(Shape(16, 16, 16), Pass.FWD),
        [kernel(BF16), kernel("torch.rowwise")],
        times,
        unfit={},
        refused={},
        rounds=16,
        peak=None,
    )
    assert result.failed == "out of memory"
    assert result.pick == result.pick_exact == result.fastest == result.best_fp8 == ""


def test_columns_are_read_back_as_rows() -> None:
    rows = [row(BF16, p50_us=1.5), row("torch.rowwise", reason="dropped", rounds=3)]
    assert rows_of(columns_of(rows, KernelRow), KernelRow) == rows
    assert rows_of(columns_of([], KernelRow), KernelRow) == []
