"""Kernels against bf16, as a user pays for them: what is timed, what is picked, what is recorded."""

from loka.bench.gemm import bench_gemm
from loka.bench.prepare import prepare
from loka.bench.record import GemmResult, partial_path
from loka.bench.results import KernelRow, PairResult
from loka.bench.settings import GemmBench
from loka.bench.shapes import Shape, default_shapes, read_shapes

__all__ = [
    "GemmBench",
    "GemmResult",
    "KernelRow",
    "PairResult",
    "Shape",
    "bench_gemm",
    "default_shapes",
    "partial_path",
    "prepare",
    "read_shapes",
]
