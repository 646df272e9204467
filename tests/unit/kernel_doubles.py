"""Doubles of kernel libraries on a CPU: they read memory as the real ones do, refuse what those refuse.

Each takes values and scales where its library reads them: by address and stride, not by what a tensor's shape
says. So scales laid out for another library give another number, or an error, as on the real device.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from loka.kernels.backends import torch_blockwise

__all__ = ["install_block_scaled_mm", "install_deep_gemm", "install_mslk", "install_transformer_engine"]


def _product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """FP64, scales given one an element (broadcast)."""
    return (a.double() * scale_a.double()) @ (b.double() * scale_b.double()).t()


def _blocks(scale: Tensor, *, rows: int, k: int, block_rows: int = 1, block_k: int = 128) -> Tensor:
    """[rows, k] of a [row blocks, k blocks] matrix."""
    wide = scale.repeat_interleave(block_k, dim=1)[:, :k]
    return wide.repeat_interleave(block_rows, dim=0)[:rows]


def _read(scale: Tensor, shape: tuple[int, int], strides: tuple[int, int]) -> Tensor:
    """The scale matrix that a kernel finds when it reads with its own strides."""
    return scale.as_strided(shape, strides)


def install_block_scaled_mm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """cuBLASLt's block scales: returns the list that every call is written to."""
    calls: list[str] = []

    def scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe_b: int, bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        (m, k), n = a.shape, b.shape[0]
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert k % 16 == 0
        assert n % 16 == 0
        assert out_dtype in (torch.bfloat16, torch.float32)
        assert bias is None or (bias.dtype is out_dtype is torch.bfloat16)
        blocks = -(-k // 128)
        assert tuple(scale_a.shape) == (m, blocks)
        assert scale_a.stride(0) == 1
        assert scale_a.stride(1) == m or (blocks == 1 and scale_a.stride(1) == 1)
        wide_a = _blocks(_read(scale_a, (m, blocks), (1, m)), rows=m, k=k)
        if recipe_b == 4:
            assert tuple(scale_b.shape) == (n, blocks)
            assert scale_b.stride(0) == 1
            assert scale_b.stride(1) == n or (blocks == 1 and scale_b.stride(1) == 1)
            wide_b = _blocks(_read(scale_b, (n, blocks), (1, n)), rows=n, k=k)
        else:
            assert recipe_b == 5
            padded, columns = -(-blocks // 4) * 4, -(-n // 128)
            assert tuple(scale_b.shape) == (padded, columns)
            assert scale_b.stride(0) == 1
            assert scale_b.stride(1) == padded or (columns == 1 and scale_b.stride(1) == 1)
            read = _read(scale_b, (columns, blocks), (padded, 1))
            wide_b = _blocks(read, rows=n, k=k, block_rows=128)
        calls.append(f"{recipe_b} {out_dtype}")
        out = _product(a, b, wide_a, wide_b)
        return (out if bias is None else out + bias.double()).to(out_dtype)

    monkeypatch.setattr(torch_blockwise, "_scaled_mm_v2", scaled_mm)
    return calls


def install_mslk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """MSLK's three operators; returns the list of `use_fast_accum` that rowwise was called with."""
    fast: list[bool] = []

    def checked(a: Tensor, b: Tensor) -> None:
        assert a.dtype is b.dtype is torch.float8_e4m3fn
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert a.shape[-1] % 16 == 0
        assert b.shape[-2] % 8 == 0

    def rowwise(
        a: Tensor, b: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None,
        use_fast_accum: bool = True,
    ) -> Tensor:  # fmt: skip
        checked(a, b)
        assert x_scale.shape == (a.shape[0],)
        assert w_scale.shape == (b.shape[0],)
        assert bias is None or bias.dtype in (torch.bfloat16, torch.float32)
        fast.append(use_fast_accum)
        out = _product(a, b, x_scale[:, None], w_scale[:, None])
        return (out if bias is None else out + bias.double()).bfloat16()

    def groupwise(a: Tensor, b: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
        checked(a, b)
        (m, k), n = a.shape, b.shape[0]
        assert k % 128 == 0
        assert x_scale.dtype is w_scale.dtype is torch.float32
        wide_a = _blocks(_read(x_scale, (m, k // 128), (1, m)), rows=m, k=k)
        columns = -(-n // 128)
        read = _read(w_scale, (columns, k // 128), (1, columns))
        return _product(a, b, wide_a, _blocks(read, rows=n, k=k, block_rows=128)).bfloat16()

    def stacked(a: Tensor, b: Tensor, x_scale: Tensor, w_scale: Tensor, sizes: Tensor) -> Tensor:
        checked(a, b)
        assert sizes.dtype is torch.int64
        assert w_scale.shape == b.shape[:2]
        rows, scales = a.split(sizes.tolist()), x_scale.split(sizes.tolist())
        parts = [
            _product(r, w, s[:, None], t[:, None])
            for r, s, w, t in zip(rows, scales, b, w_scale, strict=True)
        ]
        return torch.cat(parts).bfloat16()

    operators = SimpleNamespace(
        f8f8bf16_rowwise=rowwise, f8f8bf16_groupwise=groupwise, f8f8bf16_rowwise_grouped_stacked=stacked
    )
    monkeypatch.setattr(torch.ops, "mslk", operators, raising=False)
    return fast


def install_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """DeepGEMM's dense product; returns the list of recipes it was called with."""
    recipes: list[tuple[int, int, int]] = []

    def fp8_gemm_nt(
        a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, c: Tensor | None = None,
        recipe: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        (x, sx), (w, sw) = a, b
        (m, k), n = x.shape, w.shape[0]
        assert x.dtype is w.dtype is torch.float8_e4m3fn
        assert k % 16 == 0
        blocks = -(-k // 128)
        assert tuple(sx.shape) == (m, blocks)
        assert sx.dtype is torch.float32
        assert recipe is not None
        if recipe == (1, 128, 128):
            assert c is None
            assert d.dtype is torch.bfloat16
            assert tuple(sw.shape) == (-(-n // 128), blocks)
            assert sw.is_contiguous()
            wide_b = _blocks(sw, rows=n, k=k, block_rows=128)
            d.copy_(_product(x, w, _blocks(sx, rows=m, k=k), wide_b).bfloat16())
        else:
            assert recipe == (1, 1, 128)
            assert c is not None
            assert d.dtype is c.dtype is torch.float32
            assert tuple(sw.shape) == (n, blocks)
            sums = _product(x, w, _blocks(sx, rows=m, k=k), _blocks(sw, rows=n, k=k))
            d.copy_((c.double() + sums).float())
        recipes.append(recipe)

    module = ModuleType("deep_gemm")
    module.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return recipes


def install_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's MXFP8 quantizer and general_gemm, as release 2.20 describes them."""

    class Quantizer:
        def __init__(self, dtype: object, rowwise: bool = True, columnwise: bool = True) -> None:
            assert (dtype, rowwise, columnwise) == ("e4m3", True, False)

        def make_empty(
            self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
        ) -> SimpleNamespace:
            rows, k = shape
            assert rows % 32 == 0
            assert k % 32 == 0
            padded = (-(-rows // 128) * 128, -(-(k // 32) // 4) * 4)
            return SimpleNamespace(
                _rowwise_data=torch.full(shape, 255, dtype=torch.uint8),
                _rowwise_scale_inv=torch.full(padded, 255, dtype=torch.uint8),
            )

    def decoded(t: SimpleNamespace) -> Tensor:
        values = t._rowwise_data.view(torch.float8_e4m3fn).double()
        rows, k = values.shape
        scale = t._rowwise_scale_inv.view(torch.float8_e8m0fnu).float()[:rows, : k // 32]
        return values * scale.double().repeat_interleave(32, dim=1)

    def general_gemm(
        a: SimpleNamespace, b: SimpleNamespace, *, out_dtype: torch.dtype, layout: str
    ) -> tuple[Tensor, None, None, None]:
        assert layout == "TN"
        return (decoded(b) @ decoded(a).t()).to(out_dtype), None, None, None

    for name, content in {
        "transformer_engine_torch": {"DType": SimpleNamespace(kFloat8E4M3="e4m3")},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine.pytorch.tensor.mxfp8_tensor": {"MXFP8Quantizer": Quantizer},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
