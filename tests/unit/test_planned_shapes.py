"""Awkward shapes and values, by the numbers of the list of situations (D1 to D15)."""

from __future__ import annotations

import pytest
import torch
from planned_cases import ROWWISE, TENSORWISE, TRIPLES, linear_of, planned, rel, seeded, step
from torch import Tensor, nn

from loka.vocab import Format

LIMIT, LIMIT_WGRAD_E5 = 0.06, 0.09


def exact(layer: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Output and gradients in FP64, written out."""
    w, x64, g64 = layer.weight.detach().double(), x.double().flatten(0, -2), g.double().flatten(0, -2)
    y = x64 @ w.t()
    if layer.bias is not None:
        y = y + layer.bias.detach().double()
    return {
        "y": y.view(*x.shape[:-1], -1),
        "x": (g64 @ w).view_as(x),
        "weight": g64.t() @ x64,
        "bias": g64.sum(0),
    }


@pytest.mark.parametrize("names", TRIPLES, ids=lambda names: names[0])
@pytest.mark.parametrize("grad", [Format.E4M3, Format.E5M2])
@pytest.mark.parametrize(("m", "n", "k"), [(18, 32, 64), (1, 32, 256), (7, 15, 13)])
def test_d1_d3_d4_awkward_shapes_every_kernel(
    names: tuple[str, str, str], grad: Format, m: int, n: int, k: int
) -> None:
    layer, x, g = linear_of(n, k), seeded(m, k), seeded(m, n, seed=3)
    got, want = step(planned(layer, names, grad=grad), x, g), exact(layer, x, g)
    e5 = grad is Format.E5M2
    for name in ("y", "x", "weight", "bias"):
        assert got[name].shape == want[name].shape
        limit = LIMIT_WGRAD_E5 if e5 and name in ("weight", "x") else LIMIT
        assert rel(got[name], want[name]) <= limit, name


def test_d1_long_k_then_a_full_and_a_last_batch() -> None:
    layer = linear_of(64, 4096)
    x, g = seeded(50, 4096), seeded(50, 64, seed=3)
    got, want = step(planned(layer, ROWWISE), x, g), exact(layer, x, g)
    assert all(rel(got[name], want[name]) <= LIMIT for name in want)
    small = linear_of(32, 64)
    module = planned(small, ROWWISE)
    for rows in (4096, 18):
        x, g = seeded(rows, 64, seed=rows), seeded(rows, 32, seed=3)
        got, want = step(module, x, g), exact(small, x, g)
        assert all(rel(got[name], want[name]) <= LIMIT for name in want)


@pytest.mark.parametrize("names", TRIPLES, ids=lambda names: names[0])
def test_d1_wgrad_of_18_rows_is_that_of_32_with_zeros(names: tuple[str, str, str]) -> None:
    module, x, g = planned(linear_of(32, 64), names), seeded(18, 64), seeded(18, 32, seed=3)

    def padded(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros(14, t.shape[1])])

    short, long = step(module, x, g), step(module, padded(x), padded(g))
    assert rel(short["weight"], long["weight"]) <= 1e-6
    assert torch.equal(short["bias"], long["bias"])


@pytest.mark.parametrize("autocast", [False, True])
def test_d2_empty_batch(autocast: bool) -> None:
    module = planned(linear_of(32, 64), ROWWISE)
    got = step(module, torch.empty(0, 64), torch.empty(0, 32), autocast=autocast)
    assert got["y"].shape == (0, 32)
    assert got["x"].shape == (0, 64)
    assert torch.equal(got["weight"], torch.zeros(32, 64))
    assert torch.equal(got["bias"], torch.zeros(32))


@pytest.mark.parametrize(("n", "k"), [(0, 64), (32, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_d2_empty_weight_shard(n: int, k: int) -> None:
    layer = nn.Linear(k, n)
    got = step(planned(layer, ROWWISE), seeded(5, k), seeded(5, n, seed=3))
    want = step(layer, seeded(5, k), seeded(5, n, seed=3))
    assert {name: t.shape for name, t in got.items()} == {name: t.shape for name, t in want.items()}
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("k", [13, 712, 767])
def test_d4_odd_k_is_a_zero_padded_k(k: int) -> None:
    layer = linear_of(64, k)
    wide = nn.Linear(k + (-k % 16), 64)
    with torch.no_grad():
        wide.weight.zero_()
        wide.weight[:, :k] = layer.weight
        wide.bias.copy_(layer.bias)
    x = seeded(128, k)
    x_wide = torch.nn.functional.pad(x, (0, -k % 16))
    for names in TRIPLES:
        assert rel(planned(layer, names)(x), planned(wide, names)(x_wide)) <= 1e-6
        assert rel(planned(layer, names)(x), exact(layer, x, seeded(128, 64))["y"]) <= LIMIT


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(7, 576, 128), (7, 128, 576), (64, 320, 256), (64, 256, 320)])
def test_d5_n_and_k_never_mix(m: int, n: int, k: int, bias: bool) -> None:
    layer, x, g = linear_of(n, k, bias=bias), seeded(m, k), seeded(m, n, seed=3)
    want = exact(layer, x, g)
    for names in TRIPLES:
        got = step(planned(layer, names), x, g)
        assert all(rel(t, want[name]) <= LIMIT for name, t in got.items()), names


@pytest.mark.parametrize("names", TRIPLES, ids=lambda names: names[0])
def test_d7_zeros_give_the_bias_and_disturb_no_other_row(names: tuple[str, str, str]) -> None:
    layer = linear_of(32, 8)
    module = planned(layer, names)
    assert torch.equal(module(torch.zeros(4, 8)), layer.bias.expand(4, 32))
    x = seeded(4, 8)
    x[1] = 0
    y = module(x)
    others = module(x[[0, 2, 3]])
    assert torch.equal(y[1], layer.bias)
    assert torch.equal(y[[0, 2, 3]], others)
    got = step(module, torch.zeros(4, 8), torch.zeros(4, 32))
    assert all(torch.isfinite(t).all() for t in got.values())
    assert not got["weight"].any()


@pytest.mark.parametrize("names", TRIPLES, ids=lambda names: names[0])
@pytest.mark.parametrize("amplitude", [1e4, 1e-4])
def test_d13_the_first_batch_is_right_at_once(names: tuple[str, str, str], amplitude: float) -> None:
    layer = linear_of(32, 64, bias=False)
    x, g = seeded(64, 64) * amplitude, seeded(64, 32, seed=3) / amplitude
    got, want = step(planned(layer, names), x, g), exact(layer, x, g)
    assert all(rel(t, want[name]) <= LIMIT for name, t in got.items())


@pytest.mark.parametrize("names", TRIPLES, ids=lambda names: names[0])
def test_d15_bias_with_fp32_output(names: tuple[str, str, str]) -> None:
    layer, x = linear_of(32, 64), seeded(18, 64)
    plain = nn.Linear(64, 32, bias=False)
    plain.weight = layer.weight
    y, y0 = planned(layer, names)(x), planned(plain, names)(x)
    assert y.dtype is torch.float32
    ulp = torch.nextafter(y.abs(), torch.tensor(float("inf"))) - y.abs()
    assert ((y - y0 - layer.bias).abs() <= torch.maximum(ulp, layer.bias.abs() * 2**-23)).all()


def test_d13_an_outlier_row_does_not_spoil_the_others_rowwise() -> None:
    layer, x = linear_of(32, 64, bias=False), seeded(64, 64)
    x[5] *= 1e5
    for names, kept in ((ROWWISE, True), (TENSORWISE, False)):
        y, ref = planned(layer, names)(x), x.double() @ layer.weight.detach().double().t()
        rows = [i for i in range(64) if i != 5]
        assert (rel(y[rows], ref[rows]) <= LIMIT) is kept
