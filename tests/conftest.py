"""What all tests share: GPU tests need a GPU, long trials must be asked for, small tensors use one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from loka.kernels import device_of

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined: without a GPU our kernels run through its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from interpreter import make_ready

    make_ready()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    wants_soak = "soak" in (config.getoption("-m") or "")
    kept, left_out = [], []
    for item in items:
        if "gpu" in item.keywords and reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        (left_out if "soak" in item.keywords and not wants_soak else kept).append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def _why_no_gpu() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA device, torch sees none"
    found = device_of("cuda").arch
    return "" if found >= (9, 0) else f"needs SM 9.0 or later, found {found[0]}.{found[1]}"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors on one thread: faster, and the same sums on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
