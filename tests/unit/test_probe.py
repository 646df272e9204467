"""Probe against direct computation, and that it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.errors import UsageError
from loka.kernels import device_of
from loka.numerics import cast_operand, decode, exact_product, sqnr_db
from loka.probe.live import Captured, live_errors, site_generator
from loka.probe.strata import stratified_rows
from loka.probe.trial import ERROR_FIELDS, trials_of
from loka.vocab import Format, Operand, Pass, Site

B, K, N = 48, 32, 16


def model_of(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(K, 64), nn.ReLU(), nn.Linear(64, N))


def train(
    model: nn.Module,
    steps: int,
    probe: loka.Probe | None = None,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
    seen: list[torch.Tensor] | None = None,
) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for i in range(steps):
        x = torch.randn(B, K, generator=torch.Generator().manual_seed(i))
        if seen is not None:
            seen.append(x)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (run or model)(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if probe is not None:
            probe.step()
    return losses


def test_training_is_bitwise_the_same_with_probe() -> None:
    plain, watched = model_of(), model_of()
    want = train(plain, 12)
    with loka.Probe(watched, every=3) as probe:
        got = train(watched, 12, probe)
    assert got == want
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks for m in watched.modules())


def test_input_statistics_equal_those_of_the_observed_rows() -> None:
    model, seen = model_of(), []
    with loka.Probe(model, every=4) as probe:
        train(model, 12, probe, seen=seen)
    rows = torch.cat([seen[i] for i in (3, 7, 11)]).double()
    moments = probe.statistics["0"][Operand.INPUT].moments
    assert moments.count.item() == 3 * B
    assert torch.allclose(moments.mean, rows.mean(dim=0), rtol=1e-9, atol=1e-12)
    assert torch.allclose(moments.std, rows.std(dim=0), rtol=1e-9)
    assert probe.statistics["0"][Operand.GRAD_OUTPUT].moments.count.item() == 3 * B
    assert probe.statistics_bytes == sum(m.nbytes for s in probe.statistics.values() for m in s.values())


def test_live_errors_equal_a_direct_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(*s, generator=generator) for s in ((B, K), (N, K), (B, N)))
    captured = Captured(x, w, x.abs().amax(), g, g.abs().amax())
    site = Site("s", "linear", N, K, True, B)
    trials = trials_of(site, device_of("cpu"))
    values = live_errors(captured, trials, site_generator(0, "s", "t"))
    operands = {Pass.FWD: (x, w), Pass.DGRAD: (g, w.t()), Pass.WGRAD: (g.t(), x.t())}
    checked = 0
    for trial, row in zip(trials, values.tolist(), strict=True):
        if not trial.spec_a.is_quantized:
            continue
        a, b = operands[trial.pass_]
        qa = decode(cast_operand(a, trial.spec_a.with_transposed(False)), dtype=torch.float64)
        qb = decode(cast_operand(b, trial.spec_b.with_transposed(False)), dtype=torch.float64)
        ref = exact_product(a, b)
        noise = (qa @ qb.t() - ref).square().sum()
        got = dict(zip(ERROR_FIELDS, row, strict=True))
        want_db = 10 * math.log10(ref.square().sum() / noise)
        assert sqnr_db(got["signal"], got["noise"]) == pytest.approx(want_db, abs=1e-3)
        checked += 1
    assert checked == len({t.key for t in trials}) - 3  # all but bf16's own three
    assert {t.pass_ for t in trials} == set(Pass)


def test_e5m2_gradients_are_tried_in_the_backward_passes_only() -> None:
    trials = trials_of(Site("s", "linear", N, K, True, B), device_of("cpu"))
    formats = {(t.pass_, t.spec_a.format) for t in trials if t.spec_a.is_quantized}
    assert (Pass.FWD, Format.E5M2) not in formats
    assert {(Pass.DGRAD, Format.E5M2), (Pass.WGRAD, Format.E5M2)} <= formats


def test_tensorwise_scale_comes_from_all_rows_not_from_the_sample() -> None:
    x = torch.randn(300, K, generator=torch.Generator().manual_seed(0))
    x[7] *= 1e7  # a row that a sample may miss
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    quiet = Captured(x[8:264], w, x.abs().amax())
    trials = [
        t for t in trials_of(Site("s", "linear", N, K, False, 300), device_of("cpu"))
        if t.key[:3] == (Pass.FWD, "e4m3.tensorwise", "e4m3.tensorwise")
    ]  # fmt: skip
    row = live_errors(quiet, trials, site_generator(0, "s", "t"))[0]
    assert row[ERROR_FIELDS.index("row_p50")] > 0.5


def test_profile_has_live_and_sampled_errors_of_every_pass_that_ran() -> None:
    model = model_of()
    with loka.Probe(model, every=2) as probe:
        train(model, 12, probe)
    profile = probe.profile()
    errors = profile.errors
    assert set(errors.source) == {"live", "sampled"}
    ran = set(zip(errors.site, errors.pass_, strict=True))
    assert ("2", Pass.DGRAD) in ran
    assert ("0", Pass.DGRAD) not in ran  # the batch needs no gradient
    assert profile.steps_observed == 6
    assert profile.sites.m_p50 == [B, B]
    assert profile.step is not None
    shares = profile.step
    total = (
        shares.eligible_gemm + shares.other_gemm + shares.norm_cast_activation
        + shares.embedding + shares.optimizer + shares.other
    )  # fmt: skip
    assert total == pytest.approx(1.0)
    assert shares.ceiling == pytest.approx(1 / (1 - shares.eligible_gemm / 2))
    again = probe.profile()
    assert len(again.errors) == len(errors)


def test_frozen_layer_has_no_weight_gradient_pass() -> None:
    model = model_of()
    model[2].weight.requires_grad_(False)
    with loka.Probe(model, every=2) as probe:
        train(model, 4, probe)
    ran = set(zip(*(getattr(probe.profile().errors, c) for c in ("site", "pass_")), strict=True))
    assert ("2", Pass.WGRAD) not in ran
    assert ("2", Pass.DGRAD) in ran


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forwards_are_not_counted_twice(reentrant: bool) -> None:
    model = model_of()

    def run(x: torch.Tensor) -> torch.Tensor:
        out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        assert isinstance(out, torch.Tensor)
        return out

    with loka.Probe(model, every=2) as probe:
        train(model, 4, probe, run)
    moments = probe.statistics["0"]
    assert moments[Operand.INPUT].moments.count.item() == 2 * B
    assert moments[Operand.GRAD_OUTPUT].moments.count.item() == 2 * B
    assert all(site.calls == 1 for site in probe.sites)


def test_compiled_model_is_observed() -> None:
    model = model_of()
    compiled = torch.compile(model, backend="eager")
    with loka.Probe(model, every=2) as probe:
        train(model, 4, probe, compiled)
    assert probe.statistics["0"][Operand.INPUT].moments.count.item() == 2 * B


def test_evaluation_between_steps_is_left_out() -> None:
    model = model_of()
    with loka.Probe(model, every=1) as probe:
        for _ in range(2):
            model.eval()
            model(100 * torch.randn(1000, K))
            model.train()
            train(model, 1, probe)
    assert probe.statistics["0"][Operand.INPUT].moments.count.item() == B
    assert [(site.calls, site.rows) for site in probe.sites] == [(1, B), (1, B)]


def test_bad_rows_are_counted_and_kept_out() -> None:
    model = model_of()
    with loka.Probe(model, every=1) as probe:
        train(model, 1, probe)
        x = torch.randn(B, K)
        x[5, 3] = math.inf
        model(x).nan_to_num().sum().backward()
        probe.step()
    moments = probe.statistics["0"][Operand.INPUT].moments
    assert moments.nonfinite_rows.item() == 1
    assert moments.count.item() == B - 1
    assert torch.isfinite(moments.amax).all()


def test_state_survives_a_resume() -> None:
    whole, first = model_of(), model_of()
    with loka.Probe(whole, every=3) as reference:
        train(whole, 12, reference)
    with loka.Probe(first, every=3) as before:
        train(first, 6, before)
    state = before.state_dict()
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    after = loka.Probe(first, every=3)
    after.load_state_dict(state)
    moments = after.statistics["0"][Operand.INPUT].moments
    assert moments.count.item() == 2 * B
    assert after.state_dict().keys() == state.keys()
    for key, tensor in after.state_dict().items():
        assert torch.equal(tensor, state[key])


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_a_resumed_training_observes_the_steps_of_an_unbroken_one(stop: int) -> None:
    """Also where the very next step is due: the sites, not found yet in the new process, are found there."""
    batches = [torch.randn(B, K, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    model = model_of()

    def run(probe: loka.Probe, some: list[torch.Tensor]) -> None:
        with probe:
            for x in some:
                model(x).square().mean().backward()
                model.zero_grad()
                probe.step()

    whole, before, after = (loka.Probe(model, every=3) for _ in range(3))
    run(whole, batches)
    run(before, batches[:stop])
    after.load_state_dict(before.state_dict())
    run(after, batches[stop:])
    want, got = whole.state_dict(), after.state_dict()
    assert got.keys() == want.keys()
    for key, tensor in got.items():
        assert torch.equal(tensor, want[key]), key
    assert after.shares is None or after.shares.step_us > 0
    assert after.profile().errors == whole.profile().errors


def test_settles_once_intervals_are_narrow() -> None:
    model = model_of()
    with loka.Probe(model, every=1, live_every=1) as probe:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x = torch.randn(B, K, generator=torch.Generator().manual_seed(0))
        answers = []
        for _ in range(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            answers.append(probe.step())
    assert answers[0] is False
    assert answers[-1] is True


def test_a_step_that_never_came_is_not_counted() -> None:
    """After 5 steps the sixth is to be timed, after 7 the eighth is to be observed; the loop ends before."""
    for steps, every in ((5, 100), (7, 4)):
        model = model_of()
        with loka.Probe(model, every=every) as probe:
            train(model, steps, probe)
        assert probe.state_dict()["observed"].item() == steps // every
        assert not any(m._forward_hooks for m in model.modules())
        assert (probe.shares is None) == (steps == 5)


def test_a_step_that_fails_is_not_counted() -> None:
    model = model_of()
    probe = loka.Probe(model, every=2)

    def loop() -> None:
        with probe:
            train(model, 3, probe)
            model(torch.randn(B, K + 1))  # would have been observed

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        loop()
    assert probe.state_dict()["observed"].item() == 1
    assert not any(m._forward_hooks for m in model.modules())


def test_wrong_use_says_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="nothing to observe"):
        loka.Probe(nn.ReLU())
    with pytest.raises(UsageError, match="got a str"):
        loka.Probe("model")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="every=0"):
        loka.Probe(model_of(), every=0)
    probe = loka.Probe(model_of())
    with pytest.raises(UsageError, match="outside its `with` block"):
        probe.step()
    with probe, pytest.raises(UsageError, match="no step was observed"):
        probe.profile()


def test_a_loop_that_never_calls_the_model() -> None:
    with loka.Probe(model_of(), every=1) as probe:
        for _ in range(5):
            probe.step()
        with pytest.raises(UsageError, match="no step was observed"):
            probe.profile()


def test_row_samples_are_reproducible_and_bounded() -> None:
    assert stratified_rows(10, 10, torch.Generator()) is None
    first = stratified_rows(5000, 1024, site_generator(1, "a", "p"))
    again = stratified_rows(5000, 1024, site_generator(1, "a", "p"))
    other = stratified_rows(5000, 1024, site_generator(1, "b", "p"))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique()) == 1024


def test_two_probes_in_one_loop_leave_torch_as_it_was() -> None:
    """Each step's stance is put back by whoever ends last, in any order of ends."""
    model = model_of()
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward  # type: ignore[no-any-return]

    first, second = loka.Probe(model, every=2), loka.Probe(model, every=3)
    with first:
        train(model, 1, first)
        with second:
            for _ in range(6):
                train(model, 1, first)
                second.step()
            first.__exit__(None, None, None)
    assert not any(m._forward_hooks for m in model.modules())
    assert first.profile().errors.site
    assert second.profile().errors.site
    torch.compile(model, backend=backend)(torch.zeros(2, K))
    assert compiled, "the process was left eager"


def test_what_cannot_be_observed_is_told_with_its_reason() -> None:
    with pytest.raises(UsageError, match=r"can be planned.*\n  0  its weight is torch.float64"):
        loka.Probe(model_of().double())
    model = model_of()
    with loka.Probe(model, every=2) as probe:
        train(model, 4, probe)
    loose = loka.Requirement(min_sqnr_db=10, max_row_error_p99=1.0, max_loss_increase=None)
    loka.apply_plan(model, loka.make_plan(probe.profile(), loose))
    with pytest.raises(UsageError, match="carries a plan"):
        loka.Probe(model)
    with probe, pytest.raises(UsageError, match="attached already"), probe:
        pass
