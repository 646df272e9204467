"""The main job on a GPU with real FP8 kernels, small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.recsys import JobConfig, TrainConfig, run_job
from loka.vocab import Pass, Requirement

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def test_the_main_job_with_real_kernels(tmp_path: Path) -> None:
    job = JobConfig(
        model="dcnv2",
        data="synthetic?rows=60000",
        train=TrainConfig(batch_size=1024, device="cuda"),
        requirement=Requirement(min_speedup=None, deny=("emulated.*",)),
    )
    result = run_job(job, tmp_path / "job")
    kernels = {c.kernel for s in result.plan.sites for p in Pass for c in s.choices(p)}
    assert any(name.partition(".")[0] in ("torch", "triton", "mslk", "deep_gemm") for name in kernels)
    assert result.comparison.steps_per_s is not None
    assert len(result.profile.products) > 0
    # Fast sums may fail on data of one sign at a long k; exact ones of torch may not fail anywhere.
    products = result.profile.products
    exact = [v for n, v in zip(products.kernel, products.vetted, strict=True) if n == "torch.rowwise"]
    assert exact
    assert all(exact), result.profile.notes
    change = result.comparison.tasks[0].relative_ne_percent.difference
    assert change is not None
    assert abs(change) < 2.0


def test_a_compiled_model_is_observed_and_planned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        x = torch.randn(1024, 256, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with loka.Probe(model, every=4) as probe:
        for _ in range(13):
            step()
            probe.step()
    profile = probe.profile()
    assert {"0", "2"} <= set(profile.errors.site)
    assert profile.step is not None
    plan = loka.make_plan(profile, loka.Requirement(min_speedup=None))
    loka.apply_plan(model, plan)
    fused = torch.compile(model, fullgraph=True)
    x = torch.randn(1024, 256, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        got, want = fused(x), model(x)
    got.float().square().mean().backward()
    assert (got - want).float().norm() / want.float().norm() < 2e-2
    assert x.grad is not None
