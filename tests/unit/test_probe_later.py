"""What waits for a plain step gives what it would have given at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import loka
from loka.artifacts.profile import ErrorTable
from loka.kernels import device_of
from loka.numerics import Covariance, Marginals, OperandStatistics
from loka.probe import later as later_module
from loka.probe.error_log import ErrorLog
from loka.probe.later import LaterWork
from loka.probe.live import LIVE_OUTPUTS, Captured, live_errors, site_generator
from loka.probe.loop import Loop
from loka.probe.seen import Sampled
from loka.probe.trial import trials_of
from loka.vocab import Pass, Site


def captured_of(n: int, k: int) -> Captured:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(300, k, generator=generator)
    g = torch.randn(300, n, generator=generator) * 1e-3
    w = torch.randn(n, k, generator=generator)
    return Captured(x, w, x.abs().amax(), g, g.abs().amax())


def test_the_weight_is_that_of_the_observed_step() -> None:
    """Whether all of it is looked at or a part: the optimizer may change it in between."""
    cpu = torch.device("cpu")
    log = ErrorLog()
    later = LaterWork(log, cpu)
    wanted = {}
    for name, n, k in (("small", 32, 48), ("wide", LIVE_OUTPUTS + 128, 16), ("long", 16, LIVE_OUTPUTS + 256)):
        captured = captured_of(n, k)
        trials = trials_of(Site(name, "linear", n, k, False, 300), device_of(cpu))
        wanted[name] = trials, live_errors(captured, trials, site_generator(0, name, "live/1"))
        later.add_trials(name, trials, captured, site_generator(0, name, "live/1"))
        captured.w.mul_(0)
    assert len(later) == 9
    assert later.run(1)
    assert len(later) == 8
    later.run()
    assert not later.run(1)
    log.collect()
    direct = ErrorLog()
    for name, (trials, values) in wanted.items():
        direct.add(name, trials, values)
    direct.collect()
    assert log.table() == direct.table()
    assert set(log.table().pass_) == set(Pass)


def test_passes_that_did_not_run_wait_for_nothing() -> None:
    captured = captured_of(32, 48)
    captured.g = captured.g_amax = None
    later = LaterWork(ErrorLog(), torch.device("cpu"))
    trials = trials_of(Site("s", "linear", 32, 48, False, 300), device_of(torch.device("cpu")))
    later.add_trials("s", trials, captured, site_generator(0, "s", "t"))
    assert len(later) == 1


def test_a_queue_that_holds_too_much_is_worked_off_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later_module, "QUEUE_BYTES", 1)
    later = LaterWork(ErrorLog(), torch.device("cpu"))
    trials = trials_of(Site("s", "linear", 32, 48, False, 300), device_of(torch.device("cpu")))
    later.add_trials("s", trials, captured_of(32, 48), site_generator(0, "s", "t"))
    assert len(later) == 1


def test_a_sample_is_of_the_observed_step_and_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operands share it: two sites with one input."""
    x = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    wanted = Covariance.of(x), Marginals.of(x)
    sample = Sampled.of(x, None)
    fitted: list[int] = []
    of = Covariance.of
    monkeypatch.setattr(Covariance, "of", lambda x: fitted.append(1) or of(x))  # type: ignore[func-returns-value]
    first, second = OperandStatistics.empty(7), OperandStatistics.empty(7)
    later = LaterWork(ErrorLog(), torch.device("cpu"))
    later.add_distributions(first, sample)
    later.add_distributions(second, sample)
    x.zero_()
    assert first.covariance is None
    assert later.run(1)
    assert first.covariance is not None
    assert second.covariance is None
    later.run()
    assert len(fitted) == 1
    for known in (first, second):
        assert known.covariance is not None
        assert known.marginals is not None
        for found, direct in zip((known.covariance, known.marginals), wanted, strict=True):
            for name, tensor in direct.tensors().items():
                assert torch.equal(found.tensors()[name], tensor), name


def a_training(*, resumed_at: int | None = None) -> tuple[ErrorTable, dict[str, torch.Tensor]]:
    """Errors and statistics of 40 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(40, 64, 32)
    probe = loka.Probe(model, every=5, live_every=2, max_overhead=None)
    for part in (batches[:resumed_at], batches[resumed_at:]) if resumed_at else (batches,):
        state = probe.state_dict() if resumed_at else {}
        probe = loka.Probe(model, every=5, live_every=2, max_overhead=None)
        if "sites" in state:
            probe.load_state_dict(state)
        with probe:
            for x in part:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                probe.step()
    errors: ErrorTable = probe.errors
    learned = {
        f"{site} {operand} {name}": tensor
        for site, operands in probe.statistics.items()
        for operand, known in operands.items()
        for name, tensor in known.tensors().items()
    }
    return errors, learned


@pytest.mark.parametrize("resumed_at", [None, 12])
def test_a_training_gives_the_same_later_as_at_once(
    monkeypatch: pytest.MonkeyPatch, resumed_at: int | None
) -> None:
    """Weights move between the observed step and the trial, and a resume comes in between."""
    at_once, learned_at_once = a_training()
    ran: list[int | None] = []
    run = LaterWork.run
    monkeypatch.setattr(Loop, "puts_off", property(lambda self: True))

    def watched(self: LaterWork, most: int | None = None) -> bool:
        ran.append(most)
        return run(self, most)

    monkeypatch.setattr(LaterWork, "run", watched)
    later, learned = a_training(resumed_at=resumed_at)
    assert 1 in ran
    assert later == at_once
    assert len(later) > 0
    assert learned.keys() == learned_at_once.keys()
    assert any("marginals" in name for name in learned)
    for name, tensor in learned_at_once.items():
        torch.testing.assert_close(
            learned[name], tensor, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_no_observed_step_waits_for_numbers_but_the_last_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has arrived until somebody waits: then an observed step would lose the host's lead."""
    monkeypatch.setattr(Loop, "puts_off", property(lambda self: True))
    monkeypatch.setattr(ErrorLog, "_arrived", lambda self: 0)
    collect, waited, told = ErrorLog.collect, [], []

    def watched(self: ErrorLog, *, wait: bool = True) -> int:
        if wait:
            waited.append(probe._schedule.seen + 1)
        return collect(self, wait=wait)

    monkeypatch.setattr(ErrorLog, "collect", watched)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    probe = loka.Probe(
        model, every=4, live_every=3, max_overhead=None, on_observed=lambda probe, step: told.append(step)
    )
    with probe:
        for _ in range(29):
            model(torch.randn(8, 16)).square().mean().backward()
            probe.step()
        in_the_loop = list(waited)
    # Steps 4, 16 and 28 end a round; 8 and 20 are the next ones, 28 is told at the end.
    assert in_the_loop == [8, 20]
    assert told == [4, 16, 28]


def test_numbers_are_told_as_soon_as_all_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "puts_off", property(lambda self: True))
    told: list[tuple[int, int]] = []
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def on_observed(probe: loka.Probe, step: int) -> None:
        told.append((step, probe._schedule.seen))

    with loka.Probe(model, every=30, live_every=3, max_overhead=None, on_observed=on_observed) as probe:
        for _ in range(59):
            model(torch.randn(8, 16)).square().mean().backward()
            probe.step()
    ((step, seen),) = told
    assert step == 30
    assert 30 < seen < 59


@pytest.mark.parametrize("live_every", [1, 2])
def test_a_round_is_told_with_all_of_its_errors(monkeypatch: pytest.MonkeyPatch, live_every: int) -> None:
    """Also where there were too few plain steps for what it left."""
    monkeypatch.setattr(Loop, "puts_off", property(lambda self: True))
    told: list[tuple[int, int]] = []
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    def on_observed(probe: loka.Probe, step: int) -> None:
        told.append((step, len(set(probe.errors.site))))
        assert len(probe._loop._later) == 0

    with loka.Probe(
        model, every=4, live_every=live_every, max_overhead=None, on_observed=on_observed
    ) as probe:
        for _ in range(17):
            model(torch.randn(8, 16)).square().mean().backward()
            probe.step()
    assert told[0] == (4, 6)
    assert all(sites == 6 for _, sites in told)
