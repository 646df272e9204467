"""Kernels of the products over features: a tensor in up to four parts, read or written where it lies.

Sibling layers have one input and several outputs. Each output is its own tensor, and row r of the stacked
weights belongs to one of them: `part_pointers` turns r into an address, so that nothing is stacked or split
in memory.
"""

import triton
import triton.language as tl

from loka.kernels.triton.products.blocks import as_compute

__all__ = ["sum_kernel", "transform_kernel"]


@triton.jit
def part_pointers(
    p0,
    p1,
    p2,
    p3,
    first1,
    first2,
    first3,
    step0,
    step1,
    step2,
    step3,
    rows,
    sample,
    stride_row,
    PARTS: tl.constexpr,
):
    """Addresses of `rows` of one sample: part i starts at row first_i and has step_i elements a sample."""
    rows = rows.to(tl.int64)
    pointers = p0 + sample * step0 + rows * stride_row
    if PARTS > 1:
        pointers = tl.where(rows >= first1, p1 + sample * step1 + (rows - first1) * stride_row, pointers)
    if PARTS > 2:
        pointers = tl.where(rows >= first2, p2 + sample * step2 + (rows - first2) * stride_row, pointers)
    if PARTS > 3:
        pointers = tl.where(rows >= first3, p3 + sample * step3 + (rows - first3) * stride_row, pointers)
    return pointers


@triton.jit(do_not_specialize=["B", "samples"])
def transform_kernel(
    weights,
    in0,
    in1,
    in2,
    in3,
    out0,
    out1,
    out2,
    out3,
    in_first1,
    in_first2,
    in_first3,
    in_step0,
    in_step1,
    in_step2,
    in_step3,
    out_first1,
    out_first2,
    out_first3,
    out_step0,
    out_step1,
    out_step2,
    out_step3,
    B,
    R,
    C,
    D,
    samples,
    stride_weights_row,
    stride_weights_inner,
    stride_in_row,
    stride_in_column,
    stride_out_row,
    IN_PARTS: tl.constexpr,
    OUT_PARTS: tl.constexpr,
    COMPUTE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[b] [R, D] = weights [R, C] @ in[b] [C, D] for some samples; WHOLE: one tile holds all of C."""
    tiles_r, tiles_d = tl.cdiv(R, BLOCK_R), tl.cdiv(D, BLOCK_D)
    # Row tiles of the same samples run side by side, so that the second finds the input in the L2 cache.
    program = tl.program_id(0)
    rows = (program % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = ((program // tiles_r) % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = (program // (tiles_r * tiles_d)) * samples
    last = tl.minimum(first + samples, B)
    inner = tl.arange(0, BLOCK_C)
    column = columns.to(tl.int64)[None, :] * stride_in_column
    at_weights = weights + rows[:, None] * stride_weights_row + inner[None, :] * stride_weights_inner
    keep = (rows < R)[:, None] & (columns < D)[None, :]
    if WHOLE:
        inside = (rows < R)[:, None] & (inner < C)[None, :]
        tile = as_compute(tl.load(at_weights, mask=inside, other=0.0), COMPUTE)
        read = (inner < C)[:, None] & (columns < D)[None, :]
        for b in range(first, last):
            sample = tl.cast(b, tl.int64)
            at = part_pointers(
                in0, in1, in2, in3, in_first1, in_first2, in_first3, in_step0, in_step1, in_step2, in_step3,
                inner, sample, stride_in_row, IN_PARTS,
            )  # fmt: skip
            x = as_compute(tl.load(at[:, None] + column, mask=read, other=0.0), COMPUTE)
            product = tl.dot(tile, x, input_precision="ieee")
            to = part_pointers(
                out0, out1, out2, out3, out_first1, out_first2, out_first3, out_step0, out_step1, out_step2,
                out_step3, rows, sample, stride_out_row, OUT_PARTS,
            )  # fmt: skip
            tl.store(to[:, None] + columns[None, :], product.to(out0.dtype.element_ty), mask=keep)
    else:
        for b in range(first, last):
            sample = tl.cast(b, tl.int64)
            total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
            for c in range(0, C, BLOCK_C):
                inside = (rows < R)[:, None] & (inner + c < C)[None, :]
                tile = tl.load(at_weights + c * stride_weights_inner, mask=inside, other=0.0)
                at = part_pointers(
                    in0, in1, in2, in3, in_first1, in_first2, in_first3, in_step0, in_step1, in_step2,
                    in_step3, inner + c, sample, stride_in_row, IN_PARTS,
                )  # fmt: skip
                read = (inner + c < C)[:, None] & (columns < D)[None, :]
                x = as_compute(tl.load(at[:, None] + column, mask=read, other=0.0), COMPUTE)
                total = tl.dot(as_compute(tile, COMPUTE), x, total, input_precision="ieee")
            to = part_pointers(
                out0, out1, out2, out3, out_first1, out_first2, out_first3, out_step0, out_step1, out_step2,
                out_step3, rows, sample, stride_out_row, OUT_PARTS,
            )  # fmt: skip
            tl.store(to[:, None] + columns[None, :], total.to(out0.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["steps", "per_program"])
def sum_kernel(
    g0,
    g1,
    g2,
    g3,
    x,
    partial,
    first1,
    first2,
    first3,
    step0,
    step1,
    step2,
    step3,
    steps,
    per_program,
    R,
    C,
    D,
    stride_g_row,
    stride_x_sample,
    stride_x_row,
    stride_x_column,
    PARTS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """partial[split] [R, C] = sum over a split's steps of g[b] [R, D] @ x[b] [C, D].T.

    A step is one block of D of one sample.
    """
    tiles_c, tiles_d = tl.cdiv(C, BLOCK_C), tl.cdiv(D, BLOCK_D)
    rows = (tl.program_id(0) // tiles_c) * BLOCK_R + tl.arange(0, BLOCK_R)
    features = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    # Rows past the end repeat the last one and are never stored.
    row, feature = tl.minimum(rows, R - 1), tl.minimum(features, C - 1)
    inner = tl.arange(0, BLOCK_D)
    split = tl.program_id(1)
    first = split * per_program
    last = tl.minimum(first + per_program, steps)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in range(first, last):
        sample = tl.cast(step // tiles_d, tl.int64)
        columns = (step % tiles_d) * BLOCK_D + inner
        inside = (columns < D)[None, :]
        at_g = part_pointers(
            g0, g1, g2, g3, first1, first2, first3, step0, step1, step2, step3, row, sample, stride_g_row,
            PARTS,
        )  # fmt: skip
        at_x = x + sample * stride_x_sample + feature.to(tl.int64) * stride_x_row
        g = tl.load(at_g[:, None] + columns[None, :], mask=inside, other=0.0)
        values = tl.load(at_x[:, None] + columns[None, :] * stride_x_column, mask=inside, other=0.0)
        total = tl.dot(as_compute(g, COMPUTE), as_compute(values, COMPUTE).T, total, input_precision="ieee")
    to = partial + split.to(tl.int64) * R * C + rows[:, None] * C + features[None, :]
    tl.store(to, total, mask=(rows < R)[:, None] & (features < C)[None, :])
