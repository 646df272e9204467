"""The clock of observed steps, on times that are set by hand."""

from __future__ import annotations

import pytest
import torch

from loka.probe import overhead
from loka.probe.overhead import StepClock, StepKind, rounded_up

P, L, F, X, K = StepKind.PLAIN, StepKind.OBSERVED, StepKind.FULL, StepKind.OTHER, StepKind.LATER


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: hand.now)
    return hand


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1.0
        self.steps = StepClock(torch.device("cpu"))
        self.steps.mark(None)

    def pass_(self, kind: StepKind, us: float, times: int = 1) -> None:
        for _ in range(times):
            self.now += us / 1e6
            self.steps.mark(kind)


def test_costs_are_means_and_the_first_observed_step_is_left_out(clock: Hand) -> None:
    clock.pass_(X, 9e6)
    for kind, us in ((F, 1e6), (L, 300), (L, 500), (L, 400)):
        clock.steps.turn()
        clock.pass_(kind, us)
        clock.pass_(P, 100, 12)
    clock.steps.read_all()
    got = clock.steps.overhead(every=50, live_every=10)
    assert got is not None
    assert got.plain_step_us == pytest.approx(100)
    assert got.observed_step_us == pytest.approx(400)
    assert got.full_step_us is None  # there was but the one that compiles
    assert got.percent == pytest.approx(100 * 300 / (50 * 100))
    assert clock.steps.needed_every(0.01) == pytest.approx(300, abs=1)


def test_where_every_observed_step_is_full_their_mean_counts(clock: Hand) -> None:
    for us in (1e6, 300, 500):
        clock.pass_(F, us)
        clock.pass_(P, 100, 12)
    clock.steps.read_all()
    got = clock.steps.overhead(every=50, live_every=1)
    assert got is not None
    assert got.full_step_us == pytest.approx(400)
    assert got.percent == pytest.approx(100 * 300 / (50 * 100))


def test_the_first_observed_step_after_a_resume_is_left_out_too(clock: Hand) -> None:
    for us in (5e6, 300, 300):
        clock.pass_(L, us)
        clock.pass_(P, 100, 12)
    clock.steps.read_all()
    assert clock.steps.needed_every(0.01) == pytest.approx(200, abs=1)


def test_trials_beside_plain_steps_count_but_for_the_first_round(clock: Hand) -> None:
    """Two pieces of 20 us an observed step that itself costs 200 us more; the first round compiles."""
    clock.pass_(F, 1e6)
    clock.pass_(K, 5e5, 60)
    for _ in range(4):
        clock.pass_(P, 100, 12)
        clock.pass_(L, 300)
        clock.pass_(K, 120, 2)
    clock.steps.read_all()
    assert clock.steps.needed_every(0.01) == pytest.approx(200 + 2 * 20, abs=1)


def test_nothing_is_decided_before_three_observed_and_ten_plain_steps(clock: Hand) -> None:
    clock.pass_(F, 1000)
    clock.pass_(L, 1000)
    clock.pass_(P, 10, 20)
    clock.steps.read_all()
    assert clock.steps.needed_every(0.01) == 0
    clock.pass_(L, 1000)
    clock.steps.read_all()
    assert clock.steps.needed_every(0.01) == pytest.approx(990 / 0.1, abs=1)


def test_times_are_read_one_observed_step_later(clock: Hand) -> None:
    clock.pass_(P, 10, 5)
    clock.steps.turn()
    assert clock.steps.median_plain_us() == 0
    clock.steps.turn()
    assert clock.steps.median_plain_us() == pytest.approx(10)


def test_a_slow_evaluation_between_steps_does_not_move_the_plain_step(clock: Hand) -> None:
    for _ in range(10):
        clock.pass_(P, 10, 9)
        clock.pass_(P, 1e6)
    clock.steps.read_all()
    assert clock.steps.median_plain_us() == pytest.approx(10)


def test_only_so_many_plain_steps_are_kept(clock: Hand) -> None:
    clock.pass_(P, 10, 5000)
    assert len(clock.steps._new) == 64
    clock.pass_(F, 70)  # measured from the mark before it all the same
    clock.steps.read_all()
    got = clock.steps.overhead(every=10, live_every=1)
    assert got is not None
    assert got.full_step_us == pytest.approx(70)


def test_no_overhead_is_said_without_an_observed_step(clock: Hand) -> None:
    clock.pass_(P, 10, 50)
    clock.steps.read_all()
    assert clock.steps.overhead(every=10, live_every=1) is None


@pytest.mark.parametrize(("every", "want"), [(7, 7), (99, 99), (101, 110), (240, 240), (1234, 1300)])
def test_numbers_are_rounded_up(every: int, want: int) -> None:
    assert rounded_up(every) == want
