"""Products over the features of every sample: out_i[b] = W_i @ x[b], for siblings that share x [B, n, d].

    out_i [B, N_i, d] = W_i [N_i, n] @ x [B, n, d]
    dx    [B, n, d]   = sum_i W_i.T @ g_i
    dW_i  [N_i, n]    = sum_b g_i[b] @ x[b].T

Such sites (Wukong's FM projection, LCB and residual) are bound by memory. Written as a linear layer they need
x transposed in memory, and one read of it for each sibling; here x is read once, where it lies. Sums are in
fp32, and that of dW_i is split over programs and added up in a fixed order.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import triton_op

from loka.errors import UsageError
from loka.kernels.triton.launch import launcher
from loka.kernels.triton.products.blocks import COMPUTE_DTYPES, add_splits
from loka.kernels.triton.products.feature_kernels import sum_kernel, transform_kernel
from loka.kernels.triton.products.feature_tiles import FeatureTiles, sum_tiles, tiles_for_features
from loka.kernels.triton.products.shared_memory import shared_bytes_of

__all__ = ["MOST_PARTS", "feature_products", "launch_sum", "launch_transform"]

MOST_PARTS = 4  # siblings that one pass over x serves; more of them are served four at a time


def feature_products(
    x_BnD: Tensor, weights: Sequence[Tensor], *, compute_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """out_i[b] = W_i @ x[b] for every weight, x being read once for up to four of them. Differentiable once.

    Args:
        x_BnD: [B, n, d] bf16, fp16 or fp32, any stride.
        weights: W_i [N_i, n], each of any of these dtypes.
        compute_dtype: What is multiplied, and the dtype of the outputs: bf16, fp16, or fp32 (without TF32).
            None for the autocast dtype where autocast is on, otherwise that of x.

    Returns:
        [B, N_i, d] contiguous, one for each weight. Gradients come in the dtypes of x and of the weights.

    Raises:
        UsageError: for shapes that do not fit, no weights, or a dtype that is none of the three.
    """
    if compute_dtype is None:
        kind = x_BnD.device.type
        compute_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BnD.dtype
    _check(x_BnD, weights, compute_dtype)
    outputs: list[Tensor] = []
    for first in range(0, len(weights), MOST_PARTS):
        outputs += _transform(x_BnD, list(weights[first : first + MOST_PARTS]), compute_dtype)
    return tuple(outputs)


def _check(x: Tensor, weights: Sequence[Tensor], compute_dtype: torch.dtype) -> None:
    if compute_dtype not in COMPUTE_DTYPES:
        raise UsageError(f"feature_products computes in bf16, fp16 or fp32, not in {compute_dtype}")
    if x.dim() != 3:
        raise UsageError(f"feature_products takes x of shape [B, n, d], got {tuple(x.shape)}")
    if not weights:
        raise UsageError("feature_products needs at least one weight")
    for i, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
            raise UsageError(
                f"weight {i} of feature_products is {tuple(weight.shape)}, x {tuple(x.shape)} needs [N, n] "
                f"with n = {x.shape[1]}"
            )


@triton_op("loka::feature_products", mutates_args={})
def _transform(x: Tensor, weights: list[Tensor], compute_dtype: torch.dtype) -> list[Tensor]:
    """The outputs of at most four siblings; see `feature_products`."""
    B, n, d = x.shape
    stacked = _stacked(weights, compute_dtype)
    outputs = [x.new_empty((B, w.shape[0], d), dtype=compute_dtype) for w in weights]
    tiles = tiles_for_features(
        B,
        stacked.shape[0],
        n,
        d,
        element_bytes=max(x.element_size(), compute_dtype.itemsize),
        shared_bytes=shared_bytes_of(x.device),
    )
    launch_transform(stacked, [x], outputs, tiles=tiles, compute_dtype=compute_dtype)
    return outputs


@triton_op("loka::feature_products_dx", mutates_args={})
def _input_gradient(
    grads: list[Tensor], weights: list[Tensor], out_dtype: torch.dtype, compute_dtype: torch.dtype
) -> Tensor:
    """Gradient [B, n, d] = sum_i W_i.T @ g_i, one pass over the g_i (contiguous, of one dtype)."""
    (B, _, d), n = grads[0].shape, weights[0].shape[1]
    stacked = _stacked(weights, compute_dtype)
    dx = grads[0].new_empty((B, n, d), dtype=out_dtype)
    tiles = tiles_for_features(
        B,
        n,
        stacked.shape[0],
        d,
        element_bytes=max(grads[0].element_size(), compute_dtype.itemsize),
        shared_bytes=shared_bytes_of(dx.device),
    )
    launch_transform(stacked.t(), grads, [dx], tiles=tiles, compute_dtype=compute_dtype)
    return dx


@triton_op("loka::feature_products_dw", mutates_args={})
def _weight_gradient(grads: list[Tensor], x: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Gradients [sum N_i, n] of the weights one below the other, in fp32; deterministic."""
    B, n, d = x.shape
    rows = sum(g.shape[1] for g in grads)
    tiles = sum_tiles(
        B,
        rows,
        n,
        d,
        element_bytes=max(grads[0].element_size(), x.element_size(), compute_dtype.itemsize),
        shared_bytes=shared_bytes_of(x.device),
    )
    return launch_sum(grads, x, tiles=tiles, compute_dtype=compute_dtype)


def _remember(ctx: Any, inputs: tuple[Tensor, list[Tensor], torch.dtype], output: list[Tensor]) -> None:
    x, weights, compute_dtype = inputs
    ctx.compute_dtype = compute_dtype
    ctx.wants_dx = x.requires_grad
    ctx.wants_dw = any(w.requires_grad for w in weights)
    # Only what a gradient needs is kept: dx needs the weights, dW needs x.
    ctx.save_for_backward(*weights, *([x] if ctx.wants_dw else []))
    ctx.siblings = len(weights)
    ctx.x_dtype = x.dtype


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, list[Tensor | None], None]:
    weights = list(ctx.saved_tensors[: ctx.siblings])
    # A sum's gradient arrives expanded, without memory of its own.
    grads = [g.contiguous() for g in grads]
    dx: Tensor | None = None
    dws: list[Tensor | None] = [None] * ctx.siblings
    if ctx.wants_dx:
        dx = _input_gradient(grads, weights, ctx.x_dtype, ctx.compute_dtype)
    if ctx.wants_dw:
        stacked = _weight_gradient(grads, ctx.saved_tensors[ctx.siblings], ctx.compute_dtype)
        parts = stacked.split([w.shape[0] for w in weights])
        dws = [part.to(w.dtype) for part, w in zip(parts, weights, strict=True)]
    return dx, dws, None


_transform.register_autograd(_backward, setup_context=_remember)


def launch_transform(
    weights: Tensor,
    inputs: list[Tensor],
    outputs: list[Tensor],
    *,
    tiles: FeatureTiles,
    compute_dtype: torch.dtype,
) -> None:
    """Write outputs[b] = weights @ inputs[b], cut as `tiles` says.

    Args:
        weights: [R, C], any stride.
        inputs: One tensor [B, C, d] of any stride, or up to four contiguous ones [B, C_i, d].
        outputs: Up to four contiguous tensors [B, R_i, d].
        tiles: See `tiles_for_features`.
        compute_dtype: What is multiplied.
    """
    (R, C), (B, _, D) = weights.shape, inputs[0].shape
    if B == 0 or R == 0 or D == 0:
        return
    programs = triton.cdiv(R, tiles.rows) * triton.cdiv(D, tiles.columns) * triton.cdiv(B, tiles.samples)
    launcher(transform_kernel)[(programs,)](
        weights,
        *_filled(inputs, weights),
        *_filled(outputs, weights),
        *_places(inputs),
        *_places(outputs),
        B,
        R,
        C,
        D,
        tiles.samples,
        weights.stride(0),
        weights.stride(1),
        *_strides(inputs, inputs[0])[1:],
        _strides(outputs, outputs[0])[1],
        IN_PARTS=len(inputs),
        OUT_PARTS=len(outputs),
        COMPUTE=COMPUTE_DTYPES[compute_dtype],
        WHOLE=bool(tiles.inner >= C),
        BLOCK_R=tiles.rows,
        BLOCK_C=tiles.inner,
        BLOCK_D=tiles.columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def launch_sum(grads: list[Tensor], x: Tensor, *, tiles: FeatureTiles, compute_dtype: torch.dtype) -> Tensor:
    """Sum over b of grads[b] [sum N_i, d] @ x[b].T: fp32 [sum N_i, n], cut as `tiles` says.

    Args:
        grads: Up to four contiguous tensors [B, N_i, d] of one dtype.
        x: [B, n, d], any stride.
        tiles: See `sum_tiles`.
        compute_dtype: What is multiplied.
    """
    B, n, d = x.shape
    rows = sum(g.shape[1] for g in grads)
    steps = B * triton.cdiv(d, tiles.columns)
    if steps == 0 or rows * n == 0:
        return x.new_zeros((rows, n), dtype=torch.float32)
    per_program = triton.cdiv(steps, tiles.splits)
    splits = triton.cdiv(steps, per_program)  # none is empty
    partial = x.new_empty((splits, rows, n), dtype=torch.float32)
    launcher(sum_kernel)[(triton.cdiv(rows, tiles.rows) * triton.cdiv(n, tiles.inner), splits)](
        *_filled(grads, x),
        x,
        partial,
        *_places(grads),
        steps,
        per_program,
        rows,
        n,
        d,
        d,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        PARTS=len(grads),
        COMPUTE=COMPUTE_DTYPES[compute_dtype],
        BLOCK_R=tiles.rows,
        BLOCK_C=tiles.inner,
        BLOCK_D=tiles.columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits == 1:
        return partial[0]
    out = x.new_empty((rows, n), dtype=torch.float32)
    add_splits(partial, None, out)
    return out


def _stacked(weights: list[Tensor], compute_dtype: torch.dtype) -> Tensor:
    """[sum N_i, n] in the compute dtype: a few hundred rows, small beside x."""
    return torch.cat([w.to(compute_dtype) for w in weights])


def _filled(parts: list[Tensor], other: Tensor) -> list[Tensor]:
    """Four pointers; the kernel does not look at those past the parts.

    They are of another tensor, which is only read: torch.compile hands a kernel one copy for each argument
    that may be written, and would take an output's result from the copy of its idle twin.
    """
    return parts + [other] * (MOST_PARTS - len(parts))


def _places(parts: list[Tensor]) -> list[int]:
    """First rows of the parts 1 to 3, then the elements of a sample of each part."""
    ends = list(itertools.accumulate(part.shape[1] for part in parts))
    firsts = ends[:-1] + [0] * (MOST_PARTS - len(parts))
    steps = [_strides(parts, part)[0] for part in parts] + [0] * (MOST_PARTS - len(parts))
    return firsts + steps


def _strides(parts: list[Tensor], part: Tensor) -> tuple[int, int, int]:
    """Strides of a part. Several are contiguous; the stride of a dimension of size 1 may be anything."""
    if len(parts) == 1:
        return part.stride(0), part.stride(1), part.stride(2)
    return part.shape[1] * part.shape[2], part.shape[2], 1
