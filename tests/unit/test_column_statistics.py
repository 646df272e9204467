"""LoKA's Triton statistics against plain torch in FP64, through Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.errors import UsageError
from loka.kernels import column_statistics
from loka.kernels.column_statistics import merge_moments, moments_of
from loka.kernels.triton.statistics import column_moments, host, merged_moments
from loka.kernels.triton.statistics.host import cut_of
from loka.numerics import Moments

# Narrow ones in one read, some of one row or column, and wide ones in two; several chunks and blocks.
SHAPES = [(1, 1), (1, 40), (300, 1), (37, 13), (1200, 16), (70, 200), (9, 1024), (20, 1025), (2, 4097)]


def data(R: int, C: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(R * 1000 + C)
    x = torch.randn(R, C, generator=generator)
    x *= torch.exp2(torch.randint(-30, 12, (R, 1), generator=generator).float())
    x += 100.0 * torch.randint(0, 2, (C,), generator=generator)
    x[torch.rand(R, C, generator=generator) < 0.2] = 0.0
    x[torch.rand(R, C, generator=generator) < 0.1] = -0.0
    if R > 8:
        x[0, 0], x[3], x[5, C // 2], x[7, -1] = -torch.inf, 0.0, torch.nan, torch.inf
    return x.to(dtype)


def check(found: Moments, x: Tensor) -> None:
    wanted = Moments.of(x)
    for name, tensor in wanted.tensors().items():
        got = found.tensors()[name]
        assert got.dtype is tensor.dtype, name
        assert got.shape == tensor.shape, name
        if name not in ("mean", "m2"):
            assert torch.equal(got, tensor), name
    largest = wanted.amax.double()
    assert ((found.mean - wanted.mean).abs() <= 1e-14 * largest).all()
    assert ((found.m2 - wanted.m2).abs() <= 1e-13 * largest.square() * x.shape[0]).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_plain_torch(shape: tuple[int, int]) -> None:
    for dtype in (torch.float32,) if shape[0] * shape[1] > 8000 else (torch.float32, torch.bfloat16):
        x = data(*shape, dtype)
        check(column_moments(x), x)


def test_strides_and_fp16() -> None:
    """Row gaps, a transposed view, a single row or column, an expanded gradient."""
    wide = data(40, 300, torch.float16)
    for x in (wide[:, 7:107], wide[:, :20].t(), wide[:, 3:4], wide[2:3], wide[::2, ::30]):
        check(column_moments(x), x)
    expanded = torch.tensor(3.0).expand(50, 20)
    check(column_moments(expanded), expanded)


def test_numbers_whose_squares_overflow_fp32_and_a_large_mean() -> None:
    x = torch.tensor([[3e38, 1e20], [-3e38, 1e-20], [2e38, 0.0]])
    check(column_moments(x), x)
    generator = torch.Generator().manual_seed(0)
    narrow = 1e4 + 1e-2 * torch.randn(500, 4, generator=generator)
    found, wanted = column_moments(narrow), Moments.of(narrow)
    assert torch.allclose(found.m2, wanted.m2, rtol=1e-9)


def test_histograms_of_large_tensors_are_of_tiles_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is exact; of each chunk the first tile of eight is looked at."""
    monkeypatch.setattr(host, "HISTOGRAM_ALL", 1)
    x = data(3000, 200)
    found, wanted = column_moments(x), Moments.of(x)
    cut = cut_of(3000, 200)
    tiles = [
        x[top : min(top + cut.rows, first + cut.chunk_rows)]
        for first in range(0, 3000, cut.chunk_rows)
        for top in range(first, min(first + cut.chunk_rows, 3000), 8 * cut.rows)
    ]
    looked_at = Moments.of(torch.cat(tiles))
    assert torch.equal(found.exponents, looked_at.exponents)
    assert torch.equal(found.row_exponents, looked_at.row_exponents)
    for name in ("count", "amax", "zeros", "negatives", "nonfinite_rows"):
        assert torch.equal(found.tensors()[name], wanted.tensors()[name]), name


def test_only_bad_rows() -> None:
    x = torch.full((20, 5), torch.nan)
    check(column_moments(x), x)


def test_two_runs_are_bitwise_equal() -> None:
    x = data(300, 20)
    first, second = column_moments(x), column_moments(x)
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name


def test_merged_in_one_launch_as_by_torch() -> None:
    x = data(100, 150)
    parts = [column_moments(x[:30]), Moments.of(x[30:60]), column_moments(x[60:])]
    empty = Moments.empty(150)
    merged = merged_moments(merged_moments(merged_moments(empty, parts[0]), parts[1]), parts[2])
    check(merged, x)
    wanted = parts[0].merge(parts[1])
    found = merged_moments(parts[0], parts[1])
    for name, tensor in wanted.tensors().items():
        assert torch.allclose(found.tensors()[name].double(), tensor.double(), rtol=1e-14, atol=0), name
    nothing = merged_moments(empty, empty)
    for name, tensor in empty.tensors().items():
        assert torch.equal(nothing.tensors()[name], tensor), name
    single = merged_moments(column_moments(x[:30, :1]), column_moments(x[30:, :1]))
    check(single, x[:, :1])


def test_counters_are_views_that_do_not_share_between_results() -> None:
    first = column_moments(data(20, 5))
    before = {name: tensor.clone() for name, tensor in first.tensors().items()}
    merged_moments(first, first)
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("rows", [1, 100, 6144, 1_572_864])
@pytest.mark.parametrize("columns", [1, 13, 32, 192, 1024, 1025, 4096, 32768])
def test_every_row_and_column_is_in_one_tile(rows: int, columns: int) -> None:
    cut = cut_of(rows, columns)
    assert (cut.chunks - 1) * cut.chunk_rows < rows <= cut.chunks * cut.chunk_rows
    assert cut.blocks * cut.columns >= columns > (cut.blocks - 1) * cut.columns
    assert cut.chunk_rows % cut.rows == 0
    assert cut.whole is (cut.blocks == 1 and columns <= 1024)
    assert cut.chunks * cut.blocks <= 1100
    # Partial results stay small beside the tensor or bounded: mean, m2 and amax of each chunk.
    assert cut.chunks * columns * 20 <= max(24 * 2**20, rows * columns)


def test_the_cpu_takes_plain_torch() -> None:
    x = data(20, 5)
    found = moments_of(x)
    for name, tensor in Moments.of(x).tensors().items():
        assert torch.equal(found.tensors()[name], tensor), name
    merged = merge_moments(found, found)
    assert merged.count.item() == 2 * found.count.item()
    assert moments_of(torch.zeros(0, 3)).count.item() == 0
    with pytest.raises(UsageError, match=r"takes \[rows, features\], got shape \(3,\)"):
        moments_of(torch.zeros(3))
    with pytest.raises(UsageError, match="cannot be merged"):
        merge_moments(found, Moments.empty(3))


def test_without_triton_plain_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_statistics, "_sought", False)
    monkeypatch.setattr(column_statistics, "_kernels", None)
    monkeypatch.setitem(__import__("sys").modules, "loka.kernels.triton.statistics", None)
    assert column_statistics._loaded() is None
    assert column_statistics._loaded() is None
