"""From x to FP8 by a static scale: normalize, activate, cast and transpose in one read.

The norm bounds its output, so the scale is known before, and both orientations and the bf16 output come from
the same numbers. x [M, N] with contiguous features. Straight [M, N padded], transposed [N, M padded].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from loka.kernels.triton.casts.formula import codes_of, finite_or_nan, reciprocal
from loka.kernels.triton.casts.outputs import FLOAT8, padded
from loka.kernels.triton.casts.pairs import pairs_in_row, pairs_of_codes
from loka.kernels.triton.launch import is_compiled, launcher
from loka.kernels.triton.norms.formula import activated, inverse_rms, place_of
from loka.kernels.triton.norms.tiles import cut_of, turning_tile
from loka.vocab import BlockNormSpec

__all__ = ["normalize_to_float8"]


@triton.jit
def _rows_of_block(x, at, inside, size, eps, SWISH: tl.constexpr):
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return activated(wide * inverse_rms(wide, size, eps), SWISH)


@triton.jit
def _kernel(
    x,
    scale,
    straight,
    transposed_pairs,
    y,
    M,
    N,
    stride,
    padded_N,
    padded_M,
    blocks,
    width,
    wider,
    eps,
    FORMAT: tl.constexpr,
    SWISH: tl.constexpr,
    UNEVEN: tl.constexpr,
    EXACT: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PLAIN: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """BP pairs of rows of one block."""
    program = tl.program_id(0)
    start, size = place_of(program % blocks, width, wider, UNEVEN)
    pairs = (program // blocks) * BP + tl.arange(0, BP)
    columns = tl.arange(0, BC)
    even = (2 * pairs).to(tl.int64)[:, None]
    place = (start + columns)[None, :]
    of_even, of_odd = (even < M), (even + 1 < M)
    if not EXACT:
        of_even, of_odd = of_even & (columns < size)[None, :], of_odd & (columns < size)[None, :]
    first = _rows_of_block(x, even * stride + place, of_even, size, eps, SWISH)
    second = _rows_of_block(x, (even + 1) * stride + place, of_odd, size, eps, SWISH)
    r = reciprocal(tl.load(scale))
    if PLAIN:
        tl.store(y + even * N + place, first.to(y.dtype.element_ty), mask=of_even)
        tl.store(y + (even + 1) * N + place, second.to(y.dtype.element_ty), mask=of_odd)
    if STRAIGHT:
        lying = straight + even * padded_N + place
        tl.store(lying, codes_of(first, finite_or_nan(first), r, FORMAT), mask=of_even)
        tl.store(lying + padded_N, codes_of(second, finite_or_nan(second), r, FORMAT), mask=of_odd)
    if TRANSPOSED:
        row_of_pairs = pairs_in_row(padded_M, ALIGNED)
        turned = transposed_pairs + (start + columns).to(tl.int64)[:, None] * row_of_pairs + pairs[None, :]
        both = tl.trans(pairs_of_codes(first, second, r, FORMAT, HARDWARE))
        tl.store(turned, both, mask=(columns < size)[:, None] & (pairs < row_of_pairs)[None, :])


@triton_op("loka::normalize_to_float8", mutates_args={})
def normalize_to_float8(
    x: Tensor,
    scale: Tensor,
    block: int,
    eps: float,
    swish: bool,
    format_: int,
    straight_pad: int,
    transposed_pad: int,
    plain: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize x [M, N] and cast it by a given scale, in either orientation or both.

    Args:
        x: bf16, fp16 or fp32, contiguous along N, not empty.
        scale: The static decode scale, fp32 ().
        block: Features of a block at most.
        eps: Added to the mean square.
        swish: Hard swish behind it.
        format_: 0 for E4M3, 1 for E5M2.
        straight_pad: The multiple to which N is padded in the straight output; 0 for no such output.
        transposed_pad: The same for M in the transposed output; M' must be even.
        plain: Give the output in x's dtype as well.

    Returns:
        straight [M, N'], transposed [N, M'], y [M, N] (empty tensors for what was not asked).
    """
    cut, float8 = cut_of(x, BlockNormSpec(block, eps, swish)), FLOAT8[format_]
    wide, tall = padded(cut.N, straight_pad), padded(cut.M, transposed_pad)
    lying = (cut.M, wide) if straight_pad else (0,)
    # No block reaches into the padding, so that its zeros are written before.
    make = x.new_zeros if straight_pad and wide > cut.N else x.new_empty
    straight = make(lying, dtype=torch.uint8).view(float8)
    pairs = x.new_empty((cut.N, tall // 2) if transposed_pad else (0,), dtype=torch.int16)
    y = x.new_empty((cut.M, cut.N) if plain else (0,))
    pairs_a_program, warps = turning_tile(cut.columns)
    launcher(_kernel)[(triton.cdiv(tall, 2 * pairs_a_program) * cut.blocks,)](
        x,
        scale,
        straight,
        pairs,
        y,
        cut.M,
        cut.N,
        cut.stride,
        wide,
        tall,
        cut.blocks,
        cut.width,
        cut.wider,
        eps,
        FORMAT=format_,
        SWISH=swish,
        UNEVEN=cut.wider > 0,
        EXACT=cut.exact,
        STRAIGHT=straight_pad > 0,
        TRANSPOSED=transposed_pad > 0,
        PLAIN=plain,
        ALIGNED=tall % 16 == 0,
        HARDWARE=is_compiled(_kernel),
        BP=pairs_a_program,
        BC=cut.columns,
        num_warps=warps,
    )
    return straight, pairs.view(float8), y
