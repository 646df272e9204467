"""Products over features against FP64 of the same numbers, forward and backward, through the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_products_cases import mend_bf16_dot

from loka.errors import UsageError
from loka.kernels.triton.products.feature_tiles import (
    FeatureTiles,
    sum_alternatives,
    sum_tiles,
    tiles_for_features,
    transform_alternatives,
)
from loka.kernels.triton.products.features import feature_products, launch_sum, launch_transform
from loka.kernels.triton.products.tiles import SHARED_BYTES

mend_bf16_dot()

FP32 = 1e-6
BF16 = 2.0**-8
CASES = [
    (1, 1, 1, (1,)),
    (5, 13, 17, (3,)),
    (9, 20, 130, (8, 1, 16)),
    (3, 600, 24, (4, 5)),  # more features than one tile holds
    (2, 24, 16, (1, 7, 2, 9, 3)),  # more siblings than one pass serves
    (2, 40, 16, (130, 70)),  # more rows than one tile holds
]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(out: Tensor, ref: Tensor) -> float:
    return float((out.detach().double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_and_gradients(case: tuple[int, int, int, tuple[int, ...]], dtype: torch.dtype) -> None:
    B, n, d, rows = case
    x = numbers(B, n, d, seed=0).requires_grad_()
    weights = [numbers(r, n, seed=i + 1).requires_grad_() for i, r in enumerate(rows)]
    outs = feature_products(x, weights, compute_dtype=dtype)
    upstream = [numbers(*out.shape, seed=50 + i).to(dtype) for i, out in enumerate(outs)]
    grads = torch.autograd.grad(outs, [x, *weights], upstream)

    x64 = x.detach().to(dtype).double().requires_grad_()
    weights64 = [w.detach().to(dtype).double().requires_grad_() for w in weights]
    refs = [w @ x64 for w in weights64]
    ref_grads = torch.autograd.grad(refs, [x64, *weights64], [g.double() for g in upstream])
    for out, ref in zip(outs, refs, strict=True):
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert relative(out, ref.detach()) < (FP32 if dtype is torch.float32 else BF16)
    for grad, leaf, ref in zip(grads, [x, *weights], ref_grads, strict=True):
        assert grad.dtype == leaf.dtype  # fp32 leaves get fp32 gradients, whatever was multiplied
        # Where siblings take more than one pass over x, their parts of dx are added up by autograd.
        assert relative(grad, ref) < FP32


def test_autocast_decides_the_compute_dtype() -> None:
    x, w = numbers(2, 8, 16, seed=0), numbers(3, 8, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out,) = feature_products(x, [w])
    assert out.dtype == torch.bfloat16
    assert relative(out, w.bfloat16().double() @ x.bfloat16().double()) < BF16
    assert feature_products(x, [w])[0].dtype == torch.float32
    assert feature_products(x.half(), [w])[0].dtype == torch.float16


def test_x_of_any_stride_and_expanded_gradients() -> None:
    wide = numbers(4, 30, 9, seed=0)
    weights = [numbers(1, 9, seed=1).requires_grad_(), numbers(5, 9, seed=2).requires_grad_()]
    views = (
        wide.transpose(1, 2),
        wide.permute(1, 2, 0),
        wide[:, ::2].transpose(1, 2),
        wide[:1].expand(3, 30, 9).mT,
    )
    for view in views:
        x = view.detach().requires_grad_()
        outs = feature_products(x, weights)
        loss = sum(out.sum() for out in outs)
        assert isinstance(loss, Tensor)
        grads = torch.autograd.grad(loss, [x, *weights])
        ones = torch.ones(x.shape[0], 6, x.shape[2], dtype=torch.float64)
        stacked = torch.cat(weights).detach().double()
        assert relative(torch.cat(outs, 1).detach(), stacked @ x.detach().double()) < FP32
        assert relative(grads[0], stacked.t() @ ones) < FP32
        assert relative(torch.cat(grads[1:]), (ones @ x.detach().double().mT).sum(0)) < FP32


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_wanted_gradients_are_made(wanted: tuple[bool, bool]) -> None:
    x, w = numbers(3, 8, 4, seed=0), numbers(2, 8, seed=1)
    x.requires_grad_(wanted[0])
    w.requires_grad_(wanted[1])
    feature_products(x, [w])[0].sum().backward()
    assert (x.grad is not None, w.grad is not None) == wanted


def test_a_sum_over_samples_repeats_to_the_bit() -> None:
    x, g = numbers(120, 8, 16, seed=0).bfloat16(), numbers(120, 3, 16, seed=1).bfloat16()
    tiles = sum_tiles(120, 3, 8, 16, element_bytes=2)
    assert tiles.splits > 1
    first, second = (launch_sum([g], x, tiles=tiles, compute_dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second)
    assert relative(first, torch.einsum("bid,bjd->ij", g.double(), x.double())) < FP32


def test_no_element_is_left_unwritten() -> None:
    x, w = numbers(5, 20, 33, seed=0), numbers(70, 20, seed=1)
    outs = [torch.full((5, 30, 33), torch.nan), torch.full((5, 40, 33), torch.nan)]
    for samples in (1, 2, 7):
        tiles = FeatureTiles(64, 32, 16, 4, 2, samples=samples)
        launch_transform(w, [x], outs, tiles=tiles, compute_dtype=torch.float32)
        assert relative(torch.cat(outs, 1), w.double() @ x.double()) < FP32


def test_empty_batches() -> None:
    x, w = torch.empty(0, 8, 4, requires_grad=True), numbers(2, 8, seed=0).requires_grad_()
    out = feature_products(x, [w])[0]
    assert out.shape == (0, 2, 4)
    out.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.zeros(2, 8))


def test_what_does_not_fit_is_said() -> None:
    x = torch.ones(2, 8, 4)
    with pytest.raises(UsageError, match=r"of shape \[B, n, d\], got \(8, 4\)"):
        feature_products(x[0], [torch.ones(2, 8)])
    with pytest.raises(UsageError, match="at least one weight"):
        feature_products(x, [])
    with pytest.raises(UsageError, match=r"weight 1 of feature_products is \(2, 7\)"):
        feature_products(x, [torch.ones(2, 8), torch.ones(2, 7)])
    with pytest.raises(UsageError, match=r"not in torch\.float64"):
        feature_products(x.double(), [torch.ones(2, 8)])


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_tiles_fit_and_cover(element_bytes: int) -> None:
    for samples in (1, 7, 8192):
        for rows in (1, 24, 120, 700):
            for inner in (8, 128, 192, 400, 512, 1000):
                for d in (1, 64, 128, 300):
                    found = transform_alternatives(samples, rows, inner, d, element_bytes=element_bytes)
                    assert found[0] == tiles_for_features(
                        samples, rows, inner, d, element_bytes=element_bytes
                    )
                    for t in found:
                        streamed = t.inner * (t.stages * t.columns + t.rows) * element_bytes
                        assert streamed <= SHARED_BYTES
                        assert t.inner >= inner or inner > 512
                        assert 1 <= t.samples <= max(1, samples)
                    for t in sum_alternatives(samples, rows, inner, d, element_bytes=element_bytes):
                        assert t.stages * (t.rows + t.inner) * t.columns * element_bytes <= SHARED_BYTES
                        assert 1 <= t.splits <= max(1, samples * -(-d // t.columns) // 8)


def test_the_tower_of_h200_md_reads_its_input_once() -> None:
    """B 8192, n 128, d 128, three siblings of 24, 32 and 64 rows: one row tile, whole inner features."""
    tiles = tiles_for_features(8192, 120, 128, 128, element_bytes=2)
    assert tiles.rows >= 120
    assert tiles.inner == 128
    assert tiles.columns == 128
