"""The machine we are on, in the words that kernels' rules use."""

from __future__ import annotations

import functools

import torch

from loka.errors import UsageError
from loka.vocab import Device

__all__ = ["device_of"]


def device_of(where: torch.device | str) -> Device:
    """Describe a torch device. Touches CUDA only when asked about a CUDA device.

    Raises:
        UsageError: for a device that this torch cannot use.
    """
    device = torch.device(where)
    if device.type == "cuda":
        return _cuda(device.index or 0)
    if device.type != "cpu":
        raise UsageError(f"device `{device}` is not supported", hint="use `cpu` or `cuda`")
    return Device("cpu", "CPU", (0, 0), _torch_release())


@functools.cache
def _cuda(index: int) -> Device:
    if not torch.cuda.is_available():
        raise UsageError("device `cuda` was asked for and torch sees none", hint="use `--device cpu`")
    type_ = "hip" if torch.version.hip else "cuda"
    major, minor = torch.cuda.get_device_capability(index)
    return Device(type_, torch.cuda.get_device_name(index), (major, minor), _torch_release())


def _torch_release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
