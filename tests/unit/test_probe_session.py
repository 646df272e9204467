"""What Probe asks, decides, keeps and says."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.artifacts import read_statistics
from loka.errors import UsageError
from loka.numerics import statistics_bytes
from loka.numerics.exact import exact_products
from loka.probe.schedule import Schedule
from loka.vocab import Operand, Pass

B, K, N = 16, 32, 16


def model_of(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, N))


def batch(step: int = 0, rows: int = B) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, probe: loka.Probe, steps: int, call: Callable[[Tensor], Tensor] | None = None
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        (call or model)(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.step()


def rows_loss(model: nn.Module, x: object) -> Tensor:
    assert isinstance(x, Tensor)
    return (model(x) - 1).square().mean(dim=1)  # type: ignore[no-any-return]


# --- which steps ------------------------------------------------------------------------------------------


def test_the_first_observed_step_and_then_each_live_every_th_is_full() -> None:
    model, told = model_of(), []
    with loka.Probe(
        model, every=2, live_every=3, max_overhead=None, on_observed=lambda _, step: told.append(step)
    ) as probe:
        train(model, probe, 14)
        assert told == [2, 8]  # numbers are read at the next observed step
    assert told == [2, 8, 14]
    known = probe.statistics["0"][Operand.INPUT]
    assert int(known.moments.count) == 7 * B
    assert known.covariance is not None
    assert int(known.covariance.count) == 3 * B
    assert set(probe.errors.observations) == {3}


def test_the_callback_sees_the_numbers_of_its_step() -> None:
    model, seen = model_of(), []
    with loka.Probe(
        model, every=2, live_every=1, max_overhead=None,
        on_observed=lambda p, _: seen.append(set(p.errors.observations)),
    ) as probe:  # fmt: skip
        train(model, probe, 6)
    assert seen == [{1}, {2}, {3}]


def test_every_is_raised_where_observing_costs_too_much(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="loka.probe")
    model = model_of()
    with loka.Probe(model, every=4, live_every=1, max_overhead=1e-5) as probe:
        train(model, probe, 24)
    assert probe.every > 4
    assert len(caplog.messages) == 1
    assert "over the limit of 0.001 %: one in" in caplog.messages[0]
    profile = probe.profile()
    assert caplog.messages[0] in profile.notes
    assert profile.overhead is not None
    assert profile.overhead.every == probe.every
    assert profile.overhead.full_step_us is not None
    assert profile.overhead.full_step_us > profile.overhead.plain_step_us > 0
    resumed = loka.Probe(model, every=4)
    resumed.load_state_dict(probe.state_dict())
    assert resumed.every == probe.every
    free = loka.Probe(model, every=4, live_every=1, max_overhead=None)
    with free:
        train(model, free, 24)
    assert free.every == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, r"every=0.*at least 1"),
        ({"live_every": 0}, r"live_every=0.*at least 1"),
        ({"max_overhead": 0.0}, r"max_overhead=0\.0\) must lie in \(0, 1\)"),
        ({"max_overhead": 1.0}, r"max_overhead=1\.0"),
        ({"save_every": 0}, r"save_every=0"),
        ({"save_to": "no/such/folder/x"}, "does not exist"),
        ({"evaluate": rows_loss}, "`evaluate` without `batches`"),
        ({"batches": [1]}, "`batches` without `evaluate`"),
        ({"evaluate": rows_loss, "batches": iter([1])}, "again and again, got a list_iterator"),
        ({"evaluate": rows_loss, "batches": 3}, "again and again, got a int"),
        ({"evaluate": "loss", "batches": [1]}, "takes a function, got a str"),
    ],
)
def test_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loka.Probe(model_of(), **options)  # type: ignore[arg-type]


# --- nothing to see ---------------------------------------------------------------------------------------


def test_a_loop_that_never_calls_step(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    with loka.Probe(model) as probe:
        model(batch())
    want = "`step()` was never called in Probe's `with` block, though the model ran"
    with pytest.raises(UsageError, match=want.replace("(", r"\(").replace(")", r"\)")):
        probe.profile()
    assert want in caplog.text
    with loka.Probe(model) as probe:
        pass
    with pytest.raises(UsageError, match="and the model never ran either"):
        probe.profile()


def test_a_loop_that_calls_another_model() -> None:
    model, other = model_of(), model_of()
    with loka.Probe(model, every=1) as probe:
        train(other, probe, 3)
    with pytest.raises(UsageError, match="in 3 steps no linear of the model that Probe was given was called"):
        probe.profile()


def test_a_loop_in_evaluation_mode() -> None:
    model = model_of().eval()
    with loka.Probe(model, every=1) as probe:
        train(model, probe, 3)
    with pytest.raises(UsageError, match="in 3 steps the model that Probe was given ran in evaluation mode"):
        probe.profile()


def test_a_loop_that_ends_before_the_first_observed_step() -> None:
    model = model_of()
    with loka.Probe(model, every=100) as probe:
        train(model, probe, 3)
    with pytest.raises(UsageError, match="no step was observed in 3 steps with every=100"):
        probe.profile()


# --- what runs --------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A layer used twice, a weight at two layers, and a layer that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(K, K)
        self.first = nn.Linear(K, K)
        self.second = nn.Linear(K, K, bias=False)
        self.second.weight = self.first.weight
        self.never = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.twice(self.twice(x))))  # type: ignore[no-any-return]


def test_layers_used_twice_weights_at_two_layers_and_layers_never_reached() -> None:
    model = Odd()
    with loka.Probe(model, every=2, live_every=1, max_overhead=None) as probe:
        train(model, probe, 4)
    profile = probe.profile()
    sites = {s.name: s for s in profile.sites.sites()}
    assert sites["twice"].calls == 2
    assert int(probe.statistics["twice"][Operand.INPUT].moments.count) == 2 * 2 * B
    assert sites["first"].parameter == sites["second"].parameter == "first.weight"
    assert sites["never"].not_planned == "not reached by the batch"
    assert "never" not in probe.statistics
    tried = set(zip(profile.errors.site, profile.errors.pass_, strict=True))
    assert {(name, p) for name in ("first", "second") for p in Pass} <= tried
    assert not any(site == "never" for site, _ in tried)


def test_rows_that_are_not_finite_are_counted_and_ruin_no_error() -> None:
    model = model_of()

    def call(x: Tensor) -> Tensor:
        x = x.clone()
        x[3, 5], x[4, 0] = math.nan, math.inf
        return model(x).nan_to_num()  # type: ignore[no-any-return]

    with loka.Probe(model, every=2, live_every=1, max_overhead=None) as probe:
        for step in range(4):
            call(batch(step)).square().mean().backward()
            model.zero_grad()
            probe.step()
    profile = probe.profile()
    assert profile.sites.nonfinite_rows[0] >= 2 * 2
    assert int(probe.statistics["0"][Operand.INPUT].moments.count) == 2 * (B - 2)
    errors = profile.errors
    fwd = [
        errors.sqnr_db[i]
        for i in range(len(errors))
        if (errors.site[i], errors.pass_[i], errors.source[i]) == ("0", Pass.FWD, "live")
    ]
    assert fwd
    assert min(fwd) > 15  # E4M3 rows that are whole


def test_batches_of_every_size() -> None:
    model, rows = model_of(), [16, 16, 5, 5, 0, 0, 16, 16]
    with loka.Probe(model, every=2, live_every=1, max_overhead=None) as probe:
        for step, m in enumerate(rows):
            model(batch(step, m)).square().sum().backward()
            model.zero_grad()
            probe.step()
    profile = probe.profile(rows=[64])
    assert (profile.sites.m_min[0], profile.sites.m_p50[0], profile.sites.m_max[0]) == (0, 16, 16)
    assert int(probe.statistics["0"][Operand.INPUT].moments.count) == 16 + 5 + 16
    errors = profile.errors
    tried = {errors.m[i] for i in range(len(errors)) if errors.source[i] == "sampled"}
    assert tried == {0, 16, 64}
    assert {errors.m[i] for i in range(len(errors)) if errors.pass_[i] is not Pass.WGRAD} == {0}


# --- trials on drawn operands -----------------------------------------------------------------------------


def test_draws_go_on_until_the_interval_is_narrow_and_no_longer() -> None:
    model = model_of()
    with loka.Probe(model, every=2, live_every=1, max_overhead=None) as probe:
        train(model, probe, 6)
    errors = probe.profile().errors
    drawn = [i for i in range(len(errors)) if errors.source[i] == "sampled"]
    assert drawn
    for i in drawn:
        width = errors.sqnr_db_high[i] - errors.sqnr_db_low[i]
        assert 3 <= errors.observations[i] <= 20
        assert width <= 0.2 or errors.observations[i] == 20
        assert errors.rel_err_half[i] > 0
    assert probe.profile().errors == errors  # nothing else is drawn the second time


def test_a_loaded_state_makes_profiles_without_data() -> None:
    model = model_of()
    with loka.Probe(model, every=2, max_overhead=None) as probe:
        train(model, probe, 4)
    state = {name: tensor.clone() for name, tensor in probe.state_dict().items()}
    elsewhere = loka.Probe(model)
    elsewhere.load_state_dict(state)
    assert elsewhere.sites == probe.sites
    assert elsewhere.profile(rows=[32]).errors == probe.profile(rows=[32]).errors


def test_a_state_of_another_model_is_refused() -> None:
    model = model_of()
    with loka.Probe(model, every=1, max_overhead=None) as probe:
        train(model, probe, 2)
    other = nn.Sequential(nn.Linear(K, 8), nn.Tanh(), nn.Linear(8, N))
    with pytest.raises(UsageError, match=r"of another model\n  0  N x K is 8x32 here, 16x32 in the state"):
        loka.Probe(other).load_state_dict(probe.state_dict())
    with pytest.raises(UsageError, match="no state of a Probe"):
        loka.Probe(model).load_state_dict({"weight": torch.zeros(1)})


@pytest.mark.parametrize("rows", [[0], [-3], [1.5], [True]])
def test_rows_of_a_profile_are_positive_whole_numbers(rows: list[int]) -> None:
    model = model_of()
    with loka.Probe(model, every=1, max_overhead=None) as probe:
        train(model, probe, 2)
    with pytest.raises(UsageError, match="takes whole numbers from 1 on"):
        probe.profile(rows=rows)


# --- the loss ---------------------------------------------------------------------------------------------


def test_the_loss_of_held_out_rows_fills_its_table() -> None:
    model = model_of()
    held_out = [batch(100 + i, 64) for i in range(4)]
    with loka.Probe(model, every=2, max_overhead=None, evaluate=rows_loss, batches=held_out) as probe:
        train(model, probe, 4)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    table = probe.profile().loss
    assert set(table.site) == {"0", "2"}
    assert set(table.pass_) == {Pass.FWD}
    assert ("e4m3.tensorwise", "e4m3.tensorwise") in set(zip(table.spec_a, table.spec_b, strict=True))
    assert len(set(zip(table.site, table.spec_a, table.spec_b, strict=True))) == len(table)
    assert all(se > 0 for se in table.se)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda m, x: m(x).mean(), r"torch.float32 of shape \[\] for batch 1, expected one loss a row"),
        (lambda m, x: m(x), r"of shape \[16, 16\]"),
        (lambda m, x: m(x).argmax(dim=1), r"gave torch.int64 of shape \[16\]"),
        (lambda m, x: 1.0, "gave a float for batch 1"),
        (lambda m, x: rows_loss(m, x) / 0, "16 of 16 losses that are not finite"),
    ],
)
def test_a_loss_that_is_none_is_refused(evaluate: Callable[..., Tensor], message: str) -> None:
    model = model_of()
    with loka.Probe(model, every=1, max_overhead=None, evaluate=evaluate, batches=[batch(1)]) as probe:
        train(model, probe, 2)
    with pytest.raises(UsageError, match=message):
        probe.profile()


def test_no_held_out_batch_is_told() -> None:
    model = model_of()
    with loka.Probe(model, every=1, max_overhead=None, evaluate=rows_loss, batches=[]) as probe:
        train(model, probe, 2)
    with pytest.raises(UsageError, match="there are no batches"):
        probe.profile()


# --- bytes and files --------------------------------------------------------------------------------------


def test_bytes_are_stated_before_and_bound_what_is_held(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="loka.probe")
    model = model_of()
    probe = loka.Probe(model, every=1, max_overhead=None)
    planned = probe.statistics_bytes
    assert planned == statistics_bytes([(N, K), (N, N)])
    with probe:
        train(model, probe, 6)
    assert 0 < probe.statistics_bytes <= planned
    assert f"at most {planned / 1e6:.1f} MB" in caplog.text


def test_statistics_are_saved_in_the_background(tmp_path: Path) -> None:
    model, path = model_of(), tmp_path / "statistics.safetensors"
    with loka.Probe(model, every=2, max_overhead=None, save_to=path, save_every=4) as probe:
        train(model, probe, 3)
        assert not path.exists()
        train(model, probe, 7)
    known, facts = read_statistics(path)
    assert facts == {"steps_seen": 8, "steps_observed": 4}
    assert int(known["0"][Operand.INPUT].moments.count) == 4 * B


# --- exact references -------------------------------------------------------------------------------------


def precision() -> list[object]:
    mkldnn: object = torch.backends.mkldnn
    return [
        torch.backends.cuda.matmul.fp32_precision,
        getattr(mkldnn, "matmul").fp32_precision,  # noqa: B009 - not in the stub
        torch.backends.fp32_precision,
    ]


def by_backend() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.mark.parametrize(
    "allow",
    [
        lambda: None,
        by_backend,
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
    ],
)
def test_references_are_fp32_and_the_users_choice_comes_back(allow: Callable[[], None]) -> None:
    before = precision()
    try:
        allow()
        chosen = precision()
        with torch.autocast("cpu", torch.bfloat16):
            with exact_products("cpu"):
                assert torch.backends.cuda.matmul.fp32_precision == "ieee"
                assert torch.get_float32_matmul_precision() == "highest"
                a = torch.randn(4, 8)
                assert (a @ a.t()).dtype is torch.float32
            with pytest.raises(RuntimeError, match="stop"), exact_products("cpu"):
                raise RuntimeError("stop")
            assert torch.is_autocast_enabled("cpu")
        assert precision() == chosen
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before[0]
        getattr(torch.backends.mkldnn, "matmul").fp32_precision = before[1]  # noqa: B009


def test_a_raised_every_holds_the_limit() -> None:
    class OneRank:
        def maximum(self, value: int) -> int:
            return value

    schedule = Schedule(
        every=10,
        live_every=1,
        max_overhead=0.01,
        where=torch.device("cpu"),
        ranks=OneRank(),  # type: ignore[arg-type]
    )
    schedule.clock.needed_every = lambda limit: 1234  # type: ignore[method-assign]
    for _ in range(3):
        schedule.adjust()
        assert schedule.every == 10  # too early
    schedule.adjust()
    assert (schedule.every, schedule.raised_to) == (1300, 1300)
