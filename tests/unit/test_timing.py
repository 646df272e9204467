"""The clock's arithmetic, on given samples; nothing here asserts a time."""

from __future__ import annotations

import pytest

from loka.errors import UsageError
from loka.timing import PEAKS, Timing, bound_us, measure, paired_ratio, peak_of
from loka.vocab import Format, GemmProblem


def test_quantiles() -> None:
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert timing.p50_us == 3.0
    assert timing.quantile(0.1) == 1.0
    assert timing.quantile(0.9) == 5.0


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
    assert "".join(calls[6:]) == "abbaabba"  # after three warm-up calls each, turns rotate
    with pytest.raises(UsageError, match="at least 1"):
        measure({}, device="cpu", rounds=0)


def test_roofline_by_hand() -> None:
    peak = PEAKS["H200"]
    assert peak_of("NVIDIA H200") == peak
    assert peak_of("some GPU") is None
    large = GemmProblem(8192, 8192, 8192)
    assert bound_us(large, peak) == pytest.approx(2 * 8192**3 / 1979e6)
    skinny = GemmProblem(1_000_000, 16, 16, a_format=Format.BF16, b_format=Format.BF16)
    moved = (1_000_000 + 16) * 16 * 2 + 1_000_000 * 16 * 2
    assert bound_us(skinny, peak) == pytest.approx(moved / 4800e3)
