"""Statistics of two processes, merged: equal to those of one that saw all the rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from loka.numerics import BatchStatistics, OperandStatistics
from loka.probe.observation import SiteObservation
from loka.probe.reduce import reduce_over_ranks
from loka.vocab import Operand, Pass

STEPS, ROWS = 12, 8


def site_of(rank: int, *, steps: int = STEPS, features: int = 5) -> SiteObservation:
    """What one rank sees: other rows, a thousand times larger on the second."""
    site = SiteObservation(passes={Pass.FWD, (Pass.DGRAD, Pass.WGRAD)[rank]}, calls=1 + rank)
    for step in range(steps):
        x = rows_of(rank, step, features)
        site.m_seen[len(x)] += 1
        batch = BatchStatistics.of(x, sample_SK=x if step % 2 == 0 else None)
        site.take(Operand.INPUT, batch, step=step)
        site.take(Operand.WEIGHT, BatchStatistics.of(torch.full((3, features), step + 1.0)), step=step)
    return site


def rows_of(rank: int, step: int, features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(ROWS + rank, features, generator=generator) * 1000.0**rank


def whole(features: int = 5) -> OperandStatistics:
    known = OperandStatistics.empty(features)
    for step in range(STEPS):
        for rank in range(2):
            known.add(rows_of(rank, step, features), step=step, distributions=step % 2 == 0)
    return known


def check_rank(rank: int) -> None:
    sites = {"both": site_of(rank), "empty": SiteObservation()}
    if rank == 1:
        sites["late"] = site_of(1, features=3)
    before = {
        name: tensor.clone() for name, tensor in sites["both"].operands[Operand.INPUT].tensors().items()
    }
    reduced = reduce_over_ranks(sites)
    assert list(reduced) == ["both", "empty", "late"]
    both = reduced["both"]
    assert both.m_seen == {ROWS: STEPS, ROWS + 1: STEPS}
    assert both.passes == set(Pass)
    assert both.calls == 2
    found, wanted = both.operands[Operand.INPUT], whole()
    for name, tensor in wanted.tensors().items():
        got = found.tensors()[name]
        assert got.dtype is tensor.dtype, name
        if tensor.is_floating_point():
            assert torch.allclose(got.double(), tensor.double(), rtol=1e-5, atol=1e-3), name
        else:
            assert torch.equal(got, tensor), name
    assert torch.allclose(found.moments.mean, wanted.moments.mean, rtol=1e-12, atol=1e-10)
    assert found.drift() == wanted.drift()
    weight = both.operands[Operand.WEIGHT].moments
    assert (int(weight.count), weight.amax.tolist()) == (3, [float(STEPS)] * 5)
    assert int(reduced["late"].operands[Operand.INPUT].moments.count) == STEPS * (ROWS + 1)
    for name, tensor in sites["both"].operands[Operand.INPUT].tensors().items():
        assert torch.equal(tensor, before[name])
    sums = torch.stack([t.double().sum() for t in found.tensors().values()])
    other = sums.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(sums, other)


def test_two_ranks_agree_with_one_that_saw_everything(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path / "meet")]
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)


def test_one_process_keeps_what_it_has() -> None:
    sites = {"a": site_of(0)}
    assert reduce_over_ranks(sites) == sites


if __name__ == "__main__":
    _rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=_rank, world_size=2)
    check_rank(_rank)
    dist.destroy_process_group()
