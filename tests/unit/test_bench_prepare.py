"""Preparing in processes: a kernel that ends its process takes only the worker along."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loka.bench import GemmBench, prepare
from loka.bench.gemm import bench_gemm
from loka.bench.shapes import Shape
from loka.kernels import HIGH_PRECISION, Kernel, kernel
from loka.kernels.base import BaseKernel
from loka.numerics import Quantized
from loka.timing import DeviceLostError
from loka.vocab import Device, GemmProblem, OperandSpec, Pass, Support


@dataclass(frozen=True, slots=True)
class Ending(BaseKernel):
    """Ends its process at one n, loses the device at another."""

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        return Support.yes()

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        return kernel("torch.tensorwise").operands(problem)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        if b.values.shape[0] == 48:
            os._exit(7)
        if b.values.shape[0] == 80:
            raise DeviceLostError(self.name, "an illegal instruction was encountered")
        return kernel("torch.tensorwise").matmul(a, b, out_dtype=out_dtype, bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(GemmBench):
    """With the kernel above, in the worker processes too."""

    def chosen(self) -> list[Kernel]:
        return [kernel(HIGH_PRECISION), kernel("torch.tensorwise"), Ending("ending.tensorwise")]


def settings() -> Bench:
    shapes = tuple(Shape(m=64, n=n, k=32) for n in (32, 48, 80, 96))
    return Bench(shapes=shapes, passes=(Pass.FWD,), rounds=8, device="cpu")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_kernel_ends_goes_on_behind_it(workers: int) -> None:
    found = prepare(settings(), workers=workers)
    assert {key: set(reasons) for key, reasons in found.items()} == {
        f"64x{n}x32.fwd": {HIGH_PRECISION, "torch.tensorwise", "ending.tensorwise"} for n in (32, 48, 80, 96)
    }
    assert all(reasons["torch.tensorwise"] == "" for reasons in found.values())
    assert "exit code 7" in found["64x48x32.fwd"]["ending.tensorwise"]
    assert "illegal instruction" in found["64x80x32.fwd"]["ending.tensorwise"]
    assert found["64x96x32.fwd"]["ending.tensorwise"] == ""


def test_what_was_prepared_is_not_vetted_again(tmp_path: Path) -> None:
    result = bench_gemm(settings(), record=tmp_path / "r.json", workers=2)
    assert result.details["seconds"]["vetting"] < result.details["seconds"]["preparing"]
    rows = result.details["kernels"]
    text = str(rows)
    assert "exit code 7" in text
    assert "illegal instruction" in text


def test_kernels_left_out_are_not_tried() -> None:
    left_out = {"64x48x32.fwd": {"ending.tensorwise": "left out"}}
    assert (
        prepare(settings(), workers=1, left_out=left_out)["64x48x32.fwd"]["ending.tensorwise"] == "left out"
    )


def test_pairs_that_were_timed_are_not_prepared_again() -> None:
    done = {"64x48x32.fwd", "64x80x32.fwd", "64x96x32.fwd"}
    assert set(prepare(settings(), workers=2, done=done)) == {"64x32x32.fwd"}
    assert prepare(settings(), workers=2, done=done | {"64x32x32.fwd"}) == {}
