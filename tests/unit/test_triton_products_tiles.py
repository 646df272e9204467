"""The table of tiles as a pure function, the rules, and what the kernels say about themselves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.kernels.backends import triton_products
from loka.kernels.backends.triton_products import KERNELS, TritonBF16, TritonFP8
from loka.kernels.triton.products import tiles as table
from loka.kernels.triton.products.tiles import (
    SHARED_BYTES,
    Family,
    Tiles,
    alternatives,
    tile_class,
    tiles_for,
)
from loka.vocab import Accumulation, Device, Format, GemmProblem, Granularity, Pass

FAMILIES: tuple[Family, ...] = ("exact", "fast", "blockwise", "bf16")
CLASSES = ("long", "flat", "narrow", "skinny", "small", "large")
EXAMPLES = {
    "long": GemmProblem(512, 512, 65536, Pass.WGRAD),
    "flat": GemmProblem(32, 4096, 1024),
    "narrow": GemmProblem(8192, 13, 512),
    "skinny": GemmProblem(1_000_000, 120, 128),
    "small": GemmProblem(1024, 256, 256),
    "large": GemmProblem(8192, 4096, 1024),
}
H200 = Device("cuda", "NVIDIA H200", (9, 0))
SIZES = st.integers(1, 300) | st.integers(1, 1 << 20)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_an_example(name: str) -> None:
    assert tile_class(EXAMPLES[name]) == name


def test_the_table_covers_every_class_of_every_family() -> None:
    assert set(table._TABLE) == set(itertools.product(FAMILIES, CLASSES))


@given(SIZES, SIZES, SIZES, st.sampled_from(FAMILIES), st.sampled_from((99 * 1024, SHARED_BYTES)))
def test_tiles_are_what_the_instructions_take(m: int, n: int, k: int, family: Family, shared: int) -> None:
    problem = GemmProblem(m, n, k)
    for element in (2, 4) if family == "bf16" else (1,):
        found = alternatives(problem, family, element_bytes=element, shared_bytes=shared)
        assert found[0] == tiles_for(problem, family, element_bytes=element, shared_bytes=shared)
        assert len(set(found)) == len(found)
        for t in found:
            assert t.shared_bytes(element) <= shared
            assert t.block_m >= 64  # rows of the warp-group instruction
            assert t.block_n >= 16
            assert t.block_k * element >= 32  # its length of k in bytes
            for size in (t.block_m, t.block_n, t.block_k, t.warps):
                assert size & (size - 1) == 0
            if family == "blockwise":
                assert t.block_k == 128
                assert t.block_n <= 128
            # An fp32 accumulator a thread, two of them where sums are exact: 255 registers are all there is.
            per_thread = t.block_m * t.block_n // (32 * t.warps)
            assert per_thread <= (64 if family in ("exact", "blockwise") else 128)


@given(SIZES, SIZES, SIZES, st.sampled_from(FAMILIES))
def test_splits_cover_k_and_none_is_empty(m: int, n: int, k: int, family: Family) -> None:
    t = tiles_for(GemmProblem(m, n, k), family)
    chunk = t.chunk_k(k)
    assert chunk % t.block_k == 0
    assert chunk * t.splits >= k
    assert chunk * (t.splits - 1) < k
    if t.splits > 1:
        assert tile_class(GemmProblem(m, n, k)) == "long"
        assert chunk >= 8 * t.block_k  # enough steps to fill the pipeline


def test_a_long_sum_fills_the_multiprocessors() -> None:
    for k in (65536, 262144, 1_000_000):
        t = tiles_for(GemmProblem(256, 256, k, Pass.WGRAD), "exact")
        assert 100 <= t.tiles(256, 256) * t.splits <= 300


def test_tiles_of_a_block_norm_hold_whole_blocks() -> None:
    t = Tiles(128, 128, 128, 8, 4, splits=3)
    assert t.for_norm(0) == t
    assert t.for_norm(128) == Tiles(128, 128, 128, 8, 4)
    assert t.for_norm(256).block_n == 256
    assert t.for_norm(256).splits == 1
    assert t.for_norm(256).shared_bytes(1) <= SHARED_BYTES


def test_names_and_accumulations() -> None:
    assert [k.name for k in KERNELS] == [
        "triton.tensorwise",
        "triton.tensorwise.fast",
        "triton.rowwise",
        "triton.rowwise.fast",
        "triton.blockwise_1x128",
        "triton.bf16",
    ]
    for k in KERNELS:
        assert (k.accumulation is Accumulation.FAST) == k.name.endswith(".fast")
        assert k.exportable
        assert k.repro() == ""
        assert k.available()  # the tests install Triton


def test_a_missing_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError("No module named 'triton'")

    triton_products._installed.cache_clear()
    monkeypatch.setattr(triton_products.importlib, "import_module", fails)
    found = KERNELS[0].available()
    triton_products._installed.cache_clear()
    assert not found
    assert found.reason == "needs Triton, which cannot be loaded: No module named 'triton'"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_rules(kernel: TritonFP8 | TritonBF16) -> None:
    odd = GemmProblem(17, 13, 479)
    assert kernel.supports(odd, H200)
    assert kernel.supports(GemmProblem(17, 13, 479, Pass.WGRAD, Format.E5M2), H200)
    assert "interpreter" in kernel.supports(odd, Device("cpu", "CPU")).reason
    assert "AMD" in kernel.supports(odd, Device("hip", "MI300X", (9, 4))).reason
    old = kernel.supports(odd, Device("cuda", "Tesla T4", (7, 5)))
    assert "found 7.5" in old.reason


@pytest.mark.parametrize("kernel", [k for k in KERNELS if isinstance(k, TritonFP8)], ids=lambda k: k.name)
def test_rules_of_fp8(kernel: TritonFP8) -> None:
    both = GemmProblem(16, 16, 16, a_format=Format.E5M2, b_format=Format.E5M2)
    assert "e5m2 x e5m2" in kernel.supports(both, H200).reason
    assert "AMD" in kernel.supports(GemmProblem(16, 16, 16, a_format=Format.E4M3FNUZ), H200).reason
    assert "8-bit" in kernel.supports(GemmProblem(16, 16, 16, a_format=Format.BF16), H200).reason
    assert "needs SM 8.9" in kernel.supports(GemmProblem(16, 16, 16), Device("cuda", "A100", (8, 0))).reason
    for pass_ in Pass:
        a, b = kernel.operands(GemmProblem(17, 13, 479, pass_))
        assert a.pad == b.pad == 16
        assert (a.transposed, b.transposed) == {
            Pass.FWD: (False, False),
            Pass.DGRAD: (False, True),
            Pass.WGRAD: (True, True),
        }[pass_]
        square = kernel.granularity is Granularity.BLOCKWISE_1X128 and pass_ is not Pass.WGRAD
        assert (b.granularity is Granularity.BLOCKWISE_128X128) == square


def test_bf16_takes_operands_as_they_lie() -> None:
    kernel = KERNELS[-1]
    a, b = kernel.operands(GemmProblem(16, 16, 16, Pass.WGRAD))
    assert not a.is_quantized
    assert not b.is_quantized
    assert a.transposed
    assert b.transposed
