"""How much shared memory a program of this device may use."""

from __future__ import annotations

import functools

import torch

from loka.kernels.triton.products.tiles import SHARED_BYTES

__all__ = ["shared_bytes_of"]


def shared_bytes_of(device: torch.device) -> int:
    """Shared memory of one program, in bytes; that of SM 9.0 where there is no such device to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SHARED_BYTES
    return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _of_cuda(index: int) -> int:
    # torch's stubs do not know the property.
    return int(
        getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", SHARED_BYTES)
    )
