"""Where a file was made: versions, machine, commit. Asked for when a file is written, never on import."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec

import loka

__all__ = ["Environment", "describe_environment"]

_LIBRARIES = (
    "numpy",
    "msgspec",
    "safetensors",
    "pyarrow",
    "torchmetrics",
    "triton",
    "mslk-cuda",
    "sgl-deep-gemm",
    "apache-tvm-ffi",
    "transformer-engine",
    "torchao",
    "torchrec",
)


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The machine and the software that made a file.

    Attributes:
        python: Version of Python.
        platform: Operating system and its release.
        machine: CPU architecture.
        cpu_count: Logical CPUs.
        loka: Version of LoKA.
        torch: Version of PyTorch, with its build tag.
        cuda: CUDA version torch was built for; None for a CPU build.
        devices: Names of the GPUs, where the process used one.
        driver: Version of the GPU driver, where the process used one.
        libraries: Versions of the other libraries that are installed.
        commit: Git commit of LoKA's source when it runs from a checkout, with `+changes` where tracked files
            differ.
    """

    python: str
    platform: str
    machine: str
    cpu_count: int
    loka: str
    torch: str
    cuda: str | None = None
    devices: tuple[str, ...] = ()
    driver: str | None = None
    libraries: dict[str, str] = {}
    commit: str | None = None


def describe_environment() -> Environment:
    """Describe this process. Imports no optional library and never starts CUDA by itself."""
    versions = {name: version for name in _LIBRARIES if (version := _version(name)) is not None}
    cuda, devices, driver = _gpu()
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cpu_count=os.cpu_count() or 1,
        loka=loka.__version__,
        torch=_version("torch") or "unknown",
        cuda=cuda,
        devices=devices,
        driver=driver,
        libraries=versions,
        commit=_commit(),
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> tuple[str | None, tuple[str, ...], str | None]:
    torch = sys.modules.get("torch")
    if torch is None:
        return None, (), None
    cuda = torch.version.cuda
    # Asking for names would start CUDA in a process that had kept off the GPU.
    if not torch.cuda.is_initialized():
        return cuda, (), None
    names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return cuda, names, _driver()


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    if not file.is_file():
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", file.read_text())
    return found.group(1) if found else None


@functools.cache
def _commit() -> str | None:
    package = Path(loka.__file__).parent
    # The package may be installed inside somebody else's checkout: only a tracked file makes it ours.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(package, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return head + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
