"""The norms compiled for SM 9.0, which needs no GPU: in registers alone, memory 16 bytes at a time.

Triton's driver is a stand-in that launches nothing. Run in a process of its own, since here Triton is set to
interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


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
    """Of 64 Ki registers a program may take half."""
    assert len(compiled) == 10
    for name, numbers in compiled.items():
        assert numbers["spilled"] == 0, name
        assert numbers["threads"] * numbers["registers"] <= 32768, name
        assert numbers["shared"] <= 48 * 1024, name


def test_memory_is_read_and_written_16_bytes_at_a_time(compiled: dict[str, dict[str, int]]) -> None:
    for name, numbers in compiled.items():
        assert numbers["narrow_loads"] <= 1, name  # the scale
        assert numbers["wide_stores"] > 0, name


def _numbers(kernel: Any) -> dict[str, int]:
    """Of the one variant that was compiled."""
    import re
    import tempfile

    from triton.knobs import nvidia

    ((made,),) = [cache[0].values() for cache in kernel.device_caches.values()]
    kernel.device_caches.clear()
    ptx = made.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(file), "-o", str(Path(folder) / "out")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    wide = r"\.global\S*\.v4\.b32"
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        "shared": int(made.metadata.shared),
        "threads": 32 * int(made.metadata.num_warps),
        "narrow_loads": len(re.findall(r"ld\.global", ptx)) - len(re.findall(f"ld{wide}", ptx)),
        "wide_stores": len(re.findall(f"st{wide}", ptx)),
    }


def _main() -> None:
    import types

    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def nothing(*_: Any, **__: Any) -> Any:
        return lambda *a, **k: None

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        load_binary=lambda *a: (1, 1, 32, 0, 1024),
    )
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
            launcher_cls=nothing,
            utils=utils,
        )
    )
    from loka.kernels.triton.norms import forward, gradients, host, rowwise, static
    from loka.vocab import BlockNormSpec, Format, Granularity, OperandSpec

    lying = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)
    rows = OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16)
    results: dict[str, dict[str, int]] = {}
    for N, block in ((2048, 256), (4096, 4096)):
        x, norm = torch.zeros(64, N, dtype=torch.bfloat16), BlockNormSpec(block, 1e-6, True)
        host.block_norm(x, norm, None)
        results[f"forward {N}"] = _numbers(forward._kernel)
        host.block_norm_gradients(x, x, norm, None)
        results[f"gradients {N}"] = _numbers(gradients._kernel)
        for name, specs in {"straight": (lying,), "both": (lying, lying.with_transposed(True))}.items():
            host.normed_operands(x, norm, specs, None)
            results[f"{name} {N}"] = _numbers(static._kernel)
        host.normed_operands(x, norm, (rows,), None)
        results[f"rows {N}"] = _numbers(rowwise._kernel)
    print(json.dumps(results))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    _main()
