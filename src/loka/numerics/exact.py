"""FP32 products that are FP32, whatever the process allows its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["exact_products"]


@contextlib.contextmanager
def exact_products(device_type: str) -> Iterator[None]:
    """No autocast and no TF32 or bf16 inside FP32 products; afterwards all is as it was.

    A reference of 10 bits of mantissa (TF32) would hide what the products under trial lose. torch keeps the
    setting twice, the older way (`set_float32_matmul_precision`, which changes both) and by backend
    (`fp32_precision`); both are put back.

    Args:
        device_type: Whose autocast is switched off.
    """
    mkldnn: Any = torch.backends.mkldnn  # its stub does not know `matmul`
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, mkldnn.matmul)
    by_backend = [backend.fp32_precision for backend in backends]
    overall = _overall_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(overall)
        for backend, precision in zip(backends, by_backend, strict=True):
            backend.fp32_precision = precision


def _overall_precision() -> str:
    """What was set the older way. torch refuses to say it where the newer settings disagree with it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        pass
    try:
        return "high" if torch.backends.cuda.matmul.allow_tf32 else "highest"
    except RuntimeError:
        return "highest"  # only the newer settings were touched
