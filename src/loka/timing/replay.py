"""One sample on a GPU: cold cache, a graph's replay between two events.

Before each sample a buffer several times the size of the L2 cache is *read*. Reading evicts the operands and
writes back what the sample before left dirty, and the lines that it leaves are clean: no write-back of the
flush's own falls into the timed span. It also keeps the GPU busy while the host queues the replay, so a
launch is not waited for.

Two events cost time of their own, about a microsecond or two. It is measured (`clock_overhead_us`) and *not*
subtracted: a sample stays a time that was really seen, and a ratio of two candidates errs towards 1.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch

from loka.timing.failures import failures

__all__ = ["GpuClock"]

_FLUSH_BYTES = 256 * 1024 * 1024  # several times the 50 to 126 MB of L2 that today's GPUs have

# torch's allocator of pinned memory keeps a pointer into a graph whose capture failed, so it must live on.
_FAILED: list[torch.cuda.CUDAGraph] = []


class GpuClock:
    """Takes samples on one GPU. Its buffer, and its graphs' memory, are freed with it.

    Args:
        where: The GPU.

    Attributes:
        where: The GPU.
        stream: Where candidates warm up and are captured.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.stream = _capture_stream(where)
        self._flush = torch.zeros(_FLUSH_BYTES // 4, device=where)
        self._read = torch.zeros((), device=where)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, call: Callable[[], object], calls: int) -> None:
        """Call on the capture stream, in order with everything queued before and after."""
        with self._on_stream():
            for _ in range(calls):
                call()

    def timer(self, call: Callable[[], object]) -> tuple[Callable[[], float], bool]:
        """A function that takes one sample in us, and whether it replays a graph.

        A call that waits for the device, or cannot be captured for another reason, is timed as it is: then
        its samples hold the host's time too, which is what a caller of it pays.
        """
        replay = self._captured(call)

        def sample() -> float:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.sum(self._flush, dim=0, out=self._read)
            start.record()
            (replay or call)()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) * 1e3

        return sample, replay is not None

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.where)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def _captured(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """The call as a graph's replay; None where it cannot be one.

        What the call returns is not kept: all graphs of a clock share one pool, and a later one may use the
        memory of an earlier one's output. They run one after another and no output is read, so the memory
        needed is that of the largest, not the sum.
        """
        if not _never_waits(call, self._on_stream):
            return None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.where)
        try:
            with self._on_stream(), warnings.catch_warnings():
                # An empty graph, which is how the clock's own cost is measured, makes torch warn.
                warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
                self._capture(graph, call)
        except failures():
            self._clean_up(graph)
            return None
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, call: Callable[[], object]) -> None:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        whole = False
        try:
            call()
            whole = True
        finally:
            if whole:
                graph.capture_end()
            else:
                with contextlib.suppress(RuntimeError):  # it says again that the capture failed
                    graph.capture_end()

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Put right what torch leaves after a failed capture.

        torch 2.11 goes on believing that the capture is under way, and the next `empty_cache` stops the
        process with an internal error (mended in pytorch/pytorch#180395; there the call here is refused,
        which changes nothing). The pool's memory is not given back by any of these releases.
        """
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        _FAILED.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


def _capture_stream(where: torch.device) -> torch.cuda.Stream:
    """The stream that torch keeps for captures, where it is on this GPU.

    A library keeps a workspace for each stream that it meets. On this one stream it is made once, while a
    candidate warms up, and so never in a graph's memory, which it would keep alive.
    """
    shared = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
    index = torch.cuda.current_device() if where.index is None else where.index
    if shared is not None and shared.device.index == index:
        return shared
    return torch.cuda.Stream(device=where)


def _never_waits(
    call: Callable[[], object], on_stream: Callable[[], contextlib.AbstractContextManager[None]]
) -> bool:
    """Whether the call runs without waiting for the GPU, as far as torch can tell.

    Asked before capturing, because a capture that fails in the middle leaves torch's allocator and the
    library's state to be cleaned up, and this costs one more call.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        with on_stream():
            call()
    except failures():
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True
