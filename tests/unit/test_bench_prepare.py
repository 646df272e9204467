"""Preparing in processes: a kernel that ends its process takes only the worker along."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ending_kernel import Ending

from loka.bench import GemmBench, prepare
from loka.bench.gemm import bench_gemm
from loka.bench.shapes import Shape
from loka.kernels import HIGH_PRECISION, Kernel, kernel
from loka.kernels.preparing import Prepared, ProductTask
from loka.vocab import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(GemmBench):
    """With a kernel that ends processes, which the workers find in the module of its class."""

    def chosen(self) -> list[Kernel]:
        return [kernel(HIGH_PRECISION), kernel("torch.tensorwise"), Ending("ending.tensorwise")]


def settings() -> Bench:
    shapes = tuple(Shape(m=64, n=n, k=32) for n in (32, 48))
    return Bench(shapes=shapes, passes=(Pass.FWD,), rounds=8, device="cpu")


def test_what_ends_a_process_is_found_before_anything_is_timed(tmp_path: Path) -> None:
    result = bench_gemm(settings(), record=tmp_path / "r.json", workers=1)
    assert result.details["seconds"]["vetting"] < result.details["seconds"]["preparing"]
    text = str(result.details["kernels"])
    assert "exit code 7" in text


def test_kernels_left_out_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def noted(tasks: Iterable[ProductTask], where: torch.device, *, workers: int) -> Prepared:
        asked.extend((task.kernel, task.problem.n) for task in tasks)
        return Prepared()

    monkeypatch.setattr(importlib.import_module("loka.bench.prepare"), "prepare_all", noted)
    left_out = {"64x48x32.fwd": {"ending.tensorwise": "left out"}}
    assert prepare(settings(), workers=1, left_out=left_out) == left_out
    assert ("ending.tensorwise", 48) not in asked
    assert ("ending.tensorwise", 32) in asked
    assert ("torch.tensorwise", 48) in asked
    asked.clear()
    prepare(settings(), workers=2, done={"64x48x32.fwd"})
    assert {n for _, n in asked} == {32}
