"""What timing and drawn trials need not do: samples of long calls, failures again, sizes that never run."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty_kernels import Double

from loka.kernels.backends.high_precision import HighPrecision
from loka.kernels.preparing import Answer, Prepared, ProductTask
from loka.numerics import OperandStatistics
from loka.probe import sampled, timed_problems, times, trial
from loka.probe.error_log import ErrorLog
from loka.probe.live import LIVE_ROWS, Captured, live_errors, site_generator
from loka.probe.observer import SiteObservation
from loka.probe.sampled import sample_errors
from loka.probe.times import time_kernels
from loka.probe.timing_cost import Spent, compilations
from loka.probe.trial import kernel_trials_of
from loka.probe.trial_tasks import trial_key, trial_problem, trial_tasks, wgrad_rows
from loka.timing import Measured, measure_or_reason
from loka.vocab import Device, Operand, Pass, Site

H200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))
CPU = torch.device("cpu")


# --- the clock --------------------------------------------------------------------------------------------


def test_a_long_call_gets_fewer_samples_and_a_short_one_all() -> None:
    measured = measure_or_reason(
        {"long": lambda: time.sleep(0.01), "short": lambda: None},
        device="cpu",
        rounds=9,
        budget_us=35_000.0,
        least_rounds=2,
    )
    assert len(measured.timings["long"].samples_us) <= 4  # each is at least 10 ms
    assert sum(measured.timings["long"].samples_us) >= 35_000.0
    assert len(measured.timings["short"].samples_us) == 9
    assert not measured.reasons
    assert set(measured.ready_s) == {"long", "short"}
    assert measured.ready_s["long"] >= 0.03  # three warm-up calls
    assert measured.rounds_s >= 0.035


def test_every_call_gets_the_least_samples() -> None:
    measured = measure_or_reason(
        {"a": lambda: time.sleep(0.002)}, device="cpu", rounds=8, budget_us=0.0, least_rounds=5
    )
    assert len(measured.timings["a"].samples_us) == 5


def test_what_fails_has_its_seconds_too() -> None:
    def fails() -> None:
        raise RuntimeError("no")

    measured = measure_or_reason({"a": fails}, device="cpu", rounds=2)
    assert set(measured.ready_s) == {"a"}


# --- where seconds go -------------------------------------------------------------------------------------


def test_seconds_add_up() -> None:
    spent = Spent()
    first = spent.add(Measured(ready_s={"a": 1.0, "b": 0.5}, rounds_s=2.0), making=0.25)
    assert first == "operands 0.25 s; ready in 1.50 s with them (a 1.00, b 0.50); rounds 2.00 s"
    spent.add(Measured(ready_s={"c": 2.0, "d": 1.0}, rounds_s=1.0), shown={"c": "b", "d": "b"})
    assert str(spent) == "operands 0.25 s; ready in 4.50 s with them (b 3.50, a 1.00); rounds 3.00 s"


def test_compilations_are_counted_and_earlier_listeners_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=lambda **told: heard.append(told)))
    before = knobs.compilation.listener
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    with compilations() as seen:
        for hit in (False, True, True):
            knobs.compilation.listener(
                src=SimpleNamespace(name="rows"), times=SimpleNamespace(total=1_500_000), cache_hit=hit
            )
    assert knobs.compilation.listener is before
    assert [told["cache_hit"] for told in heard] == [False, True, True]
    assert str(seen) == "Triton compiled 1 kernels in 1.5 s (rows 1.50) and found 2 in its cache"


def test_a_triton_that_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    with compilations() as seen:
        pass
    assert str(seen) == "Triton compiled 0 kernels in 0.0 s and found 0 in its cache"


# --- what is prepared for trials, and what is not tried -----------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "rows", "tried"),
    [
        (64, 32, [0, 16, 16, 10_000], [16, 8192]),
        (4096, 6144, [6144], [6144]),
        (4096, 32768, [512, 6144], [512, 2048]),
        (2_000_000, 8, [4096], [1024]),
        (5000, 9000, [8192], [7424]),  # 2^26 / 9,000 = 7,456, in whole blocks of 128
    ],
)
def test_rows_of_a_weight_gradient(n: int, k: int, rows: list[int], tried: list[int]) -> None:
    assert wgrad_rows(Site("s", "linear", n, k, True, 1), rows) == tried


def test_trials_of_wide_sites_are_prepared_at_the_sizes_they_run_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 2,048 outputs a trial computes 2,048."""
    ran: set[tuple[int, int, int]] = set()

    class Noting(Double):
        def matmul(self, a: Any, b: Any, *, out_dtype: torch.dtype, bias: Any = None) -> Any:
            ran.add((a.values.shape[0], b.values.shape[0], a.values.shape[1]))
            return torch.zeros(a.values.shape[0], b.values.shape[0], dtype=out_dtype)

    monkeypatch.setattr(trial, "KERNELS", {"triton.rowwise": Noting("triton.rowwise")})
    site, rows = Site("s", "linear", 2176, 2304, True, 128), 128
    tasks = trial_tasks([site], H200, rows_of=lambda _: [rows])
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(*s, generator=generator) for s in ((256, 2304), (2176, 2304), (256, 2176)))
    row_wise = kernel_trials_of(replace(site, rows=LIVE_ROWS), H200, (Pass.FWD, Pass.DGRAD))
    live_errors(Captured(x, w, x.abs().amax(), g, g.abs().amax()), row_wise, site_generator(0, "s", "t"))
    of_wgrad = kernel_trials_of(replace(site, rows=rows), H200, (Pass.WGRAD,))
    seen = Captured(x[:rows], w, x.abs().amax(), g[:rows], g.abs().amax())
    live_errors(seen, of_wgrad, site_generator(0, "s", "t"))
    assert {(t.problem.m, t.problem.n, t.problem.k) for t in tasks} == ran
    assert ran == {(256, 2048, 2304), (256, 2048, 2176), (256, 2048, 128)}
    keys = {trial_key(t.kernel, t.problem) for t in tasks}
    tried = [(t, LIVE_ROWS) for t in row_wise] + [(t, rows) for t in of_wgrad]
    assert {trial_key(t.kernel.name, trial_problem(site, t, m)) for t, m in tried} == keys


def test_a_trial_that_failed_in_a_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(tasks: Any, where: torch.device, *, workers: int) -> Prepared:
        def answer(task: Any) -> Answer:
            fails = isinstance(task, ProductTask) and task.given_scale and task.problem.pass_ is Pass.WGRAD
            return Answer(failed="NVCC compilation failed" if fails else "")

        return Prepared({task: answer(task) for task in tasks}, 1.0, workers)

    kernels = {k.name: k for k in (HighPrecision("high_precision.bf16"), Double("triton.rowwise"))}
    monkeypatch.setattr(times, "prepare_all", prepared)
    monkeypatch.setattr(timed_problems, "KERNELS", kernels)
    monkeypatch.setattr(trial, "KERNELS", kernels)
    monkeypatch.setattr(times, "trial_tasks", lambda sites, device, **k: trial_tasks(sites, H200, **k))
    site = Site("s", "linear", 32, 48, True, 16)
    found = time_kernels([site], Device("cpu", "cpu"), CPU, rows_of=lambda _: [16], workers=3)
    assert set(found.left_out) == {
        f"triton.rowwise:wgrad:32x48x16:{formats}" for formats in ("e4m3 x e4m3", "e5m2 x e4m3")
    }
    text = "failed at wgrad 32x48x16: NVCC compilation failed"
    assert set(found.left_out.values()) == {text}
    assert found.notes.count(f"triton.rowwise {text} (on drawn operands)") == 1


def observed(site: Site, rows: int) -> SiteObservation:
    generator = torch.Generator().manual_seed(0)
    seen = SiteObservation()
    for operand, features in ((Operand.INPUT, site.k), (Operand.GRAD_OUTPUT, site.n)):
        statistics = OperandStatistics.empty(features)
        statistics.add(torch.randn(rows, features, generator=generator))
        seen.operands[operand] = statistics
    return seen


def test_left_out_trials_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site("s", "linear", 32, 48, True, 16)
    here = Device("cpu", "cpu")
    ran: set[tuple[str, Pass, int]] = set()
    real = sampled.live_errors

    def noted(captured: Captured, trials: Any, *args: Any, **options: Any) -> Any:
        ran.update((t.kernel.name, t.pass_, captured.x.shape[0]) for t in trials)
        return real(captured, trials, *args, **options)

    monkeypatch.setattr(sampled, "live_errors", noted)
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))

    def run(left_out: dict[str, str]) -> set[tuple[str, Pass, int]]:
        ran.clear()
        sample_errors(
            [site],
            lambda _: weight,
            {"s": observed(site, 64)},
            ErrorLog(),
            device=here,
            rows_of=lambda _: [16, 32],
            seed=0,
            left_out=left_out,
        )
        return set(ran)

    everything = run({})
    of_wgrad = kernel_trials_of(site, here, (Pass.WGRAD,))
    name = next(t.kernel.name for t in of_wgrad if t.spec_a.is_quantized)
    gone = {trial_key(name, trial_problem(site, t, 16)): "no" for t in of_wgrad if t.kernel.name == name}
    assert everything - run(gone) == {(name, Pass.WGRAD, 16)}
    assert (name, Pass.WGRAD, 32) in everything
    assert everything - run({f"{name}:fwd": "no"}) == {(name, Pass.FWD, LIVE_ROWS)}
