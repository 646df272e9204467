"""Row scores and direct trials against FP64 and models whose loss is known in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from loka.numerics import amax_of, cast_operand, decode, decode_scale
from loka.probe.sensitivity import (
    RecipeProduct,
    direct_changes,
    joint_change,
    predicted_joint,
    relative_change,
    row_scores,
)
from loka.probe.sensitivity import stand_in as stand_in_module
from loka.vocab import RECIPES, Accumulation, Format, Granularity, OperandSpec, ProductRecipe

TENSORWISE, ROWWISE = RECIPES["tensorwise"].fwd, RECIPES["rowwise"].fwd
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Off:
    """y + error, whatever x is: an error that is known."""

    error: float
    spec_a: str = "off"
    spec_b: str = "off"

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        return (
            nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double()) + self.error
        ).to(out_dtype)


def clicks(rows: int, features: int, *, batches: int = 3, seed: int = 0) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, features, generator=g), torch.randint(0, 2, (rows,), generator=g).float())
        for _ in range(batches)
    ]


def log_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.binary_cross_entropy_with_logits(
        model(x).squeeze(1).double(), y.double(), reduction="none"
    )


def tower(*, seed: int = 0) -> nn.Sequential:
    g = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / math.sqrt(p.shape[-1]))
    return model


def test_the_logit_site_is_exact_to_second_order() -> None:
    """Adding e to the logit changes BCE by (p - y) e + p (1 - p) e^2 / 2 + O(e^3), row by row."""
    model, batches, e = tower(), clicks(40, 16), 0.01
    scores = row_scores(model, log_loss, batches, {"4": [Off(e)]})
    assert scores is not None
    assert scores.basis == "logit"
    z = torch.cat([model(x).squeeze(1) for x, _ in batches]).detach().double()
    y = torch.cat([y for _, y in batches]).double()
    p = torch.sigmoid(z)
    # fp32 logits are 1e-7 apart, 1e-5 of e.
    torch.testing.assert_close(scores.first[0].double(), (p - y) * e, rtol=1e-4, atol=0)
    bend = p * (1 - p) * e**2 / 2
    torch.testing.assert_close(scores.shift([0]), (p - y) * e + bend, rtol=1e-4, atol=2e-7)
    a = scores.first[0].double()
    torch.testing.assert_close(scores.curvature * a.square() / 2, bend, rtol=1e-3, atol=0)
    assert scores.second(0) == pytest.approx(float(bend.mean() / scores.losses.mean()), rel=1e-3)
    truth = nn.functional.binary_cross_entropy_with_logits(z + e, y, reduction="none") - scores.losses
    assert float(scores.shift([0]).mean()) == pytest.approx(float(truth.mean()), rel=1e-3)


def test_first_order_is_the_gradient_times_the_error_at_any_site() -> None:
    model, batches = tower(), clicks(64, 16, batches=2)
    scores = row_scores(model, log_loss, batches, {"0": [TENSORWISE], "2": [ROWWISE]})
    assert scores is not None
    start = 0
    for x, y in batches:
        for number, (site, recipe) in enumerate((("0", TENSORWISE), ("2", ROWWISE))):
            linear = model.get_submodule(site)
            h = x if site == "0" else model[:2](x)
            assert isinstance(linear, nn.Linear)
            out = linear(h).detach().requires_grad_()
            rest = model[int(site) + 1 :](out).squeeze(1).double()
            nn.functional.binary_cross_entropy_with_logits(rest, y.double(), reduction="sum").backward()
            q = decode(cast_operand(h, recipe.a)) @ decode(cast_operand(linear.weight.detach(), recipe.b)).t()
            error = q + linear.bias - out
            assert out.grad is not None
            expected = (error * out.grad).sum(1).detach()
            found = scores.first[number, start : start + len(x)]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
        start += len(x)


def test_estimates_agree_with_direct_trials_to_third_order() -> None:
    """Halving the error must shrink what first and second order leave out by more than four times."""
    model, batches = tower(), clicks(200, 16)
    left = []
    for e in (0.2, 0.1):
        scores = row_scores(model, log_loss, batches, {"4": [Off(e)]})
        assert scores is not None
        direct = direct_changes(model, log_loss, batches, [{"4": Off(e)}])
        left.append(float((direct.differences[0] - scores.shift([0])).abs().mean()))
    assert left[1] < left[0] / 4


def test_fisher_curvature_where_there_is_no_single_logit() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(50) % 3

    def evaluate(m: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(m(batch), labels, reduction="none")

    scores = row_scores(model, evaluate, [x], {"0": [Off(1e-2)]})
    assert scores is not None
    assert scores.basis == "fisher"
    a = scores.first[0].double()
    torch.testing.assert_close(scores.shift([0]), a + a.square() / 2)


def test_fishers_identity_holds_for_labels_of_the_models_own() -> None:
    """With labels drawn from the model, the mean of a^2 is that of the exact curvature term."""
    model = tower(seed=3)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(20_000, 16, generator=g)
    with torch.no_grad():
        y = (torch.rand(20_000, generator=g) < torch.sigmoid(model(x).squeeze(1))).float()
    scores = row_scores(model, log_loss, [(x, y)], {"0": [TENSORWISE]})
    assert scores is not None
    a = scores.first[0].double()
    assert float(a.square().mean()) == pytest.approx(float((scores.curvature * a.square()).mean()), rel=0.1)


def test_a_loss_that_is_not_a_log_loss_has_its_own_curvature() -> None:
    """Squared error of one output: l'' / l'^2 = 2 / (2 r)^2, so the second-order term is e^2 exactly."""
    model, x = tower(), torch.randn(30, 16)

    def squared(m: nn.Module, batch: Tensor) -> Tensor:
        return (m(batch).squeeze(1) - 1.0).square()

    scores = row_scores(model, squared, [x], {"4": [Off(0.25)]})
    direct = direct_changes(model, squared, [x], [{"4": Off(0.25)}])
    assert scores is not None
    torch.testing.assert_close(scores.shift([0]), direct.differences[0], rtol=1e-4, atol=1e-5)


class PerField(nn.Module):
    """Linears over fields: their rows are rows times fields, flat, folded or in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.flat = nn.Linear(8, 8)
        self.turned = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5, 4]
        h = torch.tanh(self.inner(x))
        h = torch.tanh(self.flat(h.reshape(-1, 8))).view(len(x), 5, 8)
        h = torch.tanh(self.turned(h.transpose(0, 1))).transpose(0, 1)  # [5, B, 8] inside
        return self.head(h.sum(1))


@pytest.mark.parametrize("site", ["inner", "flat", "turned"])
def test_rows_of_a_site_are_mapped_to_rows_of_the_loss(site: str) -> None:
    torch.manual_seed(0)
    model = PerField()
    x, y = torch.randn(7, 5, 4), torch.tensor([0.0, 1, 0, 1, 1, 0, 1])
    scores = row_scores(model, log_loss, [(x, y)], {site: [Off(3e-3)]})
    direct = direct_changes(model, log_loss, [(x, y)], [{site: Off(3e-3)}])
    assert scores is not None
    assert not scores.unattributed
    torch.testing.assert_close(scores.shift([0]), direct.differences[0], rtol=3e-2, atol=3e-6)


def test_rows_that_cannot_be_told_apart_are_said_to_be_unknown() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            shared = self.table(torch.ones(3, 4))  # 3 rows that every row of the loss depends on
            return self.head(x + shared.mean(0))

    scores = row_scores(Shared(), log_loss, clicks(10, 4), {"table": [TENSORWISE], "head": [TENSORWISE]})
    assert scores is not None
    assert scores.unattributed == {0}


def test_a_site_called_twice_adds_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.again(torch.tanh(self.again(x)))))

    torch.manual_seed(1)
    model, batches = Twice(), clicks(30, 6)
    scores = row_scores(model, log_loss, batches, {"again": [Off(3e-3)]})
    direct = direct_changes(model, log_loss, batches, [{"again": Off(3e-3)}])
    assert scores is not None
    torch.testing.assert_close(scores.shift([0]), direct.differences[0], rtol=3e-2, atol=3e-6)


def test_errors_that_cancel_or_add_are_seen_together() -> None:
    """Four equal outputs are summed to the logit: an error of -e/4 in each cancels one of e in the logit."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight.fill_(1.0)
    batches = clicks(400, 5)
    plus, same, opposite = Off(0.04), Off(0.01), Off(-0.01)
    scores = row_scores(model, log_loss, batches, {"1": [plus], "0": [opposite, same]})
    assert scores is not None
    cancel = predicted_joint(scores, {"1": plus, "0": opposite})
    assert abs(cancel.delta) < 1e-7
    assert scores.change([0]).delta + scores.change([1]).delta > 1e-5, "alone, each has its curvature"
    add = predicted_joint(scores, {"1": plus, "0": same})
    measured = joint_change(model, log_loss, batches, {"1": plus, "0": same})
    assert add.delta == pytest.approx(measured.delta, rel=1e-2)
    assert predicted_joint(scores, {}).delta == 0.0


def test_the_relative_change_and_its_error_against_a_bootstrap() -> None:
    g = torch.Generator().manual_seed(5)
    losses = torch.rand(4000, generator=g, dtype=torch.float64) + 0.1
    differences = 1e-3 * torch.randn(4000, generator=g, dtype=torch.float64) + 2e-3 * losses
    found = relative_change(differences, losses)
    assert found.delta == pytest.approx(float(differences.sum() / losses.sum()))
    picks = torch.randint(0, 4000, (800, 4000), generator=g)
    ratios = differences[picks].mean(1) / losses[picks].mean(1)
    assert found.se == pytest.approx(float(ratios.std()), rel=0.1)


def test_pieces_of_rows_are_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(700, 48), torch.randn(32, 48)
    x[650] *= 1000  # in the last piece: a scale of each piece alone would be another
    bias = torch.randn(32)
    for name in ("tensorwise", "rowwise", "blockwise", "mx"):
        product = RecipeProduct(RECIPES[name].fwd)
        whole = product(x, w, bias, out_dtype=torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(stand_in_module, "_CHUNK_ELEMENTS", 128 * 48)
            pieces = product(x, w, bias, out_dtype=torch.float32)
        torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-4)
    scale = decode_scale(amax_of(x, Granularity.TENSORWISE), Format.E4M3, TENSORWISE.a.scale_rounding)
    by_hand = decode(cast_operand(x, TENSORWISE.a, scale=scale)) @ decode(cast_operand(w, TENSORWISE.b)).t()
    found = RecipeProduct(TENSORWISE)(x, w, bias, out_dtype=torch.float32)
    torch.testing.assert_close(found, by_hand + bias, rtol=1e-6, atol=1e-4)


def test_a_recipe_that_no_kernel_has_is_emulated() -> None:
    e5 = OperandSpec.of(Format.E5M2, Granularity.TENSORWISE)
    product = RecipeProduct(ProductRecipe(e5, e5, Accumulation.FAST))
    x, w = torch.randn(20, 16), torch.randn(8, 16)
    expected = decode(cast_operand(x, e5)) @ decode(cast_operand(w, e5)).t()
    torch.testing.assert_close(product(x, w, None, out_dtype=torch.float32), expected)
    assert (product.spec_a, product.spec_b) == ("e5m2.tensorwise", "e5m2.tensorwise")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_gate_with_one_output_is_not_the_logit() -> None:
    """Its gradient is not all of the gradient, so the curvature is Fisher's."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gate, self.head = nn.Linear(16, 16), nn.Linear(16, 1), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            out: Tensor = self.head(h) * torch.sigmoid(self.gate(h))
            return out

    torch.manual_seed(0)
    model, x, labels = Gated(), torch.randn(64, 16), torch.randint(0, 2, (64,))

    def loss(model: nn.Module, batch: object) -> Tensor:
        return nn.functional.cross_entropy(model(x), labels, reduction="none")

    scores = row_scores(model, loss, [0], {"head": [RECIPES["tensorwise"].fwd]})
    assert scores is not None
    assert scores.basis == "fisher"
