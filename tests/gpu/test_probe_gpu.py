"""Probe's numbers on a GPU: they are copied without a wait, and read only when they have arrived."""

from __future__ import annotations

import math

import pytest
import torch

from loka.kernels import device_of
from loka.probe.error_log import ErrorLog
from loka.probe.timed_casts import time_casts
from loka.probe.timed_products import time_products
from loka.probe.trial import Trial, trials_of
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
