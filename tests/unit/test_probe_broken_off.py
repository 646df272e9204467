"""Steps that an exception ends while they are observed, as when a loop runs out of memory and tries again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka import Probe
from loka.probe.broken_off import holders_of
from loka.vocab import Operand

ROWS, LESS = 8, 5
SEEN = (Operand.INPUT, Operand.GRAD_OUTPUT)


class Breaks(torch.autograd.Function):
    """The identity; its backward fails where it shall."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: bool) -> Tensor:
        ctx.here = here
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.here:
            raise RuntimeError("out of memory")
        return grads[0], None


class Fragile(nn.Module):
    """Fails between its two linears, in the forward or in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 16)
        self.breaks_in = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.breaks_in == "forward":
            raise RuntimeError("out of memory")
        return self.second(Breaks.apply(x, self.breaks_in == "backward"))  # type: ignore[no-any-return]


def batch(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def run(model: Fragile, rows: int, seed: int, breaks_in: str = "") -> None:
    model.breaks_in = breaks_in
    model(batch(rows, seed)).square().sum().backward()


def again_inside_the_handler(model: Fragile, breaks_in: str) -> None:
    try:
        run(model, ROWS, 1, breaks_in)
    except RuntimeError:
        run(model, LESS, 2)


def again_after_the_handler(model: Fragile, breaks_in: str) -> None:
    try:
        run(model, ROWS, 1, breaks_in)
    except RuntimeError:
        model.zero_grad()
    run(model, LESS, 2)


def seen(probe: Probe) -> dict[tuple[str, Operand], int]:
    return {
        (name, operand): int(known[operand].moments.count)
        for name, known in probe.statistics.items()
        for operand in SEEN
    }


def probe_of(model: nn.Module, **options: Any) -> Probe:
    return Probe(model, **{"every": 1, "max_overhead": None} | options)


@pytest.mark.parametrize("breaks_in", ["forward", "backward"])
@pytest.mark.parametrize("tries", [again_inside_the_handler, again_after_the_handler])
@pytest.mark.parametrize("earlier", [0, 2])
def test_rows_of_a_broken_try_enter_nothing(
    breaks_in: str, tries: Callable[[Fragile, str], None], earlier: int
) -> None:
    model, whole = Fragile(), Fragile()
    whole.load_state_dict(model.state_dict())
    probes = []
    for some, broken in ((model, True), (whole, False)):
        with probe_of(some, live_every=1) as probe:
            for step in range(1 + earlier):
                run(some, ROWS, 10 + step)
                probe.step()
            if broken:
                tries(some, breaks_in)
            else:
                run(some, LESS, 2)
            probe.step()
        probes.append(probe)
    probe, unbroken = probes
    assert set(seen(probe).values()) == {earlier * ROWS + LESS}
    state, wanted = probe.state_dict(), unbroken.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], wanted[key]) for key in state)


@pytest.mark.parametrize("breaks_in", ["forward", "backward"])
def test_the_next_step_is_observed_instead(breaks_in: str) -> None:
    model = Fragile()
    with probe_of(model, every=4) as probe:
        for step in range(1, 9):
            try:
                run(model, ROWS + step, step, breaks_in if step == 4 else "")
            except RuntimeError:
                model.zero_grad()
            probe.step()
    assert set(seen(probe).values()) == {(ROWS + 5) + (ROWS + 8)}
    assert "step 4 was broken off by an exception and not observed" in probe.profile().notes
    assert probe.profile().steps_observed == 2


def test_one_that_breaks_at_every_step_is_not_tried_at_every_step() -> None:
    model = Fragile()
    with probe_of(model, every=4) as probe:
        run(model, ROWS, 0)
        probe.step()
        for step in range(2, 13):
            with pytest.raises(RuntimeError, match="out of memory"):
                run(model, ROWS, step, "forward")
            probe.step()
    broken = [note.split()[1] for note in probe._loop.notes]
    assert broken == ["4", "5", "8", "9", "12"]
    assert probe.statistics == {}


def test_a_step_that_finds_sites_forgets_a_broken_forward_too() -> None:
    model = Fragile()
    with probe_of(model) as probe:
        again_inside_the_handler(model, "forward")
        probe.step()
    assert [(s.name, s.rows, s.calls) for s in probe.sites] == [("first", LESS, 1), ("second", LESS, 1)]


class Catches(nn.Module):
    """Tries one way and takes another where that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Fragile(), nn.Linear(32, 16)
        self.inner.breaks_in = "forward"

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)  # type: ignore[no-any-return]
        except RuntimeError:
            return self.last(x)  # type: ignore[no-any-return]


def test_what_the_model_catches_itself_is_no_broken_step() -> None:
    model = Catches()
    with probe_of(model) as probe:
        for step in range(3):
            model(batch(ROWS, step)).sum().backward()
            probe.step()
    assert int(probe.statistics["last"][Operand.INPUT].moments.count) == 2 * ROWS
    assert int(probe.statistics["inner.first"][Operand.INPUT].moments.count) == 2 * ROWS
    assert probe._loop.notes == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_stops_early_is_no_broken_step(reentrant: bool) -> None:
    model = Fragile()
    with probe_of(model) as probe:
        for step in range(3):
            x = batch(ROWS, step).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
            probe.step()
    assert set(seen(probe).values()) == {2 * ROWS}


def test_evaluation_that_fails_takes_nothing_back() -> None:
    model = Fragile()
    with probe_of(model) as probe:
        run(model, ROWS, 0)
        probe.step()
        run(model, ROWS, 1)
        model.eval()
        with pytest.raises(RuntimeError):
            run(model, ROWS, 2, "forward")
        model.train()
        probe.step()
    assert set(seen(probe).values()) == {ROWS}


class Halts(nn.Sequential):
    """Compiles whole; fails where it runs eagerly and shall."""

    halts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.halts and not torch.compiler.is_compiling():
            raise RuntimeError("out of memory")
        return super().forward(x)  # type: ignore[no-any-return]


def test_no_hook_stays_and_the_stance_comes_back() -> None:
    model, graphs = Halts(nn.Linear(32, 16)), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    with probe_of(compiled) as probe:
        compiled(batch(ROWS, 0)).sum().backward()
        probe.step()
        model.halts = True
        with pytest.raises(RuntimeError, match="out of memory"):
            compiled(batch(ROWS, 1))
        probe.step()
        assert any(m._forward_hooks for m in model.modules())  # the next step is observed
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert graphs == []
    compiled(batch(ROWS, 2))
    assert len(graphs) == 1


def test_holders_are_all_around_the_linears() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Sequential(nn.Linear(2, 2))), "b": nn.Sequential(nn.ReLU())})
    linear = model["a"][0][0]  # type: ignore[index]
    assert holders_of(model, [linear]) == [model, model["a"], model["a"][0]]  # type: ignore[index]
    assert holders_of(linear, [linear]) == [linear]
