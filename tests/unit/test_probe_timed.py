"""Which products and casts are timed, what is vetted, and what a failing kernel leaves behind.

On the CPU's own kernels and on doubles: which rows exist, never how long they took.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from faulty_kernels import Double, k_major_read_as_mn_major

from loka.kernels import KERNELS, Kernel, device_of, kernel
from loka.kernels.backends.high_precision import HighPrecision
from loka.kernels.preparing import Answer, Prepared, Preparer, ProductTask, prepare_all
from loka.kernels.vetting import cache
from loka.probe import timed_casts, timed_problems, times, trial
from loka.probe.live import LIVE_ROWS, Captured, live_errors, site_generator
from loka.probe.timed_casts import cast_tasks, time_casts
from loka.probe.timed_products import product_tasks, time_products
from loka.probe.times import time_kernels
from loka.probe.trial import Trial, kernel_trials_of, trials_of
from loka.probe.trial_tasks import trial_tasks
from loka.vocab import Device, Format, GemmProblem, Granularity, Operand, OperandSpec, Pass, Site, Support

HERE, WHERE = device_of("cpu"), torch.device("cpu")
DTYPES = {
    Operand.INPUT: torch.bfloat16,
    Operand.WEIGHT: torch.float32,
    Operand.GRAD_OUTPUT: torch.bfloat16,
}
SITES = [Site("s", "linear", 32, 48, True, 16), Site("t", "linear", 1, 32, True, 16)]


def products(sites: list[Site] = SITES) -> Any:
    return time_products(sites, HERE, WHERE, dtypes=DTYPES, on_shape=lambda _: None)


def only(monkeypatch: pytest.MonkeyPatch, *kernels: Kernel) -> None:
    chosen: Mapping[str, Kernel] = {k.name: k for k in kernels}
    monkeypatch.setattr(timed_problems, "KERNELS", chosen)


def test_every_real_kernel_is_vetted_and_timed_for_every_shape_and_pass() -> None:
    before = torch.get_rng_state()
    table, notes = products()
    assert torch.equal(torch.get_rng_state(), before)  # a training that goes on draws as if untimed
    assert notes == []
    assert all(table.vetted)
    found = set(zip(table.m, table.n, table.k, table.pass_, table.kernel, strict=True))
    shapes = [(16, 32, 48, Pass.FWD), (16, 48, 32, Pass.DGRAD), (32, 48, 16, Pass.WGRAD)]
    shapes += [(16, 1, 32, Pass.FWD), (16, 32, 1, Pass.DGRAD), (1, 32, 16, Pass.WGRAD)]
    names = ["high_precision.bf16", "torch.tensorwise", "torch.rowwise", "torch.rowwise.tensorwise_weight"]
    assert found == {
        (*shape, name)
        for shape, name in itertools.product(shapes, names)
        if kernel(name).supports(GemmProblem(*shape), HERE)
    }
    assert len(found) >= 6 * 3


def test_a_weights_gradient_is_timed_in_the_weights_dtype() -> None:
    table, _ = products()
    dtypes = {(p, d) for p, d in zip(table.pass_, table.out_dtype, strict=True)}
    assert dtypes == {(Pass.FWD, Format.BF16), (Pass.DGRAD, Format.BF16), (Pass.WGRAD, Format.FP32)}


class Counted(Double):
    """Remembers what it was asked to compile."""

    def warm_up(self, problem: GemmProblem, where: torch.device) -> None:
        WARMED.append(problem)


WARMED: list[GemmProblem] = []


def test_a_class_of_shapes_is_vetted_once_and_every_shape_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[tuple[str, Pass]] = []
    examine = cache.examine

    def noted(kernel: Kernel, problem: GemmProblem, device: Any) -> Any:
        examined.append((kernel.name, problem.pass_))
        return examine(kernel, problem, device)

    WARMED.clear()
    monkeypatch.setattr(cache, "examine", noted)
    only(monkeypatch, HighPrecision("high_precision.bf16"), Counted("torch.rowwise"), Counted("triton.bf16"))
    # One class: M between 16 and 32, none a multiple of 16.
    rows = (18, 20, 22)
    table, notes = products([Site(f"s{m}", "linear", 32, 48, False, m) for m in rows])
    assert notes == []
    # What PyTorch does by itself is not examined; every other kernel is.
    assert sorted(examined) == sorted(itertools.product(["torch.rowwise", "triton.bf16"], Pass))
    sizes = {(p.pass_, p.m, p.n, p.k) for p in WARMED}
    assert {(Pass.FWD, m, 32, 48) for m in rows} <= sizes
    assert {(Pass.WGRAD, 32, 48, m) for m in rows} <= sizes
    assert len(table) == 3 * 3 * 3


def test_a_kernel_that_is_wrong_or_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def explodes(a: Any, b: Any) -> Any:
        raise RuntimeError("no image for this device")

    block = Granularity.BLOCKWISE_1X128
    only(
        monkeypatch,
        HighPrecision("high_precision.bf16"),
        Double("mslk.blockwise_1x128", product=k_major_read_as_mn_major, granularity=block),
        Double("triton.rowwise", product=explodes),
        Double("torch.rowwise"),
        Unready("deep_gemm.blockwise_1x128"),
    )
    table, notes = products([Site("s", "linear", 256, 384, False, 160)])
    vetted = set(zip(table.kernel, table.vetted, strict=True))
    assert ("torch.rowwise", True) in vetted
    assert ("high_precision.bf16", True) in vetted
    assert ("mslk.blockwise_1x128", True) not in vetted
    assert not {name for name, _ in vetted} & {"triton.rowwise", "deep_gemm.blockwise_1x128"}
    assert all(
        any(note.startswith(start) for note in notes)
        for start in (
            "mslk.blockwise_1x128 failed vetting at fwd 160x256x384: ",
            "triton.rowwise failed vetting at fwd 160x256x384: raised RuntimeError: no image",
            "triton.rowwise failed at fwd 160x256x384: no image for this device",
            "deep_gemm.blockwise_1x128 failed at wgrad 256x384x160: no compiler",
        )
    ), notes


class Unready(Double):
    """Right where it is examined; what it should compile for the shape fails."""

    def warm_up(self, problem: GemmProblem, where: torch.device) -> None:
        if problem.out_dtype is Format.FP32 or problem.pass_ is not Pass.WGRAD:
            raise OSError("no compiler")


def test_notes_are_one_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Double("mslk.rowwise", product=lambda a, b: torch.zeros(a.values.shape[0], b.values.shape[0]))
    only(monkeypatch, HighPrecision("high_precision.bf16"), wrong)
    _, notes = products([Site(f"s{m}", "linear", 32, 48, False, m) for m in (18, 20, 22)])
    assert len(notes) == 3  # one a pass
    assert all(note.startswith("mslk.rowwise failed vetting at ") for note in notes)


def casts(sites: list[Site]) -> Any:
    return time_casts(sites, HERE, WHERE, dtypes=DTYPES, on_shape=lambda _: None)


def test_casts_are_timed_alone_and_in_pairs_that_share_a_read() -> None:
    table, notes = casts(SITES)
    assert notes == []
    sets = {(r, c, tuple(s)) for r, c, s in zip(table.rows, table.columns, table.specs, strict=True)}
    upright = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)
    turned = upright.with_transposed(True)
    assert (16, 48, (upright,)) in sets
    assert (16, 48, (upright, turned)) in sets
    pairs = [specs for _, _, specs in sets if len(specs) == 2]
    assert pairs
    assert all(a.recipe_key == b.recipe_key and a.transposed is not b.transposed for a, b in pairs)
    # Every single spec of a pair stands alone too, so the planner can price what was not timed together.
    assert {(r, c, (s,)) for r, c, specs in sets for s in specs} <= sets


def test_a_pair_that_was_not_timed_costs_the_sum_of_its_casts() -> None:
    table, _ = casts(SITES[:1])
    from loka.dispatch.planner.facts import CastTimes, _casts

    times = CastTimes(_casts(table, HERE.name))
    tensorwise = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)
    rowwise = OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16).with_transposed(True)
    both = times.time_us(16, 48, frozenset((tensorwise, rowwise)))
    alone = [times.time_us(16, 48, frozenset((spec,))) for spec in (tensorwise, rowwise)]
    assert None not in alone
    assert both == pytest.approx(sum(a for a in alone if a is not None))


def test_a_cast_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    made = timed_casts.cast

    def cast(x: torch.Tensor, specs: tuple[OperandSpec, ...]) -> Any:
        if any(spec.granularity is Granularity.ROWWISE for spec in specs):
            raise RuntimeError("out of memory")
        return made(x, specs)

    monkeypatch.setattr(timed_casts, "cast", cast)
    table, notes = casts(SITES[:1])
    assert all(s.granularity is Granularity.TENSORWISE for specs in table.specs for s in specs)
    assert "cast of 16x48 to e4m3.rowwise failed: out of memory" in notes
    assert len(notes) == len(set(notes))


def test_an_emulated_twin_stands_for_what_nobody_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from loka.kernels.backends.torch_fnuz import FnuzScaledMM

    monkeypatch.setattr(FnuzScaledMM, "supports", lambda *_: Support.yes())
    trials = trials_of(Site("s", "linear", 32, 48, True, 16), HERE)
    fnuz = [t for t in trials if t.spec_a.format is Format.E4M3FNUZ]
    assert {(t.pass_, t.spec_a.granularity) for t in fnuz} >= {
        (p, g) for p in Pass for g in (Granularity.TENSORWISE, Granularity.ROWWISE)
    }
    assert all(t.kernel.emulated for t in fnuz)


def test_every_unverified_kernel_has_a_twin() -> None:
    from loka.kernels import emulated_twin

    unverified = [k for k in KERNELS.values() if not k.verified]
    assert unverified
    assert all(emulated_twin(k.name).emulated for k in unverified)


def test_bf16_is_tried_once() -> None:
    h200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))
    trials = trials_of(SITES[0], h200)
    plain = [(t.pass_, t.kernel.name) for t in trials if not t.spec_a.is_quantized]
    assert plain == [(p, "high_precision.bf16") for p in Pass]


def test_a_kernel_is_not_run_on_a_sample_that_its_rules_forbid() -> None:
    """A last batch of fewer rows: some kernels end the process at shapes that they do not take."""
    asked: list[GemmProblem] = []

    class Picky(Double):
        def supports(self, problem: GemmProblem, device: Device) -> Support:
            asked.append(problem)
            good = problem.m % 16 == 0
            return Support.yes() if good else Support.no(f"needs M % 16 == 0, got M={problem.m}")

        def matmul(self, a: Any, b: Any, *, out_dtype: torch.dtype, bias: Any = None) -> Any:
            assert a.values.shape[0] % 16 == 0
            return Double.matmul(self, a, b, out_dtype=out_dtype, bias=bias)

    kernel_ = Picky("torch.rowwise")
    spec_a, spec_b = kernel_.operands(GemmProblem(32, 24, 48))
    trial = Trial(Pass.FWD, spec_a, spec_b, kernel_)
    x, w = (torch.randn(r, 48, generator=torch.Generator().manual_seed(r)) for r in (32, 24))
    whole = live_errors(Captured(x, w, x.abs().amax()), [trial], site_generator(0, "s", "t"))
    last = live_errors(Captured(x[:17], w, x.abs().amax()), [trial], site_generator(0, "s", "t"))
    assert bool(whole.isfinite().all())
    assert bool(last.isnan().all())
    assert [(p.m, p.n, p.k, p.pass_) for p in asked] == [(32, 24, 48, Pass.FWD), (17, 24, 48, Pass.FWD)]


def test_what_processes_prepared_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes; then the parent may only time."""

    def prepared(*args: Any, **options: Any) -> Prepared:
        found = prepare_all(*args, **options)
        monkeypatch.setattr(Preparer, "carry_out", None)
        return found

    monkeypatch.setattr(times, "prepare_all", prepared)
    found = time_kernels(SITES, HERE, WHERE, rows_of=lambda _: [16, 18], workers=1)
    products, casts = product_tasks(at_rows(16, 18), HERE, dtypes=DTYPES), casts_at(16, 18)
    assert len(found.products) == len(products)
    assert len(found.casts) == len(casts)
    assert all(found.products.vetted)
    total = len(products) + len(casts)
    assert f"{total} of {total} products and casts were compiled and vetted by 1 processes" in found.notes[-1]
    assert found.left_out == {}


def at_rows(*rows: int) -> list[Site]:
    return [replace(site, rows=m) for site in SITES for m in rows]


def casts_at(*rows: int) -> list[Any]:
    return cast_tasks(at_rows(*rows), HERE, dtypes=DTYPES)


def test_what_ended_a_process_is_not_run_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fatal(Double):
        def matmul(self, a: Any, b: Any, *, out_dtype: torch.dtype, bias: Any = None) -> Any:
            raise AssertionError("it was run")

    def prepared(tasks: Any, where: torch.device, *, workers: int) -> Prepared:
        def answer(task: Any) -> Answer:
            if isinstance(task, ProductTask) and task.kernel == "mslk.rowwise":
                return Answer(failed="ended the process that tried it (exit code -11)", ended=True)
            if isinstance(task, ProductTask) and task.kernel == "triton.rowwise":
                return Answer(unfit="worst row 3 is off by 1")
            return Answer()

        return Prepared({task: answer(task) for task in tasks}, 1.0, workers)

    monkeypatch.setattr(times, "prepare_all", prepared)
    only(
        monkeypatch,
        HighPrecision("high_precision.bf16"),
        Double("triton.rowwise"),
        Fatal("mslk.rowwise"),
    )
    found = time_kernels(SITES[:1], HERE, WHERE, rows_of=lambda _: [16], workers=3)
    vetted = set(zip(found.products.kernel, found.products.vetted, strict=True))
    assert vetted == {("high_precision.bf16", True), ("triton.rowwise", False)}
    assert set(found.left_out) == {f"mslk.rowwise:{p}" for p in Pass}
    assert found.left_out["mslk.rowwise:fwd"].startswith("failed at fwd 16x32x48: ended the process")
    assert found.notes.count("mslk.rowwise " + found.left_out["mslk.rowwise:fwd"]) == 1
    assert "triton.rowwise failed vetting at fwd 16x32x48: worst row 3 is off by 1" in found.notes


def test_a_cast_that_failed_in_a_process_is_a_note() -> None:
    tasks = cast_tasks(SITES[:1], HERE, dtypes=DTYPES)
    failed = tasks[0]
    answers = {task: Answer(failed="no compiler" if task == failed else "") for task in tasks}
    options: Any = {"dtypes": DTYPES, "on_shape": lambda _: None, "prepared": Prepared(answers)}
    table, notes = time_casts(SITES[:1], HERE, WHERE, **options)
    shown = " and ".join(map(str, failed.specs))
    assert notes == [f"cast of {failed.rows}x{failed.columns} to {shown} failed: no compiler"]
    assert len(table) == len(tasks) - 1


def test_the_trials_on_drawn_operands_are_prepared_as_they_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what `live_errors` really hands to the kernels and the cast engine."""
    ran: list[tuple[str, Any, Any, torch.dtype]] = []

    class Noting(Double):
        def matmul(self, a: Any, b: Any, *, out_dtype: torch.dtype, bias: Any = None) -> Any:
            ran.append((self.name, described(a), described(b), out_dtype))
            return Double.matmul(self, a, b, out_dtype=out_dtype, bias=bias)

    def described(q: Any) -> tuple[Any, ...]:
        return (tuple(q.values.shape), q.values.stride(), q.values.dtype, q.spec)

    kernels = [
        Noting("triton.tensorwise", granularity=Granularity.TENSORWISE),
        Noting("triton.rowwise"),
        HighPrecision("high_precision.bf16"),
    ]
    monkeypatch.setattr(trial, "KERNELS", {k.name: k for k in kernels})
    h200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))
    site, rows = Site("s", "linear", 300, 48, True, 320), 320
    tasks = trial_tasks([site, site], h200, rows_of=lambda _: [rows])
    by_name = {k.name: k for k in kernels}
    for task in tasks:
        assert Preparer(WHERE).carry_out(task, by_name[task.kernel]) == Answer()
    prepared, ran[:] = list(ran), []
    x, w, g = (
        torch.randn(*s, generator=torch.Generator().manual_seed(0))
        for s in ((rows, 48), (300, 48), (rows, 300))
    )
    captured = Captured(x, w, x.abs().amax(), g, g.abs().amax())
    trials = kernel_trials_of(replace(site, rows=LIVE_ROWS), h200, tuple(Pass))
    live_errors(captured, [t for t in trials if t.spec_a.is_quantized], site_generator(0, "s", "t"))
    assert len(ran) == len(tasks) == 2 * 5
    assert set(prepared) == set(ran)
