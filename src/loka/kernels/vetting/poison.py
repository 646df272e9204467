"""Memory that shows when it is read though nobody wrote it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["guarded_copy", "guarded_empty", "poison_free_memory", "workspace_sizes"]

_GUARD_BYTES = 4096  # keeps the alignment that kernels ask of their operands (at most 256 bytes)
_NAN_BYTE = 0xFF  # all ones is a NaN in E4M3, E5M2, bf16, fp16 and fp32
_FNUZ_NAN_BYTE = 0x80  # the only NaN of the FNUZ formats
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_MOST_BYTES = {"cpu": 2 * 2**20}  # a CPU gets larger blocks from the system, zeroed
_MOST_BYTES_GPU = 512 * 2**20


def guarded_empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor of NaN with 4 KiB of NaN before and after it: a kernel that reads too far gets some."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    span = 0 if 0 in shape else span
    guard = _GUARD_BYTES // dtype.itemsize
    byte = _FNUZ_NAN_BYTE if dtype in _FNUZ else _NAN_BYTE
    buffer = torch.full(((span + 2 * guard) * dtype.itemsize,), byte, dtype=torch.uint8, device=device)
    return buffer.view(dtype).as_strided(shape, stride, guard)


def guarded_copy(x: Tensor) -> Tensor:
    """X in guarded memory, with the same strides."""
    out = guarded_empty(tuple(x.shape), x.stride(), x.dtype, x.device)
    return out.copy_(x)


def workspace_sizes(m: int, n: int, itemsize: int) -> list[int]:
    """Sizes in bytes of the blocks that a product [m, n] is likely to take from the allocator.

    The output twice (two runs are compared), fp32 workspaces of 2 to 64 splits, and powers of two.
    """
    splits = [4 * m * n * splits for splits in (2, 4, 8, 16, 32, 64)]
    return [m * n * itemsize] * 2 + splits + [2**power for power in range(9, 26)]


def poison_free_memory(m: int, n: int, itemsize: int, device: torch.device) -> int:
    """Fill memory of the sizes a product takes with NaN and free it, so that the product gets it.

    The caching allocator of a GPU hands out freed blocks again; that of a CPU often does.

    Returns:
        The bytes poisoned.
    """
    left = _MOST_BYTES.get(device.type, max(_MOST_BYTES_GPU, 2 * m * n * itemsize))
    blocks = []
    for size in workspace_sizes(m, n, itemsize):
        if 0 < size <= left:
            blocks.append(torch.full((size,), _NAN_BYTE, dtype=torch.uint8, device=device))
            left -= size
    return sum(block.numel() for block in blocks)
