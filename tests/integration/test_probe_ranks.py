"""Probe on two ranks: data-parallel and sharded training; what they learned is reduced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import loka
from loka.artifacts import write_profile
from loka.errors import UsageError
from loka.vocab import Operand, Pass

B, K, N, STEPS = 16, 32, 16, 8


class Net(nn.Module):
    """A block and a head, as they would be sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(K, 48), nn.ReLU(), nn.Linear(48, K))
        self.head = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.block(x))  # type: ignore[no-any-return]


def batch(rank: int, step: int) -> Tensor:
    """The ranks' rows differ, and so does their number."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(B + 8 * rank, K, generator=generator)


def train(model: nn.Module, probe: loka.Probe, rank: int, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.step()


def wrapped(kind: str) -> nn.Module:
    model = Net()
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.block)
        fully_shard(model)
        return model
    return nn.parallel.DistributedDataParallel(model)


def check(kind: str, rank: int, folder: Path) -> None:
    model = wrapped(kind)
    with loka.Probe(model, every=2, live_every=1, max_overhead=None) as probe:
        train(model, probe, rank)
    profile = probe.profile()
    write_profile(folder / f"{rank}.json", profile)
    assert "statistics and errors are of 2 ranks" in profile.notes
    names = ["block.0", "block.2", "head"]
    assert profile.sites.name == names
    assert profile.sites.not_planned == [""] * 3
    assert profile.sites.parameter == [f"{name}.weight" for name in names]
    assert (profile.sites.m_min, profile.sites.m_max) == ([B] * 3, [B + 8] * 3)
    live = [i for i, source in enumerate(profile.errors.source) if source == "live"]
    assert {profile.errors.observations[i] for i in live} == {2 * (STEPS // 2)}
    tried = {(profile.errors.site[i], profile.errors.pass_[i]) for i in live}
    assert tried == {(name, p) for name in names for p in Pass} - {("block.0", Pass.DGRAD)}
    assert "sampled" in profile.errors.source
    # This rank's own statistics are as they were.
    assert int(probe.statistics["head"][Operand.INPUT].moments.count) == STEPS // 2 * (B + 8 * rank)
    first = probe.statistics["block.0"]
    rows = torch.cat([batch(rank, step) for step in range(1, STEPS, 2)]).double()
    assert torch.allclose(first[Operand.INPUT].moments.mean, rows.mean(dim=0), atol=1e-9)
    assert int(first[Operand.WEIGHT].moments.count) == 48


def check_decisions(rank: int) -> None:
    model = Net()
    differing = loka.Probe(model, every=10 + rank)
    with pytest.raises(UsageError, match="ranks differ in `every`: from 10 to 11"), differing:
        pass
    with loka.Probe(model, every=3, max_overhead=1e-4) as probe:
        train(model, probe, rank, steps=30)
    raised = torch.tensor([probe.every])
    both = [torch.empty_like(raised) for _ in range(2)]
    dist.all_gather(both, raised)
    assert torch.equal(*both)
    assert probe.every > 3
    if rank == 0:  # alone, it waits for nobody
        with loka.Probe(model, every=3, max_overhead=1e-4, across_ranks=False) as alone:
            train(model, alone, rank, steps=30)
        assert alone.every > 3


class Branches(nn.Module):
    """The head is reached on the second rank only; a forward on the first fails where it shall."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = nn.Linear(K, K), nn.Linear(K, N)
        self.takes_head, self.fails = rank == 1, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        if self.fails:
            raise MemoryError("no memory left")
        return self.head(x) if self.takes_head else x  # type: ignore[no-any-return]


def check_differing(rank: int, folder: Path) -> None:
    """Ranks wait for each other at observed steps and in `profile`: both must come there equally often."""
    model = Branches(rank)
    with loka.Probe(model, every=2, max_overhead=1e-4) as probe:
        for step in range(24):
            model.fails = rank == 0 and step in (3, 5)
            try:
                model(batch(rank, step)).square().mean().backward()
            except MemoryError:
                model.zero_grad()
            probe.step()
    profile = probe.profile()
    write_profile(folder / f"{rank}.json", profile)
    assert profile.sites.name == ["block", "head"]
    assert profile.sites.not_planned == ["", ""]
    assert {s.name: s.rows for s in profile.sites.sites()}["head"] == B + 8
    assert {(of, source) for of, source in zip(profile.errors.site, profile.errors.source, strict=True)} == {
        (name, source) for name in ("block", "head") for source in ("live", "sampled")
    }


def check_idle(rank: int, folder: Path) -> None:
    """The second rank has no rows at all, or none for a while."""
    model = Net()
    for idle_until in (6, 16):
        with loka.Probe(model, every=1, max_overhead=1e-4) as probe:
            for step in range(16):
                if rank == 0 or step >= idle_until:
                    model(batch(rank, step)).square().mean().backward()
                probe.step()
        write_profile(folder / f"{rank}.json", probe.profile())


def run(kind: str, folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning:loka", __file__, kind, str(folder)]
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)


def body(path: Path) -> Any:
    found = json.loads(path.read_text())["body"]
    # Where a step's time goes is each rank's own.
    return {name: value for name, value in found.items() if name not in ("step", "overhead")}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_make_one_profile(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path)
    assert body(tmp_path / "0.json") == body(tmp_path / "1.json")


def test_ranks_decide_together(tmp_path: Path) -> None:
    run("decisions", tmp_path)


def test_ranks_that_take_other_branches_or_fail_make_one_profile(tmp_path: Path) -> None:
    run("differing", tmp_path)
    first, second = (body(tmp_path / f"{rank}.json") for rank in range(2))
    notes = [found.pop("notes") for found in (first, second)]
    assert first == second
    assert [sum("broken off" in note for note in of) for of in notes] == [2, 0]


def test_a_rank_without_rows_is_not_waited_for(tmp_path: Path) -> None:
    run("idle", tmp_path)
    first, second = (body(tmp_path / f"{rank}.json") for rank in range(2))
    assert first["sites"] == second["sites"]
    assert first["errors"] == second["errors"]


if __name__ == "__main__":
    _kind, _folder, _rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{_folder / 'meet'}", rank=_rank, world_size=2)
    if _kind == "decisions":
        check_decisions(_rank)
    elif _kind == "differing":
        check_differing(_rank, _folder)
    elif _kind == "idle":
        check_idle(_rank, _folder)
    else:
        check(_kind, _rank, _folder)
    dist.barrier()
    dist.destroy_process_group()
