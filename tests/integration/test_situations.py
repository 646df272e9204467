"""Situations that broke similar tools (D numbers), where no test of one module covers them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.errors import UsageError
from loka.kernels import cast, kernel
from loka.vocab import GemmProblem, Pass


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tower(k: int = 32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(k, 64), nn.ReLU(), nn.Linear(64, 32))


def plan_of(model: nn.Module, x: Tensor, kernel_name: str) -> loka.Plan:
    """Probed on a copy, then pinned to one kernel everywhere."""
    twin = copy.deepcopy(model)
    with loka.Probe(twin, every=2) as probe:
        for _ in range(4):
            twin(x).square().mean().backward()
            probe.step()
    pins = dict.fromkeys((site.name for site in probe.sites), kernel_name)
    return loka.make_plan(probe.profile(), loka.Requirement(pin=pins))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("rows", [16, 17, 129])
def test_d6_every_item_of_a_batch_is_its_own_product(rows: int) -> None:
    """With a scale a row, as with 1x128 blocks along K, the other items do not change an item."""
    x = seeded(2, rows, 128)
    for name in ("emulated.rowwise", "emulated.blockwise_1x128"):
        model = tower(128)
        loka.apply_plan(model, plan_of(model, x, name))
        with torch.no_grad():
            assert torch.equal(model(x), torch.stack([model(item) for item in x]))


def test_d12_deterministic_mode_runs_and_repeats(deterministic: None) -> None:
    model, x = tower(), seeded(18, 32)
    loka.apply_plan(model, plan_of(model, x, "emulated.rowwise"))
    runs = []
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
        runs.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    "scale",
    [torch.ones(1), torch.ones(16, 1), torch.ones(1, 16), torch.ones(2), torch.ones((), dtype=torch.float64)],
    ids=lambda scale: f"{list(scale.shape)}-{scale.dtype}",
)
def test_d17_a_static_scale_is_one_fp32_number(scale: Tensor) -> None:
    spec, _ = kernel("emulated.tensorwise").operands(
        GemmProblem.of_linear(Pass.FWD, rows=16, out_features=32, in_features=64)
    )
    with pytest.raises(UsageError, match=r"float32.*\(\)|\(\).*float32"):
        cast(seeded(16, 64), (spec,), scale=scale)
    one, two = (cast(seeded(16, 64) * n, (spec,), scale=torch.tensor(0.25 * n))[0] for n in (1, 2))
    product = kernel("emulated.tensorwise").matmul
    assert torch.equal(
        product(two, one, out_dtype=torch.float32), 2 * product(one, one, out_dtype=torch.float32)
    )


@pytest.mark.parametrize("kernel_name", ["emulated.tensorwise", "emulated.rowwise"])
def test_d26_export_of_a_planned_model_is_bitwise_eager(kernel_name: str) -> None:
    model, x = tower(), seeded(18, 32)
    loka.apply_plan(model, plan_of(model, x, kernel_name)).eval()
    exported = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        assert torch.equal(exported(x), model(x))


def test_d27_scales_are_local_and_replicas_stay_equal() -> None:
    """Data parallel by hand: two ranks' gradients averaged, the second's rows 1,000 times larger."""
    x = seeded(48, 32)
    ranks = [tower(), tower()]
    plan = plan_of(ranks[0], x, "emulated.tensorwise")
    for rank in ranks:
        loka.apply_plan(rank, plan)
    alone = copy.deepcopy(ranks[0])
    optimizers = [torch.optim.SGD(rank.parameters(), lr=1e-8) for rank in ranks]
    for i in range(5):
        for rank, model in enumerate(ranks):
            model.zero_grad()
            out = model(x * 1000**rank)
            if i == 0 and rank == 0:
                assert torch.equal(out, alone(x)), "a scale of another rank came in"
            out.square().mean().backward()
        for pair in zip(*(m.parameters() for m in ranks), strict=True):
            mean = torch.stack([p.grad for p in pair if p.grad is not None]).mean(0)
            for p in pair:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in ranks), strict=True))
    assert not torch.equal(ranks[0][0].weight, alone[0].weight)


def test_d28_padding_of_jagged_rows_changes_neither_loss_nor_gradients() -> None:
    """Lengths 0, 3, 17, 1, 0, 40: 61 rows alone, or among zero rows up to 6 x 40."""
    lengths = torch.tensor([0, 3, 17, 1, 0, 40])
    kept = torch.arange(40) < lengths[:, None]
    rows = seeded(61, 32)
    padded = torch.zeros(6, 40, 32)
    padded[kept] = rows
    model = tower()
    loka.apply_plan(model, plan_of(model, rows, "emulated.rowwise"))
    got = []
    for x, mask in ((rows, torch.ones(61, dtype=torch.bool)), (padded, kept)):
        model.zero_grad()
        loss = model(x)[mask].square().mean()
        loss.backward()
        got.append([loss.detach(), *gradients(model)])
    for alone, among in zip(*got, strict=True):
        assert (alone - among).norm() <= 1e-6 * alone.norm()
