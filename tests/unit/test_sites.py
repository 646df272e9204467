"""Discovery: what a batch reaches, under which name, and why the rest is not planned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from loka.errors import UnknownNameError, UsageError
from loka.sites import find_sites, select_sites
from loka.vocab import Pass, Site


class Cross(nn.Module):
    """A cross net with raw Parameters, the weight on the left as in TorchRec."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x0 = x_l = x.unsqueeze(2)
        for kernel in self.kernels:
            x_l = x0 * torch.matmul(kernel, x_l) + x_l
        return x_l.squeeze(2)


class Interaction(nn.Module):
    def forward(self, x_bfd: Tensor) -> Tensor:
        return torch.bmm(x_bfd, x_bfd.transpose(1, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 64))
        self.interaction = Interaction()
        self.cross = Cross(64, 2)
        self.left = nn.Linear(64, 16)
        self.right = nn.Linear(64, 16, bias=False)
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(16, 1)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.5)

    def forward(self, dense: Tensor) -> Tensor:
        x = self.drop(self.norm(self.bottom(dense)))
        pairs = self.interaction(x.view(-1, 4, 16))
        x = self.cross(x)
        return self.head(self.left(x) + self.right(x)) + pairs.sum((1, 2), keepdim=False)[:, None]


def by_name(sites: list[Site]) -> dict[str, Site]:
    return {site.name: site for site in sites}


def test_sites_of_a_model_in_its_order() -> None:
    model = Model()
    sites = find_sites(model, lambda: model(torch.randn(18, 13)))
    assert [s.name for s in sites] == [
        "bottom.0",
        "bottom.2",
        "interaction.bmm",
        "cross.kernels.0",
        "cross.kernels.1",
        "left",
        "right",
        "never",
        "head",
    ]
    found = by_name(sites)
    first = found["bottom.0"]
    assert (first.kind, first.n, first.k, first.bias, first.rows, first.calls) == (
        "linear",
        32,
        13,
        True,
        18,
        1,
    )
    assert first.parameter == "bottom.0.weight"
    assert first.plannable
    assert found["head"].n == 1
    assert found["head"].plannable  # the planner decides on narrow outputs
    assert not found["right"].bias


def test_sites_functional_products_are_listed_with_their_shapes() -> None:
    model = Model()
    site = by_name(find_sites(model, lambda: model(torch.randn(18, 13))))["cross.kernels.1"]
    assert (site.kind, site.n, site.k, site.rows, site.bias) == ("functional", 64, 64, 18, False)
    assert site.not_planned == "functional"
    assert site.flops == 2 * 18 * 64 * 64


@pytest.mark.parametrize("batch", [1, 33])
def test_d16_an_interaction_is_listed_as_not_fp8(batch: int) -> None:
    model = nn.Sequential(Interaction())
    sites = find_sites(model, lambda: model(torch.randn(batch, 27, 64)))
    assert [(s.name, s.kind, s.rows, s.n, s.k) for s in sites] == [
        ("0.bmm", "interaction", batch * 27, 27, 64)
    ]
    assert sites[0].not_planned == "not FP8: both operands are activations"


def test_d16_query_times_key_of_a_sequence_model_is_listed() -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(3, 7, 32)
    found = by_name(find_sites(model, lambda: model(x, x, x)))
    scores, values = found["attention_scores"], found["attention_values"]
    assert (scores.rows, scores.n, scores.k) == (3 * 4 * 7, 7, 8)
    assert (values.rows, values.n, values.k) == (3 * 4 * 7, 8, 7)
    assert found["in_proj_weight"].flops == 2 * (3 * 7) * (3 * 32) * 32
    assert found["out_proj.weight"].not_planned == "functional"
    assert found["out_proj"].not_planned.startswith("a subclass of nn.Linear")
    assert not any(site.plannable for site in found.values())


def test_sites_sdpa_is_listed() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q)

    model = Attend()
    sites = find_sites(model, lambda: model(torch.randn(2, 4, 7, 8)))
    assert [(s.name, s.rows, s.n, s.k) for s in sites] == [
        ("attention_scores", 2 * 4 * 7, 7, 8),
        ("attention_values", 2 * 4 * 7, 8, 7),
    ]


def test_sites_not_reached_and_lists_its_reason() -> None:
    model = Model()
    never = by_name(find_sites(model, lambda: model(torch.randn(4, 13))))["never"]
    assert (never.rows, never.calls, never.not_planned) == (0, 0, "not reached by the batch")


def test_sites_shared_input_shares_a_group() -> None:
    model = Model()
    found = by_name(find_sites(model, lambda: model(torch.randn(4, 13))))
    assert found["left"].input_group == found["right"].input_group
    groups = [found[name].input_group for name in ("bottom.0", "bottom.2", "left", "head", "never")]
    assert len(set(groups)) == len(groups)


def test_sites_a_view_shares_the_group_and_a_write_ends_it() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x) + self.b(x.view(6, 8)).view(2, 3, 8)
            x.mul_(2)
            return y + self.c(x)

    model = Three()
    found = by_name(find_sites(model, lambda: model(torch.randn(2, 3, 8))))
    assert found["a"].input_group == found["b"].input_group != found["c"].input_group
    assert found["a"].rows == found["b"].rows == 6


def test_sites_module_called_twice_and_tied_weights() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
            self.tied.weight = self.shared.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(self.shared(x)) + self.shared(torch.cat([x, x, x])).sum()

    model = Twice()
    found = by_name(find_sites(model, lambda: model(torch.randn(10, 8))))
    assert (found["shared"].calls, found["shared"].rows) == (2, 20)  # the mean of 10 and 30
    assert found["shared"].flops == 2 * (10 + 30) * 8 * 8
    assert found["tied"].parameter == found["shared"].parameter == "shared.weight"
    assert found["tied"].plannable


class LoraLinear(nn.Linear):
    pass


def test_sites_linears_that_cannot_be_planned_say_why() -> None:
    model = nn.Sequential(
        LoraLinear(8, 8),
        parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.Linear(8, 8),
        nn.LazyLinear(8),
        nn.Linear(8, 8).double(),
    )
    model[2].forward = lambda x: nn.functional.linear(x, model[2].weight, model[2].bias)  # type: ignore[method-assign]
    model[4].requires_grad_(False)

    def run() -> object:
        return model[4](model[:4](torch.randn(4, 8)).double())

    found = by_name(find_sites(model, run))
    assert found["0"].not_planned.startswith("a subclass of nn.Linear: ")
    assert "LoraLinear" in found["0"].not_planned
    assert found["1"].not_planned in ("its weight is parametrized", "not reached by the batch")
    assert found["2"].not_planned == "its forward is replaced on the instance"
    assert found["3"].plannable  # the batch has initialised it
    assert found["4"].not_planned == "its weight is torch.float64"


def test_sites_frozen_layers_are_sites() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    assert all(s.plannable for s in find_sites(model, lambda: model(torch.randn(2, 8))))


def test_sites_bf16_autocast_and_copies_of_a_parameter() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 4)
            self.w = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) @ self.w.to(torch.bfloat16).contiguous()

    model = Copies()

    def run() -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(5, 8))

    found = by_name(find_sites(model, run))
    assert found["lin"].plannable
    assert (found["w"].kind, found["w"].n, found["w"].k, found["w"].rows) == ("functional", 6, 4, 5)


def test_sites_discovery_leaves_no_trace() -> None:
    model = Model().train()
    before = copy.deepcopy(model.state_dict())
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    state = torch.get_rng_state()
    x = torch.randn(6, 13)
    torch.set_rng_state(state)
    find_sites(model, lambda: model(x))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hooks == [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_sites_a_run_that_raises_leaves_no_hooks() -> None:
    model = Model()
    with pytest.raises(RuntimeError):
        find_sites(model, lambda: model(torch.randn(6, 12)))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_sites_compiled_model_has_the_names_of_the_plain_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)))
    model[1] = torch.compile(model[1], backend="eager")
    compiled = torch.compile(model, backend="eager")
    sites = find_sites(compiled, lambda: compiled(torch.randn(3, 8)))
    assert [(s.name, s.parameter) for s in sites] == [
        ("0", "0.weight"),
        ("1.0", "1.0.weight"),
        ("1.1", "1.1.weight"),
    ]


def test_sites_problem_of_a_pass() -> None:
    site = Site("a", "linear", n=32, k=64, bias=True, rows=18)
    problem = site.problem(Pass.WGRAD)
    assert (problem.m, problem.n, problem.k, problem.bias) == (32, 64, 18, False)


def test_sites_a_run_without_products_is_an_error() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="reached no matrix product"):
        find_sites(model, lambda: None)


def test_sites_selection_marks_what_is_left_out() -> None:
    model = Model()
    sites = find_sites(
        model, lambda: model(torch.randn(4, 13)), include=("bottom.*", "head"), exclude=("*.2",)
    )
    reasons = {s.name: s.not_planned for s in sites}
    assert reasons["bottom.0"] == reasons["head"] == ""
    assert reasons["bottom.2"] == "excluded by `*.2`"
    assert reasons["left"] == "no include pattern matches"
    assert reasons["cross.kernels.0"] == "functional"  # the stronger reason stays


def test_sites_pattern_without_match_is_an_error() -> None:
    sites = [Site(name, "linear", 8, 8, True, 4) for name in ("tower.mlp.0", "tower.mlp.2", "head")]
    with pytest.raises(
        UnknownNameError, match=r"site pattern `towr.mlp.\*` matches none of 3 sites"
    ) as caught:
        select_sites(sites, include=("towr.mlp.*",))
    assert "tower.mlp.0" in str(caught.value)
    with pytest.raises(UnknownNameError, match="`heads`"):
        select_sites(sites, exclude=("heads",))
    select_sites(sites, exclude=())
