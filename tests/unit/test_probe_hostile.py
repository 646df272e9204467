"""Probe in real loops: late branches, new weights, modes of their own, models saved, states damaged."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from loka import Probe
from loka.errors import UsageError
from loka.probe.sensitivity.scores import _by_loss_row
from loka.vocab import Operand


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


def probe_of(some: nn.Module, **options: Any) -> Probe:
    return Probe(some, **{"every": 1, "max_overhead": None} | options)


def train(some: nn.Module, probe: Probe, steps: int, rows: int = 8) -> None:
    for _ in range(steps):
        some(torch.randn(rows, 32)).sum().backward()
        probe.step()


def rows_seen(probe: Probe, name: str, operand: Operand = Operand.INPUT) -> int:
    return int(probe.statistics[name][operand].moments.count)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 2.5}, "every=2.5"),
        ({"every": True}, "every=True"),
        ({"every": "3"}, "every='3'"),
        ({"live_every": 1.5}, "live_every=1.5"),
        ({"save_every": 1.5}, "save_every=1.5"),
        ({"max_overhead": "x"}, "max_overhead='x'"),
        ({"max_overhead": True}, "max_overhead=True"),
        ({"seed": "a"}, "seed='a'"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"on_observed": 3}, "on_observed=3"),
        ({"save_to": 5}, "save_to=5"),
        ({"across_ranks": "no"}, "across_ranks='no'"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=rf"Probe\({words}\)"):
        Probe(model(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 1.5}, r"rows=1\.5"),
        ({"rows": 8}, "rows=8"),
        ({"rows": "8"}, "rows='8'"),
        ({"rows": [1.5]}, r"rows=\[1\.5\]"),
        ({"workers": -1}, "workers=-1"),
        ({"workers": True}, "workers=True"),
        ({"workers": "a"}, "workers='a'"),
    ],
)
def test_options_of_a_profile_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=rf"profile\({words}\)"):
        Probe(model()).profile(**options)


def test_the_loop_must_run_in_the_thread_that_entered() -> None:
    some, errors = model(), []

    def loop() -> None:
        try:
            train(some, probe, 1)
        except UsageError as error:
            errors.append(str(error))

    with probe_of(some) as probe:
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    assert "in another thread than the one that entered" in errors[0]
    assert _get_current_function_mode_stack() == []


def test_a_folder_is_no_file_to_save_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        Probe(model(), save_to=tmp_path)


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.later, self.on = nn.Linear(32, 32), nn.Linear(32, 16), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.later(x) if self.on else x


def test_a_branch_that_is_taken_later_becomes_a_site() -> None:
    late = Late()
    with probe_of(late, live_every=1) as probe:
        train(late, probe, 3)
        assert [(s.name, s.rows, s.plannable) for s in probe.sites] == [
            ("first", 8, True),
            ("later", 0, False),
        ]
        late.on = True
        train(late, probe, 4, rows=6)
    assert [(s.name, s.plannable) for s in probe.sites] == [("first", True), ("later", True)]
    assert rows_seen(probe, "later") == 4 * 6
    profile = probe.profile()
    assert {s.name: s.rows for s in profile.sites.sites()}["later"] == 6
    assert "later" in profile.errors.site


def test_a_weight_of_another_shape_starts_its_site_anew() -> None:
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 4)
        some[2].weight = nn.Parameter(torch.randn(20, 32))
        some[2].bias = nn.Parameter(torch.randn(20))
        train(some, probe, 4)
    assert probe.statistics["2"][Operand.GRAD_OUTPUT].moments.mean.numel() == 20
    assert rows_seen(probe, "0") > rows_seen(probe, "2", Operand.GRAD_OUTPUT) > 0
    assert {s.name: s.n for s in probe.sites} == {"0": 32, "2": 20}
    assert any("`2` was given a weight of another shape" in note for note in probe.profile().notes)


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [True, False])
def test_modes_of_the_loop_stay_its_own(inside: bool) -> None:
    some, mine = model(), Counting()
    with probe_of(some) as probe:
        if inside:  # begins within the watched step and goes on behind it
            with mine:
                train(some, probe, 1)
                before = mine.calls
                train(some, probe, 1)
                assert mine.calls > before
        else:  # each begins before a step is prepared and ends within the one that was
            for _ in range(3):
                with mine:
                    train(some, probe, 1)
        assert mine not in _get_current_function_mode_stack()
        assert [s.name for s in probe.sites] == ["0", "2"]
    assert _get_current_function_mode_stack() == []


def test_two_probes_in_one_loop_find_their_own() -> None:
    first, second = model(), nn.Linear(16, 16)
    with probe_of(first) as one, probe_of(second) as other:
        for _ in range(3):
            second(first(torch.randn(8, 32))).sum().backward()
            one.step()
            other.step()
    assert ([s.name for s in one.sites], [s.name for s in other.sites]) == (["0", "2"], [""])
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_is_saved_and_copied_while_it_is_watched(steps: int) -> None:
    """With the hooks that find sites in place, and with those that observe."""
    some = model()
    with probe_of(some) as probe:
        train(some, probe, steps)
        file = io.BytesIO()
        torch.save(some, file)
        file.seek(0)
        saved, copied = torch.load(file, weights_only=False), copy.deepcopy(some)
        for other in (saved, copied):
            other(torch.randn(100, 32)).sum().backward()
        train(some, probe, 2)
    assert rows_seen(probe, "0") == (1 + steps) * 8
    assert torch.equal(saved[0].weight, some[0].weight)


def _vmapped(some: nn.Module) -> Tensor:
    out: Tensor = torch.func.vmap(some)(torch.randn(4, 8, 32))
    return out


def _nested(some: nn.Module) -> Tensor:
    parts = [torch.randn(3, 32), torch.randn(5, 32)]
    out: Tensor = some(torch.nested.nested_tensor(parts, layout=torch.jagged)).values()
    return out


@pytest.mark.parametrize("call", [_vmapped, _nested])
def test_inputs_that_are_no_plain_tensors_do_no_harm(call: Callable[[nn.Module], Tensor]) -> None:
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 1)
        for _ in range(2):
            call(some).sum().backward()
            probe.step()
        train(some, probe, 1)
    assert rows_seen(probe, "0") == 8
    assert any("calls of `0` were not looked at" in note for note in probe.profile().notes)


def test_nothing_but_nested_inputs_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    some = model()
    with probe_of(some) as probe:
        for _ in range(2):
            _nested(some).sum().backward()
            probe.step()
    assert "given nothing to look at" in caplog.text


def learned() -> tuple[nn.Sequential, dict[str, Tensor]]:
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 4)
    return some, probe.state_dict()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("statistics\t0\tinput\tmoments.mean", torch.zeros(3, dtype=torch.float64)),
        ("statistics\t0\tinput\tmoments.mean", None),
        ("statistics\t0\tinput\tmoments.counters", torch.zeros(2)),
        ("statistics\t0\tinput\tcovariance.scatter", torch.zeros(3, 3)),
        ("statistics\t0\tinput\tnonsense.mean", torch.zeros(3)),
        ("statistics\t0\tweights\tmoments.mean", torch.zeros(3)),
        ("passes\t0", torch.zeros(2)),
        ("seen", torch.tensor(-1)),
        ("observed", None),
        ("errors\tone", torch.zeros(20)),
        ("errors\t0\tfwd\ta\tb\texact\tk\tlive\tmany", torch.ones(20)),
        ("errors\t0\tforward\ta\tb\texact\tk\tlive\t0", torch.ones(20)),
        ("errors\t0\tfwd\ta\tb\texact\tk\tlive\t0", torch.full((20,), torch.nan)),
        ("errors\t0\tfwd\ta\tb\texact\tk\tlive\t0", torch.ones(())),
        ("statistics\t0\tinput\tmoments.mean", torch.full((32,), torch.nan, dtype=torch.float64)),
        ("statistics\t0\tinput\tmoments.count", torch.tensor(-1)),
        ("statistics\t0\tinput\thistory.amax", torch.zeros(3)),
        ("statistics\t0\tinput\twindow.total", torch.zeros(3, dtype=torch.int64)),
        ("m_seen\t0", torch.tensor([[8, -1]])),
        ("m_seen\t0", torch.tensor([8])),
        ("calls\t0", torch.tensor(-3)),
        ("passes\t0", torch.full((3,), torch.nan)),
        ("seen", "three"),
    ],
)
def test_a_damaged_state_changes_nothing(key: str, value: Any) -> None:
    some, state = learned()
    probe = probe_of(some)
    probe.load_state_dict(state)
    before = probe.state_dict()
    damaged = {k: v for k, v in state.items() if k != key} | ({} if value is None else {key: value})
    with pytest.raises(UsageError, match=r"state|statistics"):
        probe.load_state_dict(damaged)
    after = probe.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("state", [None, [1, 2], {3: torch.zeros(1)}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match="this is no state of a Probe but a"):
        Probe(model()).load_state_dict(state)


def test_statistics_of_other_features_are_of_another_model() -> None:
    _, state = learned()
    other = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16))
    older = {k: v for k, v in state.items() if k != "sites"}  # a state without the sites' shapes
    with pytest.raises(UsageError, match="of another model") as error:
        Probe(other).load_state_dict(older)
    assert "0  input has 48 features here, 32 in the state" in str(error.value)


def test_a_state_may_be_loaded_within_the_loop() -> None:
    some = model()
    with probe_of(some) as probe:
        train(some, probe, 4)
        state = probe.state_dict()
        train(some, probe, 4)
        probe.load_state_dict(state)
        train(some, probe, 2)
    assert rows_seen(probe, "0") == (3 + 2) * 8


def test_rows_of_the_loss_are_found_where_only_one_dimension_can_be_them() -> None:
    values = torch.arange(12.0)
    assert torch.equal(_by_loss_row(values, torch.Size([3, 4]), 4), values.view(3, 4).sum(0))  # type: ignore[arg-type]
    assert torch.equal(_by_loss_row(values, torch.Size([12]), 4), values.view(4, 3).sum(1))  # type: ignore[arg-type]
    assert _by_loss_row(torch.zeros(16), torch.Size([4, 4]), 4) is None


@pytest.mark.parametrize("known", [False, True])
def test_a_state_may_be_loaded_between_a_forward_and_its_backward(known: bool) -> None:
    """The gradients that arrive then are of a step that the state knows nothing of."""
    some, state = learned()
    if not known:
        state = probe_of(some).state_dict()
    with probe_of(some) as probe:
        train(some, probe, 3)
        out = some(torch.randn(8, 32))
        probe.load_state_dict(state)
        out.sum().backward()
        probe.step()
        if known:
            assert rows_seen(probe, "0") == rows_seen(probe, "2", Operand.GRAD_OUTPUT) == 3 * 8
        else:
            assert probe.statistics == {}
        train(some, probe, 2)
    assert rows_seen(probe, "0") == (3 * 8 if known else 0) + 2 * 8
