"""Probe on models that are changed, moved, traced, pruned or saved by the loop around it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from loka import Probe
from loka.errors import UsageError
from loka.vocab import Operand

ROWS = 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


def probe_of(some: nn.Module, **options: Any) -> Probe:
    return Probe(some, **{"every": 1, "max_overhead": None} | options)


def train(some: nn.Module, probe: Probe, steps: int) -> None:
    for _ in range(steps):
        some(torch.randn(ROWS, 32)).sum().backward()
        probe.step()


def rows_seen(probe: Probe, name: str, operand: Operand = Operand.INPUT) -> int:
    return int(probe.statistics[name][operand].moments.count)


# --- another shape ----------------------------------------------------------------------------------------


def widen_output(some: nn.Sequential) -> None:
    some[2].weight, some[2].bias = nn.Parameter(torch.randn(20, 32)), nn.Parameter(torch.randn(20))


@pytest.mark.parametrize("every", [1, 4])
def test_a_loop_that_ends_before_a_changed_model_ran_keeps_what_it_knows(every: int) -> None:
    """The sites of the changed model are to be found in a step that never comes."""
    some = model()
    with probe_of(some, every=every) as probe:
        train(some, probe, 2 * every - 2 or 3)
        widen_output(some)
        some(torch.randn(ROWS, 32)).sum().backward()
        probe.step()
    profile = probe.profile()
    assert [(s.name, s.n, s.k) for s in profile.sites.sites()] == [("0", 32, 32), ("2", 20, 32)]
    assert any("`2` was given a weight of another shape" in note for note in profile.notes)
    assert "0" in profile.errors.site


def test_a_weight_of_another_shape_after_the_last_observed_step() -> None:
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 4)
    some[0].weight = nn.Parameter(torch.randn(32, 48))
    profile = probe.profile()
    sites = {s.name: s for s in profile.sites.sites()}
    assert (sites["0"].k, sites["0"].rows, sites["0"].plannable) == (48, 0, False)
    assert sites["2"].rows == ROWS
    assert set(profile.errors.site) == {"2"}
    assert "weights got another shape after they were observed, nothing is known of `0`" in profile.notes
    probe_of(some).load_state_dict(probe.state_dict())


def test_a_model_that_was_moved_is_refused() -> None:
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 3)
    some[2].to_empty(device="meta")
    with pytest.raises(UsageError, match="`2` was on cpu when Probe looked for linears and is on meta now"):
        probe.profile()


# --- weights that are computed ----------------------------------------------------------------------------


def pruned(linear: nn.Linear) -> None:
    prune.l1_unstructured(linear, "weight", 0.5)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("change", [pruned, weight_norm])
@pytest.mark.parametrize("between", [True, False])
def test_a_weight_that_becomes_computed_in_an_observed_step(
    change: Callable[[nn.Linear], object], between: bool
) -> None:
    """Before its forward, and between its forward and its backward."""
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 3)
        out = some(torch.randn(ROWS, 32)) if between else None
        change(some[0])
        (some(torch.randn(ROWS, 32)) if out is None else out).sum().backward()
        probe.step()
        train(some, probe, 2)
    profile = probe.profile()
    why = {s.name: s.not_planned for s in profile.sites.sites()}
    assert why["0"]
    assert why["2"] == ""
    assert any("`0` was removed" in note for note in profile.notes)
    assert rows_seen(probe, "2") == 4 * ROWS  # the step in which the sites are found anew is not observed


# --- traced -----------------------------------------------------------------------------------------------


def exported(some: nn.Module) -> None:
    program = torch.export.export(some, (torch.randn(ROWS, 32),)).module()
    x = torch.randn(ROWS, 32)
    assert torch.equal(program(x), some.eval()(x))
    some.train()


def fake(some: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        some(torch.randn(3, 32))


def fx(some: nn.Module) -> None:
    traced = make_fx(some)(torch.randn(3, 32))
    names = [str(node.target) for node in traced.graph.nodes]
    assert not any("bincount" in name or "frexp" in name for name in names), names


def jit(some: nn.Module) -> None:
    traced = torch.jit.trace(some, (torch.randn(3, 32),), check_trace=False)  # type: ignore[no-untyped-call]
    assert not any("bincount" in str(node) for node in traced.graph.nodes())


@pytest.mark.parametrize("trace", [exported, fake, fx, jit])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_model_that_is_traced_while_it_is_watched(trace: Callable[[nn.Module], None], first: bool) -> None:
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 0 if first else 1)
        trace(some)
        train(some, probe, 2)
    assert rows_seen(probe, "0") == ROWS * (1 if first else 2)
    assert [(s.name, s.rows, s.calls) for s in probe.sites] == [("0", ROWS, 1), ("2", ROWS, 1)]


# --- saved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_saved_while_it_is_watched_opens_without_loka(steps: int, tmp_path: Path) -> None:
    some, path, x = model(), tmp_path / "model.pt", torch.ones(2, 32)
    with probe_of(some) as probe:
        train(some, probe, steps)
        torch.save(some, path)
    program = (
        "import sys; sys.modules['loka'] = None\n"
        "import torch; model = torch.load(sys.argv[1], weights_only=False)\n"
        "out = model(torch.ones(2, 32)); out.sum().backward(); print(out.double().sum().item())"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert math.isclose(float(ran.stdout), some(x).double().sum().item(), rel_tol=1e-6)


# --- what cannot be multiplied, or overflows --------------------------------------------------------------


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).values())  # type: ignore[no-any-return]


def test_a_site_that_only_nested_tensors_reach_is_listed_with_its_reason() -> None:
    some = Ragged()
    with probe_of(some) as probe:
        for _ in range(3):
            parts = [torch.randn(3, 32), torch.randn(5, 32)]
            some(torch.nested.nested_tensor(parts, layout=torch.jagged)).sum().backward()
            probe.step()
    profile = probe.profile()
    found = [(s.name, s.rows, s.not_planned) for s in profile.sites.sites()]
    assert found == [("first", 0, "an operand is nested"), ("second", 8, "")]
    assert set(profile.errors.site) == {"second"}


def test_outputs_that_are_not_finite_are_named() -> None:
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 3)
    trials = probe._loop._trials["2"][:1]
    numbers = torch.tensor([[1.0, torch.inf, 0.1, torch.inf, torch.inf, torch.nan, 0.1, 0.0, 0.0]])
    probe._loop.log.add("2", trials, numbers.double())
    profile = probe.profile()
    named = [note for note in profile.notes if "not finite where FP32's was" in note]
    trial = trials[0]
    key = f"`2` {trial.pass_} {trial.spec_a.recipe_key} x {trial.spec_b.recipe_key};"
    assert [key in note for note in named] == [True]
    errors = profile.errors
    ruined = [i for i, worst in enumerate(errors.row_max) if worst == 1e30]
    assert [(errors.site[i], errors.pass_[i], errors.spec_a[i]) for i in ruined] == [("2", *trial.key[:2])]
    assert errors.sqnr_db[ruined[0]] < 0
