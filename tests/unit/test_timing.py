"""The clock's arithmetic, on given samples; nothing here asserts a time."""

from __future__ import annotations

import time

import pytest
import torch

from loka.errors import UsageError
from loka.timing import (
    PEAKS,
    DeviceLostError,
    Timing,
    attempt,
    bound_us,
    clock_overhead_us,
    fraction_of_roofline,
    measure,
    measure_or_reason,
    paired_ratio,
    peak_of,
)
from loka.vocab import Format, GemmProblem

CPU = torch.device("cpu")


def test_quantiles() -> None:
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert timing.p50_us == 3.0
    assert timing.quantile(0.1) == 1.0
    assert timing.quantile(0.9) == 5.0


def test_halves_are_the_even_and_the_odd_rounds() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 5.0), captured=True)
    assert timing.half(0) == Timing((1.0, 3.0, 5.0), captured=True)
    assert timing.half(1) == Timing((2.0, 4.0), captured=True)
    with pytest.raises(UsageError, match="halves 0 and 1"):
        timing.half(2)
    with pytest.raises(UsageError, match="at least 2 samples, got 1"):
        Timing((1.0,)).half(0)


def test_ratio_is_paired_and_its_interval_comes_from_order_statistics() -> None:
    base = Timing(tuple(float(10 * (i + 1)) for i in range(16)))  # a drift that both candidates meet
    other = Timing(tuple(v / 2 for v in base.samples_us))
    ratio = paired_ratio(base, other)
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    assert ratio.is_win
    noisy = Timing(tuple(v * (0.5 if i % 2 else 2.0) for i, v in enumerate(base.samples_us)))
    assert not paired_ratio(base, noisy).is_win


def test_ratio_of_different_rounds_is_refused() -> None:
    with pytest.raises(UsageError, match="same rounds"):
        paired_ratio(Timing((1.0, 2.0)), Timing((1.0,)))


def test_every_candidate_is_called_in_every_round() -> None:
    calls: list[str] = []
    timings = measure(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, device="cpu", rounds=4
    )
    assert len(timings["a"].samples_us) == len(timings["b"].samples_us) == 4
    assert not timings["a"].captured
    assert "".join(calls[6:]) == "abbaabba"  # after three warm-up calls each, turns rotate
    with pytest.raises(UsageError, match="at least 1"):
        measure({}, device="cpu", rounds=0)


def test_what_a_candidate_raises_is_raised_by_measure() -> None:
    def broken() -> None:
        raise RuntimeError("no such tile")

    with pytest.raises(RuntimeError, match="no such tile"):
        measure({"a": lambda: None, "b": broken}, device="cpu", rounds=2)


def test_a_candidate_that_fails_costs_the_others_nothing() -> None:
    calls: list[str] = []

    def fails_late() -> None:
        calls.append("late")
        if len(calls) == 6:  # three warm-up calls, then the third round
            raise AssertionError("\n  k must be aligned\nand more")

    def fails_at_once() -> None:
        raise ValueError

    measured = measure_or_reason(
        {"at once": fails_at_once, "late": fails_late, "good": lambda: None}, device="cpu", rounds=5
    )
    assert set(measured.timings) == {"good"}
    assert len(measured.timings["good"].samples_us) == 5
    assert measured.reasons == {"at once": "raised ValueError", "late": "k must be aligned"}
    with pytest.raises(UsageError, match="measure_or_reason"):
        measure_or_reason({}, device="cpu", rounds=0)


def test_a_much_slower_candidate_is_dropped_unless_it_is_kept() -> None:
    pauses = {"fast": 0.0, "slow": 0.05, "base": 0.05}
    candidates = {name: (lambda s=s: time.sleep(s)) for name, s in pauses.items()}
    measured = measure_or_reason(
        candidates, device="cpu", rounds=5, drop_slower_than=3.0, drop_after=2, keep=("base",)
    )
    assert {name: len(t.samples_us) for name, t in measured.timings.items()} == {
        "fast": 5,
        "slow": 2,
        "base": 5,
    }
    assert set(measured.reasons) == {"slow"}
    assert measured.reasons["slow"].startswith("dropped after 2 rounds: ")
    all_kept = measure_or_reason(candidates, device="cpu", rounds=3)
    assert not all_kept.reasons


def test_errors_that_are_no_failures_of_a_candidate_go_through() -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt("a", stopped, where=CPU)


def test_a_long_failure_is_one_short_line() -> None:
    def wordy() -> None:
        raise RuntimeError("x" * 1000 + "\nsecond line")

    result, reason = attempt("a", wordy, where=CPU)
    assert result is None
    assert reason == "x" * 297 + "..."
    assert attempt("a", lambda: 7, where=CPU) == (7, "")


def test_a_device_that_answers_no_more_is_told_with_the_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(where: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    with pytest.raises(DeviceLostError, match="`some kernel` left the GPU unusable") as lost:
        attempt("some kernel", lambda: None, where=torch.device("cuda"))
    assert lost.value.culprit == "some kernel"
    assert "illegal memory access" in lost.value.reason


def test_a_failure_that_the_device_survives_is_only_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where=None: None)

    def refused() -> None:
        raise RuntimeError("invalid argument")

    assert attempt("a", refused, where=torch.device("cuda")) == (None, "invalid argument")


def test_the_clock_tells_what_nothing_costs() -> None:
    assert clock_overhead_us(device="cpu", rounds=3) >= 0.0


def test_roofline_by_hand() -> None:
    peak = PEAKS["H200"]
    assert peak_of("NVIDIA H200") == peak
    assert peak_of("some GPU") is None
    large = GemmProblem(8192, 8192, 8192)
    assert bound_us(large, peak) == pytest.approx(2 * 8192**3 / 1979e6)
    skinny = GemmProblem(1_000_000, 16, 16, a_format=Format.BF16, b_format=Format.BF16)
    moved = (1_000_000 + 16) * 16 * 2 + 1_000_000 * 16 * 2
    assert bound_us(skinny, peak) == pytest.approx(moved / 4800e3)


def test_fraction_of_the_roofline() -> None:
    peak = PEAKS["H200"]
    large = GemmProblem(8192, 8192, 8192)
    least = 2 * 8192**3 / 1979e6
    assert fraction_of_roofline(large, peak, 2 * least) == pytest.approx(0.5)
    # 1024 x 1024 x 16 in FP8 with an fp32 result is bound by memory, and the result is most of it.
    thin = GemmProblem(1024, 1024, 16)
    moved = 2 * 1024 * 16 + 4 * 1024 * 1024
    assert fraction_of_roofline(thin, peak, moved / 4800e3, out_bytes=4) == pytest.approx(1.0)
    with pytest.raises(UsageError, match="must be above 0"):
        fraction_of_roofline(large, peak, 0.0)
