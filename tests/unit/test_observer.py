"""The observer on awkward models and loops: what is counted, once, and what is captured."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka.numerics import Moments
from loka.probe.live import SAMPLED_ROWS, Captured
from loka.probe.observer import Observer
from loka.probe.seen import SeenTensors
from loka.probe.strata import stratified_rows
from loka.sites import plannable_linears
from loka.vocab import Operand, Pass

K, N, B = 6, 4, 10
INPUT, WEIGHT, GRAD = Operand.INPUT, Operand.WEIGHT, Operand.GRAD_OUTPUT


class Watched:
    """A model under an observer, and what the observer handed over."""

    def __init__(self, model: nn.Module, *, seed: int = 0) -> None:
        self.model = model
        self.captured: list[tuple[str, Captured]] = []
        self.observer = Observer(
            plannable_linears(model),
            on_captured=lambda name, captured: self.captured.append((name, captured)),
            seed=seed,
            is_training=lambda: model.training,
        )

    def step(self, number: int, run: Callable[[], object], *, full: bool = True) -> None:
        self.observer.arm(number, full=None if full else ())
        run()
        self.observer.disarm()

    def moments(self, name: str, operand: Operand) -> Moments:
        return self.observer.sites[name].operands[operand].moments

    def count(self, name: str, operand: Operand) -> int:
        return int(self.moments(name, operand).count)


def linear(n: int = N, k: int = K, *, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(k, n)


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(moments: Moments, rows: Tensor) -> bool:
    """Equal to FP64 sums over the rows."""
    rows = rows.double()
    return (
        int(moments.count) == len(rows)
        and torch.allclose(moments.mean, rows.mean(dim=0), rtol=1e-9, atol=1e-12)
        and torch.allclose(moments.m2, (rows - rows.mean(dim=0)).square().sum(dim=0), rtol=1e-9, atol=1e-12)
        and torch.equal(moments.amax.double(), rows.abs().amax(dim=0))
    )


def distributions_seen(watched: Watched, name: str, operand: Operand) -> int:
    covariance = watched.observer.sites[name].operands[operand].covariance
    return 0 if covariance is None else int(covariance.count)


def test_moments_alone_outside_full_steps() -> None:
    watched = Watched(nn.Sequential(linear()))
    for number, full in ((0, False), (1, True), (2, False)):
        x = batch(B, K, seed=number)
        watched.step(number, lambda x=x: watched.model(x).sum().backward(), full=full)  # type: ignore[misc]
    known = watched.observer.sites["0"].operands
    assert set(known) == {INPUT, WEIGHT, GRAD}
    assert [watched.count("0", o) for o in (INPUT, GRAD, WEIGHT)] == [3 * B, 3 * B, N]
    assert distributions_seen(watched, "0", INPUT) == distributions_seen(watched, "0", GRAD) == B
    assert known[WEIGHT].covariance is None
    assert len(watched.captured) == 1
    assert known[INPUT].history.steps == (0, 1, 2)
    assert same(known[INPUT].moments, torch.cat([batch(B, K, seed=i) for i in range(3)]))


def test_captured_rows_of_input_and_gradient_belong_together() -> None:
    model = nn.Sequential(linear())
    watched = Watched(model)
    x, target = batch(3000, K).requires_grad_(), batch(3000, N, seed=1)
    watched.step(0, lambda: ((model(x) - target) ** 2).sum().backward())
    [(name, captured)] = watched.captured
    assert name == "0"
    assert captured.g is not None
    assert captured.x.shape == (SAMPLED_ROWS, K)
    places = [int((x == row).all(dim=1).nonzero()) for row in captured.x]
    assert places == sorted(set(places))
    g = (2 * (model(x) - target)).detach()
    assert torch.allclose(captured.g, g[places], rtol=1e-5, atol=1e-6)
    assert captured.passes == frozenset(Pass)
    assert captured.x_amax.item() == x.abs().max().item()
    assert captured.g_amax is not None
    assert captured.g_amax.item() == pytest.approx(g.abs().max().item(), rel=1e-6)
    assert watched.count("0", INPUT) == 3000
    assert distributions_seen(watched, "0", INPUT) == SAMPLED_ROWS


class Branches(nn.Module):
    """Three linears on one tensor, one of them on a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(5, seed=1), linear(3, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        xt = x.transpose(1, 2).contiguous()
        return self.a(xt).sum() + self.b(xt).sum() + self.c(xt.view(-1, K)).sum()  # type: ignore[no-any-return]


def test_a_tensor_that_several_sites_share_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[int, ...]] = []

    def counted(x: Tensor) -> Moments:
        looked.append(tuple(x.shape))
        return Moments.of(x)

    monkeypatch.setattr("loka.probe.seen.moments_of", counted)
    watched = Watched(Branches())
    x = batch(B, K, 7)
    for number in range(2):
        watched.step(number, lambda: watched.model(x).backward())
    assert looked.count((B * 7, K)) == 2
    rows = x.transpose(1, 2).reshape(-1, K)
    for name in "abc":
        assert same(watched.moments(name, INPUT), torch.cat([rows, rows]))
        assert distributions_seen(watched, name, INPUT) == 2 * B * 7


def test_an_address_used_again_is_another_tensor() -> None:
    seen = SeenTensors()
    memory = torch.zeros(4, 2)
    first = torch.from_numpy(memory.numpy())
    seen.batch(first)
    del first
    memory.fill_(3.0)
    second = torch.from_numpy(memory.numpy())
    assert seen.batch(second).amax.item() == 3.0
    second.add_(1.0)
    assert seen.batch(second).amax.item() == 4.0
    assert seen.batch(second) is seen.batch(second)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = linear(K)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(torch.relu(self.one(x)))  # type: ignore[no-any-return]


def test_a_site_called_twice_in_a_forward() -> None:
    """Both calls count; the sampled rows are shared out, and the live error is of either call."""
    model = Twice()
    watched = Watched(model)
    x = batch(2000, K)
    for number in range(8):
        watched.step(number, lambda: model(x).square().sum().backward())
    assert watched.count("one", INPUT) == watched.count("one", GRAD) == 8 * 4000
    assert watched.observer.sites["one"].m_seen == {2000: 16}
    assert watched.observer.sites["one"].calls == 2
    # Of the first step the calls were not known: the first took all rows.
    assert distributions_seen(watched, "one", INPUT) == 8 * SAMPLED_ROWS
    hidden = torch.relu(model.one(x)).detach()
    out = model.one(hidden).detach()
    gradients = {0: 2 * out @ model.one.weight.detach() * (hidden > 0), 1: 2 * out}
    chosen = []
    for _, captured in watched.captured:
        call = 0 if any(torch.equal(captured.x[0], row) for row in x) else 1
        source = (x, hidden)[call]
        place = int((source == captured.x[0]).all(dim=1).nonzero()[0])
        assert captured.g is not None
        assert torch.allclose(captured.g[0], gradients[call][place], rtol=1e-4, atol=1e-5)
        chosen.append(call)
    assert len(chosen) == 8
    assert set(chosen) == {0, 1}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_checkpointed_calls_count_once_and_pair_rows_with_their_gradient(reentrant: bool, full: bool) -> None:
    model = Twice()
    watched = Watched(model)
    x = batch(40, K).requires_grad_()

    def run() -> None:
        hidden = torch.relu(checkpoint(model.one, x, use_reentrant=reentrant))
        checkpoint(model.one, hidden, use_reentrant=reentrant).square().sum().backward()

    for number in range(6):
        watched.step(number, run, full=full)
    assert watched.count("one", INPUT) == watched.count("one", GRAD) == 6 * 80
    assert watched.observer.sites["one"].passes == set(Pass)
    assert len(watched.captured) == 6 * full
    hidden = torch.relu(model.one(x)).detach()
    out = model.one(hidden).detach()
    for _, captured in watched.captured:
        first = torch.equal(captured.x, x.detach())
        assert first or torch.equal(captured.x, hidden)
        wanted = 2 * out @ model.one.weight.detach() * (hidden > 0) if first else 2 * out
        assert captured.g is not None
        assert torch.allclose(captured.g, wanted, rtol=1e-4, atol=1e-5)
        assert captured.passes == frozenset(Pass)


def test_gradient_accumulation_counts_every_micro_batch() -> None:
    model = nn.Sequential(linear())
    watched = Watched(model)

    def run() -> None:
        for seed in range(4):
            model(batch(B, K, seed=seed)).square().sum().backward()

    watched.step(0, run)
    watched.step(1, run)
    rows = torch.cat([batch(B, K, seed=s) for s in range(4)])
    assert same(watched.moments("0", INPUT), torch.cat([rows, rows]))
    assert watched.count("0", GRAD) == 8 * B
    assert distributions_seen(watched, "0", INPUT) == B + 4 * B
    assert len(watched.captured) == 2


def test_frozen_and_leading_layers_lack_a_pass() -> None:
    model = nn.Sequential(linear(K), linear(seed=1))
    model[1].weight.requires_grad_(False)
    watched = Watched(model)
    watched.step(0, lambda: model(batch(B, K)).sum().backward())
    assert watched.observer.sites["0"].passes == {Pass.FWD, Pass.WGRAD}
    assert watched.observer.sites["1"].passes == {Pass.FWD, Pass.DGRAD}
    entirely = Watched(nn.Sequential(linear()).requires_grad_(False))
    entirely.step(0, lambda: entirely.model(batch(B, K)))
    assert entirely.observer.sites["0"].passes == {Pass.FWD}
    assert [c.g for _, c in entirely.captured] == [None]


def test_a_weight_at_two_sites() -> None:
    first, second = linear(K), linear(K, seed=1)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    watched = Watched(model)
    watched.step(0, lambda: model(batch(B, K)).sum().backward())
    for name in ("0", "2"):
        assert same(watched.moments(name, WEIGHT), first.weight.detach())
        assert watched.count(name, GRAD) == B


def test_evaluation_and_late_gradients_are_left_out() -> None:
    model = nn.Sequential(linear())
    watched = Watched(model)
    losses = []

    def run() -> None:
        model.eval()
        model(100 * batch(500, K))
        model.train()
        losses.append(model(batch(B, K)).sum())

    watched.step(0, run)
    assert watched.count("0", INPUT) == B
    losses[0].backward()  # after its step
    assert GRAD not in watched.observer.sites["0"].operands
    assert [c.g for _, c in watched.captured] == [None]


@pytest.mark.parametrize("shape", [(K,), (B, K), (2, 5, K), (2, 1, 3, K)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_of_any_rank_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = nn.Sequential(linear()).to(dtype)
    watched = Watched(model)
    x = batch(*shape).to(dtype)
    watched.step(0, lambda: model[0](input=x).sum().backward())
    assert same(watched.moments("0", INPUT), x.reshape(-1, K))
    assert watched.observer.sites["0"].m_seen == {math.prod(shape[:-1]): 1}
    [(_, captured)] = watched.captured
    assert captured.x.dtype is dtype
    assert watched.count("0", GRAD) == math.prod(shape[:-1])


@pytest.mark.parametrize("autocast", [True, False])
def test_statistics_do_not_depend_on_autocast(autocast: bool) -> None:
    model = nn.Sequential(linear(30, 30))
    watched = Watched(model)
    x = batch(200, 30)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(x).float().sum().backward()

    watched.step(0, run)
    assert same(watched.moments("0", INPUT), x)
    covariance = watched.observer.sites["0"].operands[INPUT].covariance
    assert covariance is not None
    wanted = x.double().t().cov() * 199
    assert torch.allclose(covariance.scatter.double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int64])
def test_inputs_that_a_linear_cannot_multiply_do_not_break_it(dtype: torch.dtype) -> None:
    """A hook of the user's may show FP8 or integers to the hooks that come after it."""
    model = nn.Sequential(linear())
    watched = Watched(model)
    x = (batch(2000, K) * 10).to(dtype)
    output = model(x.float())
    watched.observer.arm(0)
    hook = next(iter(model[0]._forward_hooks.values()))
    hook(model[0], (x,), {}, output)  # type: ignore[operator]
    watched.observer.disarm()
    assert same(watched.moments("0", INPUT), x.float())
    assert watched.captured[0][1].x.shape == (SAMPLED_ROWS, K)


def test_what_is_not_finite_is_counted_and_enters_nothing() -> None:
    model = nn.Sequential(linear(K), linear(seed=1))
    watched = Watched(model)
    x = batch(50, K)
    x[3, 1], x[7, 2], x[9, 0] = torch.nan, torch.inf, -torch.inf
    watched.step(0, lambda: model(x).sum().backward())
    finite = x[x.isfinite().all(dim=1)]
    known = watched.observer.sites["0"].operands[INPUT]
    assert same(known.moments, finite)
    assert int(known.moments.nonfinite_rows) == 3
    assert int(watched.moments("1", INPUT).nonfinite_rows) == 3
    assert known.history.values().tolist() == [finite.abs().max().item()]
    assert known.covariance is not None
    assert int(known.covariance.count) == 47
    assert known.marginals is not None
    assert known.marginals.counts.sum(dim=1).tolist() == [47] * K
    for tensor in known.tensors().values():
        assert torch.isfinite(tensor).all()
    [captured] = [c for name, c in watched.captured if name == "0"]
    assert captured.x_amax.item() == finite.abs().max().item()


def test_empty_batches_and_shapes_that_change() -> None:
    model = nn.Sequential(linear())
    watched = Watched(model)
    for number, rows in enumerate((0, 5, 0, 2, 5)):
        x = batch(rows, K, seed=number)
        watched.step(number, lambda x=x: model(x).sum().backward())  # type: ignore[misc]
    assert watched.observer.sites["0"].m_seen == {0: 2, 5: 2, 2: 1}
    assert watched.count("0", INPUT) == watched.count("0", GRAD) == 12
    assert watched.observer.sites["0"].operands[INPUT].history.steps == (1, 3, 4)


def test_inputs_changed_in_place_afterwards_were_seen_as_they_were() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(K), linear(seed=1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            y = hidden.relu_()
            return self.b(y)  # type: ignore[no-any-return]

    model = InPlace()
    watched = Watched(model)
    x = batch(B, K)
    watched.step(0, lambda: model(x).sum().backward())
    hidden = model.a(x)
    assert same(watched.moments("b", INPUT), hidden.relu().detach())
    gradient = torch.ones(B, N) @ model.b.weight.detach() * (hidden > 0)
    assert same(watched.moments("a", GRAD), gradient.detach())


def test_captured_rows_outlive_a_residual_added_in_place() -> None:
    """Under autocast the linear saves a bf16 copy, so its input may be written over before the backward."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = linear(K)

        def forward(self, x: Tensor) -> Tensor:
            stream = x * 2
            with torch.autocast("cpu", torch.bfloat16):
                stream += self.one(stream)
            return stream

    watched = Watched(Residual())
    x = batch(B, K)
    watched.step(0, lambda: watched.model(x).sum().backward())
    [(_, captured)] = watched.captured
    assert torch.equal(captured.x, x * 2)
    assert captured.g is not None
    assert torch.equal(captured.g.float(), torch.ones(B, K))


def test_training_is_not_changed_and_no_hook_stays() -> None:
    plain, model = Twice(), Twice()
    watched = Watched(model)
    x = batch(B, K)
    plain(x).sum().backward()
    state = torch.get_rng_state()
    watched.step(0, lambda: model(x).sum().backward())
    assert torch.equal(torch.get_rng_state(), state)
    assert plain.one.weight.grad is not None
    assert model.one.weight.grad is not None
    assert torch.equal(plain.one.weight.grad, model.one.weight.grad)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("rows", "limit"), [(1025, 1024), (1500, 1024), (4096, 1024), (1_572_864, 1024), (7, 3)]
)
def test_stratified_rows(rows: int, limit: int) -> None:
    found = stratified_rows(rows, limit, torch.Generator().manual_seed(1))
    again = stratified_rows(rows, limit, torch.Generator().manual_seed(1))
    assert found is not None
    assert again is not None
    assert torch.equal(found, again)
    assert len(found) == limit
    assert (found.diff() > 0).all()
    assert int(found[0]) >= 0
    assert int(found[-1]) < rows
    assert stratified_rows(limit, limit, torch.Generator()) is None


def test_every_row_is_as_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(30)
    for _ in range(4000):
        rows = stratified_rows(30, 8, generator)
        assert rows is not None
        hits[rows] += 1
    # Runs of 3 and 4 rows: 1/3 or 1/4, five standard errors of 4,000 draws.
    assert ((hits / 4000 - 1 / 3).abs() < 0.04).sum() + ((hits / 4000 - 1 / 4).abs() < 0.035).sum() == 30
