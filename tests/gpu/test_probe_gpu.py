"""Probe's numbers on a GPU: they are copied without a wait, and read only when they have arrived."""

from __future__ import annotations

import math

import pytest
import torch

import loka
from loka.kernels import device_of
from loka.numerics.exact import exact_products
from loka.probe.error_log import ErrorLog
from loka.probe.overhead import StepClock, StepKind
from loka.probe.timed_casts import time_casts
from loka.probe.timed_products import time_products
from loka.probe.trial import Trial, kernel_trials_of, trials_of
from loka.vocab import Format, Operand, Pass, Site

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

_CYCLES = 400_000_000  # about 0.2 s


def one_trial() -> Trial:
    return trials_of(Site("s", "linear", 16, 32, True, 8), device_of("cpu"))[0]


def test_the_log_waits_for_the_copy_and_for_nothing_else() -> None:
    row = torch.tensor([[4.0, 0.04, 0.1, 0.2, 0.3, 0.01, 0.02, 0.0, 0.0]], dtype=torch.float64)
    first, second = row.cuda(), (row * 2).cuda()
    second[:, 1] = 0.02
    log, trial = ErrorLog(), one_trial()
    log.add("warm", [trial], first)  # what pinning memory for the first time waits for is over
    log.collect()
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES)
    log.add("s", [trial], second)
    assert not torch.cuda.current_stream().query(), "adding waited for the GPU"
    log.collect()
    table = log.table()
    place = table.site.index("s")
    # Not waited for, the host's memory would hold the row before it, or nothing.
    assert table.sqnr_db[place] == pytest.approx(10 * math.log10(8.0 / 0.02), rel=1e-12)
    assert table.row_max[place] == pytest.approx(0.6, rel=1e-12)
    assert table.observations[place] == 1


def test_products_and_casts_of_a_site_are_vetted_and_timed() -> None:
    device, where = device_of("cuda"), torch.device("cuda")
    sites = [Site("s", "linear", 256, 512, True, 1024)]
    dtypes = {
        Operand.INPUT: torch.bfloat16,
        Operand.WEIGHT: torch.float32,
        Operand.GRAD_OUTPUT: torch.bfloat16,
    }
    table, notes = time_products(sites, device, where, dtypes=dtypes, on_shape=lambda _: None)
    timed = {(p, n): v for p, n, v in zip(table.pass_, table.kernel, table.vetted, strict=True)}
    for name in ("high_precision.bf16", "torch.tensorwise", "torch.rowwise", "triton.rowwise", "triton.bf16"):
        assert all(timed[pass_, name] for pass_ in Pass), (name, notes)
    assert {d for p, d in zip(table.pass_, table.out_dtype, strict=True) if p is Pass.WGRAD} == {Format.FP32}
    assert all(0 < low <= mid <= high for low, mid, high in zip(
        table.p10_us, table.p50_us, table.p90_us, strict=True
    ))  # fmt: skip
    casts, failed = time_casts(sites, device, where, dtypes=dtypes, on_shape=lambda _: None)
    assert failed == []
    assert {(r, c) for r, c in zip(casts.rows, casts.columns, strict=True)} == {
        (1024, 512),
        (256, 512),
        (1024, 256),
    }
    assert any(len(specs) == 2 for specs in casts.specs)


def test_the_clock_marks_without_a_wait_and_reads_later() -> None:
    clock = StepClock(torch.device("cuda"))
    clock.mark(None)
    torch.cuda._sleep(_CYCLES)
    clock.mark(StepKind.PLAIN)
    clock.mark(StepKind.FULL)
    assert not torch.cuda.current_stream().query(), "marking waited for the GPU"
    clock.turn()
    assert not torch.cuda.current_stream().query(), "turning waited for the GPU"
    assert clock.median_plain_us() == 0
    clock.read_all()
    got = clock.overhead(every=10, live_every=1)
    assert got is not None
    assert got.plain_step_us > 50_000
    assert got.full_step_us is not None
    assert got.full_step_us < got.plain_step_us


def test_references_are_fp32_whatever_the_process_allows() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, w = (torch.randn(s, 2048, generator=generator, device="cuda") for s in (256, 512))
    exact = x.double() @ w.double().t()

    def error() -> float:
        return ((x @ w.t()).double() - exact).norm().item() / exact.norm().item()

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cuda", torch.bfloat16), exact_products("cuda"):
            assert error() < 1e-5
        assert error() > 1e-5, "TF32 was not in use, so nothing was tested"
    finally:
        torch.set_float32_matmul_precision(before)


def test_every_usable_kernel_has_a_sampled_row_with_an_interval() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)
    ).cuda()  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with loka.Probe(model, every=2, live_every=1, max_overhead=None) as probe:
        for step in range(20):
            x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(step)).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.step()
    profile = probe.profile(time_kernels=False, rows=[2048])
    errors = profile.errors
    drawn = [i for i in range(len(errors)) if errors.source[i] == "sampled" and errors.site[i] == "2"]
    site = Site("2", "linear", 256, 256, True, 1024)
    for pass_ in Pass:
        wanted = {t.kernel.name for t in kernel_trials_of(site, device_of("cuda"), (pass_,))}
        found = {errors.kernel[i] for i in drawn if errors.pass_[i] is pass_}
        noted = {note.partition(" ")[0] for note in profile.notes if "failed on drawn operands" in note}
        assert wanted - noted == found - noted
        assert {"torch.rowwise", "torch.tensorwise"} <= found
    assert {errors.m[i] for i in drawn if errors.pass_[i] is Pass.WGRAD} == {1024, 2048}
    assert all(3 <= errors.observations[i] <= 20 for i in drawn)
    assert profile.overhead is not None
    assert profile.overhead.full_step_us is not None
