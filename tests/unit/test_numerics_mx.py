"""MX scales: bytes and places, against the index formula of cuBLASLt's documentation, element by element."""

from __future__ import annotations

import pytest
import torch

from loka.numerics import cast_operand
from loka.numerics.mx_layout import e8m0_bytes, swizzled_mx_scales
from loka.vocab import Format, Granularity, OperandSpec


def place(row: int, block: int, tile_columns: int) -> int:
    """Byte of the scale of a row and a block of k."""
    tile = (row // 128) * tile_columns + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


@pytest.mark.parametrize(
    ("rows", "blocks"), [(1, 1), (3, 5), (32, 4), (127, 3), (128, 4), (129, 9), (300, 17)]
)
def test_places(rows: int, blocks: int) -> None:
    exponents = torch.randint(-100, 128, (rows, blocks), generator=torch.Generator().manual_seed(rows))
    scale = torch.ldexp(torch.ones(rows, blocks), exponents)
    got = swizzled_mx_scales(scale).view(torch.uint8)
    tile_rows, tile_columns = -(-rows // 128), -(-blocks // 4)
    want = torch.zeros(tile_rows * tile_columns * 512, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            want[place(row, block, tile_columns)] = int(exponents[row, block]) + 127
    assert got.dtype is torch.uint8
    assert torch.equal(got, want)


def test_every_exponent_becomes_its_byte() -> None:
    """torch's own E8M0 decodes each byte back to the scale it came from."""
    scale = torch.ldexp(torch.ones(254), torch.arange(-126, 128))
    codes = e8m0_bytes(scale)
    assert codes.tolist() == list(range(1, 255))
    assert torch.equal(codes.view(torch.float8_e8m0fnu).float(), scale)


def test_scales_of_a_cast_survive() -> None:
    x = torch.randn(70, 90, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 70)[:, None]
    x[5] = 0
    q = cast_operand(x, OperandSpec.of(Format.E4M3, Granularity.MX_1X32, pad=32))
    assert q.scale.shape == (70, 3)
    assert torch.equal(e8m0_bytes(q.scale).view(torch.float8_e8m0fnu).float(), q.scale)
    flat = swizzled_mx_scales(q.scale).float()
    assert flat.numel() == 128 * 4
    assert all(flat[place(r, b, 1)] == q.scale[r, b] for r in range(70) for b in range(3))


def test_no_rows() -> None:
    assert swizzled_mx_scales(torch.ones(0, 3)).numel() == 0
