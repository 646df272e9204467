"""Where one training step's time goes, and the most that FP8 could give."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from loka.artifacts.profile import StepShares
from loka.timing import peak_of
from loka.vocab import Device, Pass, Site

__all__ = ["StepProfiler", "shares_of"]

_GEMM = frozenset(
    ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::mkldnn_linear")
)
_DEFAULT_FP8_GAIN = 2.0  # dense FP8 over dense BF16 on every device with both (see timing.roofline)


class StepProfiler:
    """torch.profiler around exactly one step."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._profile: Any
        if self._cuda:
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            self._profile = profile(activities=activities, record_shapes=True, acc_events=True)
        else:
            self._profile = torch.autograd.profiler.profile(record_shapes=True, use_kineto=False)

    def start(self) -> None:
        """Begin before the step."""
        if self._cuda:
            torch.cuda.synchronize()
        with _native_stderr_silenced():
            self._profile.__enter__()

    def stop(self) -> list[Any]:
        """End after the step; its events."""
        if self._cuda:
            torch.cuda.synchronize()
        with _native_stderr_silenced():
            self._profile.__exit__(None, None, None)
        # torch.profiler answers by a method, the plain profiler by a list.
        events = self._profile.events() if self._cuda else self._profile.function_events
        return list(events or [])


@contextlib.contextmanager
def _native_stderr_silenced() -> Iterator[None]:
    """Torch 2.13's profiler writes two lines to file descriptor 2, which no logger and no option catches."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def shares_of(events: Iterable[Any], sites: Sequence[Site], device: Device, *, step_us: float) -> StepShares:
    """Sort one step's operator times into shares.

    Args:
        events: torch.profiler events of one step, with input shapes.
        sites: To tell products that FP8 can speed up from the others, by their (m, n, k).
        device: On a GPU kernels' times count against `step_us`, on a CPU operators' own times against
            their sum.
        step_us: Median time of a plain step.
    """
    on_gpu = device.type != "cpu"
    eligible = {tuple(sorted(_dims(site, pass_))) for site in sites if _gains(site) for pass_ in Pass}
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # Device-side events repeat what their launching operators carry.
        if own > 0 and event.device_type == torch._C._autograd.DeviceType.CPU:
            spent[_category(event, eligible)] += own
    total = max(sum(spent.values()), step_us if on_gpu else 0.0, 1e-9)
    share = {name: value / total for name, value in spent.items()}
    known = sum(share.get(n, 0.0) for n in ("eligible", "gemm", "elementwise", "embedding", "optimizer"))
    gain = _fp8_gain(device)
    most = 1.0 / (1.0 - share.get("eligible", 0.0) * (1.0 - 1.0 / gain))
    return StepShares(
        step_us=step_us,
        eligible_gemm=share.get("eligible", 0.0),
        other_gemm=share.get("gemm", 0.0),
        norm_cast_activation=share.get("elementwise", 0.0),
        embedding=share.get("embedding", 0.0),
        optimizer=share.get("optimizer", 0.0),
        other=max(0.0, 1.0 - known),
        ceiling=most,
        basis=_basis(device, gain),
    )


def _fp8_gain(device: Device) -> float:
    peak = peak_of(device.name)
    return _DEFAULT_FP8_GAIN if peak is None else peak.fp8_tflops / peak.bf16_tflops


def _basis(device: Device, gain: float) -> str:
    if device.type == "cpu":
        return (
            "times of this CPU, which has no fast FP8 product; the ceiling is what a device with these "
            f"shares and {gain:.1f}x the BF16 rate in FP8 could give, casts free"
        )
    return f"{gain:.1f}x the BF16 rate in FP8 (dense peaks) for every eligible product, casts free"


def _gains(site: Site) -> bool:
    return site.plannable and not site.is_narrow


def _dims(site: Site, pass_: Pass) -> tuple[int, int, int]:
    problem = site.problem(pass_)
    return problem.m, problem.n, problem.k


def _category(event: Any, eligible: set[tuple[int, ...]]) -> str:
    name = event.name
    if _under(event, "Optimizer.step"):
        return "optimizer"
    if name in _GEMM:
        return "eligible" if _product_dims(event.input_shapes) in eligible else "gemm"
    if "embedding" in name.lower() or _under(event, "EmbeddingBag"):
        return "embedding"
    if name.startswith(("aten::", "triton_", "torch_", "loka::")):
        return "elementwise"
    return "other"


def _under(event: Any, part: str) -> bool:
    while event is not None:
        if part in event.name:
            return True
        event = event.cpu_parent
    return False


def _product_dims(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Sorted (m, n, k) of a 2-D product from its operands' shapes; () where they are not two matrices."""
    matrices = [list(s) for s in shapes if len(s) == 2][:2]
    if len(matrices) != 2:
        return ()
    (m, k), (k2, n) = matrices
    return tuple(sorted((m, n, k))) if k == k2 else tuple(sorted((m, k2, k))) if k == n else ()
