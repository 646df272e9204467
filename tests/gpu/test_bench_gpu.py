"""The clock and `loka bench gemm` on a GPU: what is captured, what fails, what is freed, what is right."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loka.bench import GemmBench, Shape, bench_gemm, partial_path
from loka.bench.accounting import Pair, Tensors, Work
from loka.bench.time_pair import PairTimer
from loka.cli.main import command_line
from loka.kernels import device_of, usable
from loka.timing import attempt, clock_overhead_us, measure, measure_or_reason
from loka.vocab import Pass

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

BF16 = "high_precision.bf16"
SHAPES = [Shape(2048, 512, 1024), Shape(4096, 390, 390), Shape(1000, 64, 48)]


def product(size: int = 512) -> Callable[[], torch.Tensor]:
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ a


def waits() -> float:
    """A call that asks the GPU for a number, and so cannot be captured."""
    return float(torch.ones(8, device="cuda").sum())


def waits_unseen() -> None:
    """The same, in a way that torch does not see before a capture fails of it."""
    torch.ones(8, device="cuda").sum()
    torch.cuda.synchronize()


def test_what_can_be_captured_is_replayed_and_the_rest_is_called() -> None:
    timings = measure({"product": product(), "waits": waits, "again": product()}, device="cuda", rounds=4)
    assert {name: t.captured for name, t in timings.items()} == {
        "product": True,
        "waits": False,
        "again": True,
    }
    assert all(len(t.samples_us) == 4 and min(t.samples_us) > 0 for t in timings.values())
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_capture_that_fails_spoils_nothing() -> None:
    timings = measure({"unseen": waits_unseen, "product": product()}, device="cuda", rounds=4)
    assert not timings["unseen"].captured
    assert timings["product"].captured
    torch.cuda.empty_cache()
    a = torch.randn(256, 256, device="cuda")
    assert torch.allclose(a @ torch.eye(256, device="cuda"), a, atol=1e-2)
    assert measure({"product": product()}, device="cuda", rounds=2)["product"].captured


def test_a_replayed_candidate_runs_in_every_round() -> None:
    count = torch.zeros((), device="cuda")
    measure({"count": lambda: count.add_(1)}, device="cuda", rounds=5)
    # Three warm-up calls, one that shows that it never waits, none while captured, five replays.
    assert count.item() == 9


def test_a_candidate_that_fails_costs_the_others_nothing() -> None:
    a, b = torch.zeros(4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")
    measured = measure_or_reason(
        {
            "shapes": lambda: a @ b,
            "memory": lambda: torch.empty(2**50, device="cuda"),
            "product": product(),
        },
        device="cuda",
        rounds=4,
    )
    assert set(measured.timings) == {"product"}
    assert set(measured.reasons) == {"shapes", "memory"}
    assert "out of memory" in measured.reasons["memory"]
    assert measured.timings["product"].captured


def test_the_clock_s_own_cost_is_small_and_known() -> None:
    assert 0.0 <= clock_overhead_us(device="cuda") < 100.0


def test_graphs_and_their_memory_are_freed() -> None:
    def large() -> torch.Tensor:
        return torch.ones(64 * 2**20, device="cuda")  # 256 MB

    def once() -> None:
        measure_or_reason({str(i): large for i in range(8)}, device="cuda", rounds=2)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    once()  # workspaces that libraries keep for good are made here
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    once()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved
    # The flush, one live output, and one pool that all graphs share: not eight outputs.
    assert torch.cuda.max_memory_allocated() - allocated < 4 * 256 * 2**20


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.key)
@pytest.mark.parametrize("pass_", list(Pass))
def test_every_total_is_the_product_that_it_stands_for(shape: Shape, pass_: Pass) -> None:
    """Orientation, bias and dtype of every usable kernel, against FP64 of the operands before their casts."""
    pair = Pair(shape, pass_)
    where = torch.device("cuda")
    tensors = Tensors.random(pair, where)
    a, b = tensors.a.double(), tensors.b.double()
    want = {
        Pass.FWD: lambda: a @ b.t() + (0.0 if tensors.bias is None else tensors.bias.double()),
        Pass.DGRAD: lambda: a @ b,
        Pass.WGRAD: lambda: a.t() @ b,
    }[pass_]()
    device = device_of("cuda")
    able = [k for k in GemmBench(device="cuda").chosen() if usable(k, pair.problem, device)]
    assert BF16 in [k.name for k in able]
    work = Work(pair, tensors)
    for kernel in able:
        for call in (work.total(kernel), work.product(kernel)):
            out, reason = attempt(kernel.name, call, where=where)
            assert out is not None, (kernel.name, reason)
            assert out.dtype == (torch.float32 if pass_ is Pass.WGRAD else torch.bfloat16), kernel.name
            error = float((out.double() - want).norm() / want.norm())
            # Two E4M3 operands of four significant bits each are off by 4 %; bf16 by 0.4 %.
            assert error < (0.06 if kernel.operands(pair.problem)[0].is_quantized else 0.01), kernel.name


def test_a_pair_has_times_or_reasons_and_no_kernel_beats_the_roofline() -> None:
    settings = GemmBench(shapes=(Shape(8192, 2048, 2048),), rounds=8, device="cuda")
    timer = PairTimer(torch.device("cuda"), settings.chosen(), settings.rounds)
    for pair in settings.pairs:
        result = timer.run(pair, left_out={})
        assert not result.failed
        assert {r.kernel for r in result.kernels} | set(result.refused) == {k.name for k in settings.chosen()}
        for row in result.kernels:
            assert row.reason or None not in (row.p50_us, row.product_us, row.speedup), row
            if row.roofline is not None:
                assert 0.0 < row.roofline <= 1.05, row
        for name in (BF16, "torch.tensorwise", "torch.rowwise"):
            row = result.row(name)
            assert row is not None
            assert row.captured
            assert row.vetted


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class StopTestError(Exception):
        pass

    def stop(done: int, total: int, last: object) -> None:
        if done == 2:
            raise StopTestError

    settings = GemmBench(shapes=(SHAPES[1],), rounds=8, device="cuda", kernels=("torch.*",))
    record = tmp_path / "gemm.json"
    with pytest.raises(StopTestError):
        bench_gemm(settings, record=record, on_pair=stop)
    assert partial_path(record).read_bytes().count(b"\n") == 3
    done: list[int] = []
    result = bench_gemm(settings, record=record, resume=True, on_pair=lambda d, total, last: done.append(d))
    assert done == [2, 3]
    assert result.metrics["pairs"] == 3
    assert record.exists()


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("m,n,k\n2048,512,1024\n")
    arguments = ["bench", "gemm", "--shapes", str(shapes), "--rounds", "8", "--device", "cuda", "--json"]
    assert command_line(arguments) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["pairs"] == 3
    assert "roofline_fraction_geomean" in metrics
