"""Code that a new process compiled is found here, also where torch's compiler named another ptxas since."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KEY = """
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
def key():
    return repr(CUDABackend(GPUTarget("cuda", 90, 32)).hash())
"""
HERE = f"""{KEY}
import os, sys
from loka.kernels.preparing.compiler_key import ask_for_the_assembler_again
first = key()
os.environ["TRITON_PTXAS_PATH"] = sys.argv[1]
print(first)
print(key())
ask_for_the_assembler_again()
print(key())
"""


def lines(code: str, *arguments: str, **environment: str) -> list[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_name_of_compiled_code_is_that_of_a_new_process(tmp_path: Path) -> None:
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.7, V13.7.99\n")
    other.chmod(0o755)
    first, stale, renewed = lines(HERE, str(other))
    (of_a_new_process,) = lines(f"{KEY}\nprint(key())", TRITON_PTXAS_PATH=str(other))
    assert first != of_a_new_process
    assert stale == first, "Triton follows the change by itself: this module is not needed any more"
    assert renewed == of_a_new_process


def test_without_triton_nothing_is_imported_for_it() -> None:
    code = (
        "import sys; from loka.kernels.preparing.compiler_key import ask_for_the_assembler_again as ask; "
        "known = 'triton' in sys.modules; ask(); print(known == ('triton' in sys.modules))"
    )
    assert lines(code) == ["True"]
