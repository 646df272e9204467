"""The products compiled for SM 9.0, which needs no GPU: tensor cores, wide loads, no spilled registers.

Run in a process of its own, since here Triton is set to interpret. What is asserted decides speed, and no
interpreter shows it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = 227 * 1024
BF16, FP32, E4M3, E5M2 = "*bf16", "*fp32", "*fp8e4nv", "*fp8e5"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_tiles_fit_into_registers_and_shared_memory(compiled: dict[str, dict[str, Any]]) -> None:
    for name, found in compiled.items():
        assert found["shared"] <= SHARED_BYTES, name
        assert found["stack"] == 0, f"{name} spills registers"


def test_products_run_on_the_tensor_cores_with_wide_loads(compiled: dict[str, dict[str, Any]]) -> None:
    for name, found in compiled.items():
        if name == "add_splits":
            continue
        assert found["wgmma"] > 0, name
        # 16 bytes a load, asynchronously; where sizes are multiples of 8 too.
        assert found["copies"] == ["0x10"], name


def test_the_table_s_shared_memory_is_what_is_used(compiled: dict[str, dict[str, Any]]) -> None:
    for name in ("exact", "fast", "blockwise", "bf16 fwd", "bf16 dgrad", "bf16 wgrad"):
        used, planned = compiled[name]["shared"], compiled[name]["planned"]
        # Barriers and the epilogue's exchange come on top, or reuse the pipeline's buffers.
        assert planned <= used <= planned + 4096, name


def _main() -> None:
    from loka.kernels.triton.products.blocks import _add_splits_kernel
    from loka.kernels.triton.products.feature_kernels import sum_kernel, transform_kernel
    from loka.kernels.triton.products.feature_tiles import sum_tiles, tiles_for_features

    found = _fp8() | _bf16()
    reduction = {"BIAS": False, "ACTIVATION": 0, "AT_ONCE": 4, "BLOCK": 1024}
    found["add_splits"] = _resources(
        _add_splits_kernel, {"partial": FP32, "bias": FP32, "out": FP32}, reduction, warps=4, stages=3
    )
    t = tiles_for_features(8192, 120, 128, 128, element_bytes=2)
    tile = {"BLOCK_R": t.rows, "BLOCK_C": t.inner, "BLOCK_D": t.columns, "COMPUTE": 0}
    pointers = {"weights": BF16} | {f"{end}{i}": BF16 for end in ("in", "out") for i in range(4)}
    for name, parts, inner in (("forward", (1, 3), "inner"), ("dx", (3, 1), "row")):
        constants = {"WHOLE": True, "IN_PARTS": parts[0], "OUT_PARTS": parts[1], "stride_in_column": 1}
        constants |= {f"stride_weights_{inner}": 1}
        found[f"features {name}"] = _resources(
            transform_kernel, pointers, tile | constants, warps=t.warps, stages=t.stages
        )
    s = sum_tiles(8192, 120, 128, 128, element_bytes=2)
    tile = {"BLOCK_R": s.rows, "BLOCK_C": s.inner, "BLOCK_D": s.columns, "COMPUTE": 0}
    pointers = {"x": BF16, "partial": FP32} | {f"g{i}": BF16 for i in range(4)}
    found["features dw"] = _resources(
        sum_kernel, pointers, tile | {"PARTS": 3, "stride_x_column": 1}, warps=s.warps, stages=s.stages
    )
    sys.stdout.write(json.dumps(found))


_PLAIN_TILE = {"SPLIT": False, "BIAS": True, "NORM": 0, "ACTIVATION": 0, "EVEN_K": True}


def _fp8() -> dict[str, dict[str, Any]]:
    from loka.kernels.triton.products.blockwise import _blockwise_kernel
    from loka.kernels.triton.products.scaled import _scaled_kernel
    from loka.kernels.triton.products.tiles import tiles_for
    from loka.vocab import GemmProblem

    found = {}
    large = GemmProblem(8192, 4096, 4096)
    pointers = {"a": E4M3, "b": E4M3, "scale_a": FP32, "scale_b": FP32, "bias": BF16, "out": BF16}
    for name, family in (("exact", "exact"), ("fast", "fast"), ("e5m2, uneven k", "exact")):
        t = tiles_for(large, family)
        tile = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k, "GROUP_M": t.group_m}
        constants = {"VECTOR_A": True, "VECTOR_B": True, "FAST": family == "fast"}
        uneven = {"EVEN_K": not name.startswith("e5m2")}
        types = pointers | ({"a": E5M2} if name.startswith("e5m2") else {})
        found[name] = _resources(
            _scaled_kernel,
            types,
            _PLAIN_TILE | tile | constants | uneven,
            warps=t.warps,
            stages=t.stages,
            planned=t.shared_bytes(1),
        )
    t = tiles_for(large, "blockwise")
    tile = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "GROUP_M": t.group_m}
    for name, square in (("blockwise", True), ("blockwise of vectors", False)):
        constants = _PLAIN_TILE | tile | {"SQUARE_B": square, "BIAS": square}
        found[name] = _resources(
            _blockwise_kernel,
            pointers,
            constants,
            warps=t.warps,
            stages=t.stages,
            planned=t.shared_bytes(1),
        )
    return found


def _bf16() -> dict[str, dict[str, Any]]:
    """The three passes of a skinny site whose sizes are multiples of 8, not of 16."""
    from loka.kernels.triton.products.bf16 import _plain_kernel
    from loka.kernels.triton.products.tiles import tiles_for
    from loka.vocab import GemmProblem

    found = {}
    for name, problem, a_by_rows, b_by_rows in (
        ("fwd", GemmProblem(1_000_000, 120, 136), False, False),
        ("dgrad", GemmProblem(1_000_000, 136, 120), False, True),
        ("wgrad", GemmProblem(120, 136, 1_000_000), True, True),
    ):
        t = tiles_for(problem, "bf16")
        constants = _PLAIN_TILE | {
            "COMPUTE": 0,
            "A_BY_ROWS": a_by_rows,
            "B_BY_ROWS": b_by_rows,
            "M_EIGHT": a_by_rows,
            "N_EIGHT": True,
            "K_EIGHT": not a_by_rows,
            "A_EIGHT": True,
            "B_EIGHT": True,
            "EVEN_K": False,
            "SPLIT": t.splits > 1,
            "BLOCK_M": t.block_m,
            "BLOCK_N": t.block_n,
            "BLOCK_K": t.block_k,
            "GROUP_M": t.group_m,
            "stride_a_row" if a_by_rows else "stride_a_k": 1,
            "stride_b_row" if b_by_rows else "stride_b_k": 1,
        }
        pointers = {"a": BF16, "b": BF16, "bias": BF16, "out": FP32 if t.splits > 1 else BF16}
        found[f"bf16 {name}"] = _resources(
            _plain_kernel,
            pointers,
            constants,
            warps=t.warps,
            stages=t.stages,
            planned=t.shared_bytes(2),
            multiple_of_16=False,
        )
    return found


def _resources(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, object],
    *,
    warps: int,
    stages: int,
    planned: int = 0,
    multiple_of_16: bool = True,
) -> dict[str, Any]:
    """Compile for SM 9.0; what the binary and its PTX say."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name == "eps" else "i32")
        for name in kernel.arg_names
    }
    # Triton marks pointers and numbers that are multiples of 16, no others. Chunks are whole steps.
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and name not in (kernel.do_not_specialize or ())
        if name in pointers or name == "chunk" or multiple_of_16
    }
    made = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    stack = re.search(r"STACK:(\d+)", usage.stdout)
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "planned": planned,
        "stack": int(stack.group(1)) if stack else -1,
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "copies": sorted(set(re.findall(r"cp\.async\.c\S+ \[ [^\]]*\], \[ [^\]]*\], (0x\w+)", ptx))),
    }


if __name__ == "__main__":
    _main()
