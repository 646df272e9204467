"""Probe in loops of every shape: it must not assume that it runs beside the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.vocab import Operand, Pass

B, K, N = 24, 32, 16
STEPS = 6


def model_of(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(K, 48), nn.ReLU(), nn.Linear(48, N))


def batches(count: int = STEPS) -> list[Tensor]:
    return [torch.randn(B, K, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def probe_of(model: nn.Module, **options: object) -> loka.Probe:
    defaults: dict[str, object] = {"every": 2, "live_every": 1, "max_overhead": None}
    return loka.Probe(model, **(defaults | options))  # type: ignore[arg-type]


def train(call: Callable[[Tensor], Tensor], model: nn.Module, probe: loka.Probe, count: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x in batches(count):
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.step()


def observed(probe: loka.Probe, name: str = "2") -> dict[Operand, int]:
    return {o: int(s.moments.count) for o, s in probe.statistics[name].items() if o is not Operand.WEIGHT}


def live_passes(probe: loka.Probe, name: str = "2") -> set[Pass]:
    errors = probe.errors
    return {p for s, p in zip(errors.site, errors.pass_, strict=True) if s == name}


def whole(probe: loka.Probe, steps: int, name: str = "2") -> None:
    """The given number of observed steps, every row of each, all three products tried."""
    assert observed(probe, name) == {Operand.INPUT: steps * B, Operand.GRAD_OUTPUT: steps * B}
    assert live_passes(probe, name) == set(Pass)
    assert all(n == steps for n in probe.errors.observations)


# --- trainers --------------------------------------------------------------------------------------------


class Callback:
    """What a trainer calls between its own things."""

    def __init__(self, probe: loka.Probe) -> None:
        self.probe = probe

    def on_fit_start(self) -> None:
        self.probe.__enter__()

    def on_train_batch_end(self) -> None:
        self.probe.step()

    def on_fit_end(self) -> None:
        self.probe.__exit__(None, None, None)


class Module(nn.Module):
    """As trainers want it: the loss is a method, `forward` is for inference and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model_of()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("a trainer calls training_step")

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Trainer:
    """The order of calls of Lightning's loop: sanity validation, accumulation, closures, validation."""

    def __init__(self, callback: Callback, *, accumulate: int = 1) -> None:
        self.callback, self.accumulate = callback, accumulate

    def fit(self, module: Module, data: list[Tensor]) -> None:
        optimizer = module.configure_optimizers()
        self.callback.on_fit_start()
        self.validate(module, data)
        for first in range(0, len(data), self.accumulate):
            micro = data[first : first + self.accumulate]

            def closure(micro: list[Tensor] = micro) -> Tensor:
                optimizer.zero_grad()
                losses = [module.training_step(x) / len(micro) for x in micro]
                for loss in losses:
                    loss.backward()
                return torch.stack(losses).sum().detach()

            optimizer.step(closure)
            self.callback.on_train_batch_end()
            self.validate(module, data)
        self.callback.on_fit_end()

    @torch.no_grad()
    def validate(self, module: Module, data: list[Tensor]) -> None:
        module.eval()
        for x in data:
            module.training_step(100 * x)
        module.train()


def test_a_trainer_whose_callbacks_call_step() -> None:
    module = Module()
    probe = probe_of(module)
    Trainer(Callback(probe)).fit(module, batches())
    whole(probe, 3, "net.2")
    assert [(s.name, s.calls, s.rows) for s in probe.sites] == [("net.0", 1, B), ("net.2", 1, B)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_gradient_accumulation_counts_every_micro_batch() -> None:
    module = Module()
    probe = probe_of(module)
    Trainer(Callback(probe), accumulate=3).fit(module, batches(12))
    assert observed(probe, "net.2") == {Operand.INPUT: 2 * 3 * B, Operand.GRAD_OUTPUT: 2 * 3 * B}
    assert live_passes(probe, "net.2") == set(Pass)
    assert {s.calls for s in probe.sites} == {3}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_pipeline_that_runs_forward_a_batch_ahead(every: int) -> None:
    """Between two calls of `step` the next forward comes after the last backward."""
    model, data = model_of(), batches(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def pipeline() -> Iterator[Tensor]:
        loss = model(data[0]).square().mean()
        for x in [*data[1:], data[0]]:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            yield x

    with probe_of(model, every=every) as probe:
        for _ in pipeline():
            probe.step()
    rows = observed(probe)
    # Observed steps begin with the second; of the last one the gradient may be in no step any more.
    assert rows[Operand.INPUT] == len(range(every, 9, every)) * B - (B if every == 1 else 0)
    assert rows[Operand.INPUT] - rows[Operand.GRAD_OUTPUT] == (B if 8 % every == 0 else 0)
    assert live_passes(probe) == set(Pass)
    profile = probe.profile()
    assert set(profile.sites.calls) == {1}
    assert not any(m._forward_hooks for m in model.modules())


# --- compiled models --------------------------------------------------------------------------------------


def compiled_whole(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_in_place(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    model.compile(backend="eager")
    return model


def compiled_part(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    model[2] = torch.compile(model[2], backend="eager")
    return model


def compiled_step(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x), backend="eager")  # type: ignore[return-value]


# torch's compiler looks at `.grad` of an input that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("how", [compiled_whole, compiled_in_place, compiled_part, compiled_step])
@pytest.mark.parametrize("before", [True, False])
def test_compiled_before_or_after_attaching(
    how: Callable[..., Callable[[Tensor], Tensor]], before: bool
) -> None:
    torch.compiler.reset()
    model = model_of()
    call = how(model) if before else None
    target = call if isinstance(call, nn.Module) else model
    with probe_of(target) as probe:
        train(call or how(model), model, probe)
    whole(probe, 3)
    assert [s.name for s in probe.sites] == ["0", "2"]
    profile = probe.profile()
    assert set(profile.sites.name) == {"0", "2"}
    assert {"live", "sampled"} == set(profile.errors.source)


# --- autocast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_changes_what_is_seen_and_not_how(autocast: bool) -> None:
    model = model_of()

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float()  # type: ignore[no-any-return]

    with probe_of(model) as probe:
        train(call, model, probe)
    whole(probe, 3)
    plain = [i for i, spec in enumerate(probe.errors.spec_a) if spec == "bf16"]
    # The reference is FP32 although the products run inside the user's region.
    assert all(probe.errors.sqnr_db[i] < 80 for i in plain)


# --- several models, failures -----------------------------------------------------------------------------


def test_two_probes_on_two_models_in_one_loop() -> None:
    student, teacher = model_of(0), model_of(1)
    optimizer = torch.optim.SGD([*student.parameters(), *teacher.parameters()], lr=1e-3)
    with probe_of(student, every=2) as first, probe_of(teacher, every=3) as second:
        for x in batches(6):
            (student(x) - teacher(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            first.step()
            second.step()
    whole(first, 3)
    whole(second, 2)
    assert all(s.calls == 1 for s in [*first.sites, *second.sites])


def test_a_step_that_fails_and_is_caught_goes_on() -> None:
    """A loop that skips a bad batch stays inside its `with` block."""
    model = model_of()
    with probe_of(model) as probe:
        train(model, model, probe, 1)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(B, K + 1))  # in an observed step
        train(model, model, probe, 3)
    whole(probe, 2)
    stance_is_as_it_was(model)


def test_a_failure_in_an_observed_step_leaves_model_and_torch_as_they_were() -> None:
    model = model_of()
    probe = probe_of(model, every=1)

    def loop() -> None:
        with probe:
            train(model, model, probe, 1)
            loss = model(batches(1)[0]).square().mean()
            loss.register_hook(lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            loss.backward()

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    stance_is_as_it_was(model)


def test_a_callback_that_fails_leaves_nothing_behind() -> None:
    model = model_of()

    def on_observed(probe: loka.Probe, step: int) -> None:
        raise RuntimeError("no space left")

    with (
        pytest.raises(RuntimeError, match="no space left"),
        probe_of(model, on_observed=on_observed) as probe,
    ):
        train(model, model, probe)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    stance_is_as_it_was(model)


def test_attaching_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    probe = probe_of(model)

    def broken(linears: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(probe._loop.finder, "start", broken)
    with pytest.raises(KeyboardInterrupt), probe:
        pass
    monkeypatch.undo()
    with probe:
        train(model, model, probe, 2)
    whole(probe, 1)
    stance_is_as_it_was(model)


def stance_is_as_it_was(model: nn.Module) -> None:
    torch.compiler.reset()
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward  # type: ignore[no-any-return]

    torch.compile(model, backend=backend)(torch.zeros(2, K))
    assert compiled, "the process was left eager"


# --- models that change -----------------------------------------------------------------------------------


def test_layers_replaced_and_added_after_attaching(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    caplog.set_level(logging.WARNING, logger="loka.probe")
    with probe_of(model) as probe:
        train(model, model, probe, 4)
        model[2] = nn.Linear(48, 8)
        model.append(nn.Linear(8, N))
        train(model, model, probe, 4)
    # The sixth step found the sites anew, the eighth was observed.
    assert observed(probe, "0")[Operand.INPUT] == 3 * B
    assert observed(probe, "2") == {Operand.INPUT: B, Operand.GRAD_OUTPUT: B}
    assert observed(probe, "3") == {Operand.INPUT: B, Operand.GRAD_OUTPUT: B}
    profile = probe.profile()
    said = "after Probe was attached `3` was added, `2` was replaced"
    assert said in profile.notes
    assert caplog.messages == [f"{said}; sites are found anew"]
    assert list(zip(profile.sites.name, profile.sites.n, strict=True)) == [("0", 48), ("2", 8), ("3", N)]


def test_a_plan_applied_meanwhile_ends_the_observation() -> None:
    model = model_of()
    x = batches(1)[0]
    with probe_of(model) as probe:
        train(model, model, probe, 4)
        loose = loka.Requirement(min_sqnr_db=5, max_row_error_p99=2.0, max_loss_increase=None)
        loka.apply_plan(model, loka.make_plan(probe.profile(), loose))
        train(model, model, probe, 4)
        model(x)
    whole(probe, 2)
    assert probe.profile().notes == [
        "after Probe was attached `0`, `2` were removed: nothing was observed from step 6 on"
    ]
