"""Scales of MXFP8 as Blackwell's tensor cores read them (OCP Microscaling 1.0; cuBLASLt's 32_4_4 swizzle).

A scale is a power of two, kept as the one byte of its biased exponent (E8M0). The scale matrix [rows, k
blocks] is padded to multiples of 128 and 4 and cut into tiles of 128 x 4, which lie one after the other, tile
rows first. Within a tile the scale of row r and block c lies at byte (r % 32) * 16 + (r // 32) * 4 + c.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TILE_BLOCKS", "TILE_ROWS", "e8m0_bytes", "swizzled_mx_scales"]

TILE_ROWS = 128
TILE_BLOCKS = 4


def e8m0_bytes(scale: Tensor) -> Tensor:
    """The biased exponents of fp32 powers of two, uint8, same shape: 2^e becomes e + 127.

    Mantissas are dropped without a check, which would wait for the device; casts to MX make none.
    """
    bits = scale.contiguous().view(torch.int32)
    return ((bits >> 23) & 0xFF).to(torch.uint8)


def swizzled_mx_scales(scale: Tensor) -> Tensor:
    """Decode scales of an MX operand in the layout that the hardware reads.

    Args:
        scale: fp32 [rows, k blocks], powers of two.

    Returns:
        float8_e8m0fnu, flat, of round_up(rows, 128) * round_up(k blocks, 4) elements. Padding holds the
        smallest scale, 2^-127; it meets no element.
    """
    rows, blocks = scale.shape
    padded = torch.nn.functional.pad(e8m0_bytes(scale), (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = padded.view(-(-rows // TILE_ROWS), 4, 32, -(-blocks // TILE_BLOCKS), TILE_BLOCKS)
    # [tile row, r // 32, r % 32, tile column, c] -> [tile row, tile column, r % 32, r // 32, c]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)
