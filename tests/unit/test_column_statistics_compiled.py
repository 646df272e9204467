"""The statistics compiled for SM 9.0, which needs no GPU: every kernel compiles, in registers alone.

Run in a process of its own, since here Triton is set to interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

POINTERS = {
    "good_rows": "*u8",
    "counts": "*i32",
    "means": "*fp64",
    "m2s": "*fp64",
    "amaxes": "*fp32",
    "negatives": "*i32",
    "histograms": "*i32",
    "row_histograms": "*i32",
    "zeros": "*i32",
    "counters": "*i64",
    "values": "*fp32",
    "codes": "*u8",
    "scale": "*fp32",
    "found": "*i64",
    "low": "*fp32",
    "high": "*fp32",
    "origin": "*i32",
    "k": "*i32",
    "digits": "*i32",
    "halves": "*i64",
    "evens": "*i64",
    "words": "*i64",
    "inside": "*fp32",
    "squares": "*fp32",
    "mean": "*fp64",
    "m2": "*fp64",
    "amax": "*fp32",
    **{
        f"{name}_{side}": type_
        for side in "ab"
        for name, type_ in (("mean", "*fp64"), ("m2", "*fp64"), ("amax", "*fp32"), ("counters", "*i64"))
    },
}


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


def test_nothing_is_spilled_and_two_programs_fit(compiled: dict[str, dict[str, int]]) -> None:
    """Of 64 Ki registers a program of 256 threads may take half."""
    assert len(compiled) == 13
    for name, numbers in compiled.items():
        assert numbers["spilled"] == 0, name
        assert numbers["threads"] * numbers["registers"] <= 32768, name
        assert numbers["shared"] <= 48 * 1024, name


def test_memory_is_read_16_bytes_at_a_time(compiled: dict[str, dict[str, int]]) -> None:
    for name, numbers in compiled.items():
        if name.startswith(("columns", "rows", "cast counts")) and "single" not in name:
            assert numbers["wide_loads"] > 0, name


def _numbers(kernel: Any, x: str, constants: dict[str, Any], warps: int) -> dict[str, int]:
    import re
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.knobs import nvidia

    from loka.kernels.triton.statistics.host import MOST_REGISTERS

    names = kernel.arg_names
    pointers = {n: POINTERS.get(n, x) for n in names if n in POINTERS or n == "x"}
    signature = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    strides = ("C", "F", "stride", "values_stride", "codes_stride")
    aligned = [n for n in names if n in pointers or (n in strides and n not in constants)]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps} | ({"maxnreg": MOST_REGISTERS} if warps == 8 else {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(file), "-o", str(Path(folder) / "out")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        "shared": int(made.metadata.shared),
        "threads": 32 * warps,
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
    }


def _main() -> None:
    from loka.kernels.triton.statistics import cast_counts, columns, feature_bins, merging, rows
    from loka.kernels.triton.statistics.host import cut_of

    results: dict[str, dict[str, int]] = {}
    for x, R, C in (
        ("*bf16", 1_572_864, 32),
        ("*fp32", 1_572_864, 192),
        ("*fp32", 6144, 1024),
        ("*bf16", 6144, 4096),
    ):
        cut = cut_of(R, C)
        tile = {"WHOLE": cut.whole, "HIST": 8, "BR": cut.rows, "BC": cut.columns}
        results[f"columns {x} {C}"] = _numbers(columns.columns_kernel, x, tile, cut.warps)
    results["rows"] = _numbers(rows.rows_kernel, "*bf16", {"BR": 1, "BC": 4096}, 8)
    ones = {"R": 1, "C": 1, "stride": 1, "chunk_rows": 1, "WHOLE": True, "HIST": 1, "BR": 1, "BC": 16}
    results["columns single"] = _numbers(columns.columns_kernel, "*bf16", ones, 8)
    results["partials"] = _numbers(merging.partials_kernel, "*bf16", {"PB": 128, "BC": 16}, 8)
    results["pair"] = _numbers(merging.pair_kernel, "*bf16", {"COUNTS": 132, "BC": 128}, 4)
    tile = {"ZERO_BITS": 0x7F, "LIMIT": 448.0, "BR": 8, "BC": 256}
    results["cast counts"] = _numbers(cast_counts.cast_counts_kernel, "*fp32", tile, 4)
    tile = {"BR": 32, "BC": 64}
    for x in ("*fp32", "*bf16"):
        results[f"bins {x}"] = _numbers(feature_bins.bins_kernel, x, tile, 8)
    results["extents"] = _numbers(feature_bins.extents_kernel, "*fp32", tile, 8)
    results["unpack"] = _numbers(feature_bins.unpack_kernel, "*fp32", {"BLOCK": 1024}, 4)
    print(json.dumps(results))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    _main()
