"""The casts compiled for SM 9.0, which needs no GPU: how they convert, and that nothing crosses bytewise.

Run in a process of its own, since here Triton is set to interpret. What is asserted decides the bits (the
clamp is the conversion's own) and the speed, and no interpreter shows it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BF16, FP32, E4M3, E5M2, PAIRS = "*bf16", "*fp32", "*fp8e4nv", "*fp8e5", "*i16"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def test_every_conversion_clamps(compiled: dict[str, dict[str, int]]) -> None:
    """A number above 448 becomes NaN or 448 as a conversion likes; `satfinite` is the clamp."""
    for name, ops in compiled.items():
        conversions = {op: n for op, n in ops.items() if "e4m3x2" in op or "e5m2x2" in op}
        assert conversions, name
        assert all(op.startswith("cvt.rn.satfinite") for op in conversions), (name, conversions)


def test_no_tile_crosses_shared_memory_byte_by_byte(compiled: dict[str, dict[str, int]]) -> None:
    for name, ops in compiled.items():
        assert not [op for op in ops if re.match(r"(ld|st)\.shared\.\w*b8", op)], name


def test_memory_is_read_and_written_16_bytes_at_a_time(compiled: dict[str, dict[str, int]]) -> None:
    for name, ops in compiled.items():
        assert any(op.startswith("ld.global") and ".v4.b32" in op for op in ops), name
        assert ops.get("st.global.v4.b32", 0) > 0, name
        assert not [op for op in ops if re.match(r"st\.global\.(b8|b16)$", op)], name


def _ops(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], warps: int) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    aligned = [n for n in names if n in pointers or n in ("R", "C", "stride", "padded_C", "padded_R")]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    found: dict[str, int] = {}
    for op in re.findall(r"\n\s+(?:@%p\d+ )?([a-z][\w.]+)", made.asm["ptx"]):
        found[op] = found.get(op, 0) + 1
    return found


def _main() -> None:
    from loka.kernels.triton.casts import blocks, rowwise, tensorwise, turned
    from loka.kernels.triton.casts import tiles as t

    results: dict[str, dict[str, int]] = {}
    for x, f8, number, largest in ((BF16, E4M3, 0, 448.0), (FP32, E4M3, 0, 448.0), (BF16, E5M2, 1, 57344.0)):
        words = {"MAX": largest, "FORMAT": number, "POWER_OF_TWO": False}
        label = f"{x[1:]} to {f8[1:]}"
        tile = t.elementwise_tile(8192, 2048)
        results[f"tensorwise {label}"] = _ops(
            tensorwise._cast_kernel,
            {"x": x, "scales": FP32, "scale_out": FP32, "straight": f8},
            {**words, "GIVEN_SCALE": False, "PARTIALS": 1024, "BR": tile.rows, "BC": tile.columns},
            tile.warps,
        )
        tile = t.rowwise_tile(8192, 2048)
        results[f"rowwise {label}"] = _ops(
            rowwise._rows_kernel,
            {"x": x, "values": f8, "scales": FP32},
            {**words, "WHOLE": True, "BR": tile.rows, "BC": tile.columns},
            tile.warps,
        )
        tile = t.transposing_tile(8192, 2048, 2)
        shared = {"ALIGNED": True, "HARDWARE": True}
        results[f"turned {label}"] = _ops(
            turned._kernel,
            {"x": x, "scales": FP32, "scale_out": FP32, "straight": f8, "transposed_pairs": PAIRS},
            {
                **words,
                **shared,
                "SCALE": 1,
                "PARTIALS": 1024,
                "STRAIGHT": True,
                "BP": tile.rows // 2,
                "BC": tile.columns,
            },
            tile.warps,
        )
        for square in (False, True):
            tile = t.both_tile(8192, 2048, square=square, straight=True)
            results[f"both {label} {square}"] = _ops(
                blocks.both_kernel,
                {
                    "x": x,
                    "straight": f8,
                    "straight_scales": FP32,
                    "transposed_pairs": PAIRS,
                    "transposed_scales": FP32,
                },
                {
                    **words,
                    **shared,
                    "SQUARE": square,
                    "STRAIGHT": True,
                    "WHOLE": True,
                    "PIECE": tile.rows,
                    "BC": tile.columns,
                },
                tile.warps,
            )
    print(json.dumps(results))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    _main()
