"""Optional libraries: missing, too old, too new, for another torch, broken; never an exception."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NoReturn

import pytest
import torch

from loka.errors import UnknownNameError
from loka.kernels import kernel, usable
from loka.kernels.backends import deep_gemm
from loka.kernels.libraries import LIBRARIES, library
from loka.vocab import Device, GemmProblem

H200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    library.cache_clear()
    deep_gemm._trial.cache_clear()
    yield
    library.cache_clear()
    deep_gemm._trial.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that a library is installed: modules by import name, a release, or an error while it loads."""

    def install(
        name: str, version: str | None, *, torch_version: str = "2.11.0+cu130", fails: Exception | None = None
    ) -> None:
        supply = LIBRARIES[name]
        monkeypatch.setattr(torch, "__version__", torch_version)

        def found(distribution: str) -> str:
            if version is None or distribution != supply.distribution:
                raise importlib.metadata.PackageNotFoundError(distribution)
            return version

        monkeypatch.setattr(importlib.metadata, "version", found)
        monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
        if fails is not None:

            def load(module: str) -> NoReturn:
                raise fails

            monkeypatch.setattr(importlib, "import_module", load)
            return
        for module in supply.modules:
            monkeypatch.setitem(sys.modules, module, ModuleType(module))

    return install


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(distribution: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    found = library(name)
    supply = LIBRARIES[name]
    assert found.module is None
    assert found.reason == (
        f"{supply.distribution} is not installed: needs {supply.needed} ({supply.install})"
    )
    assert not found.support
    assert "pip install" in found.support.reason


@pytest.mark.parametrize(
    ("name", "version", "loads"),
    [
        ("mslk", "1.1.0", True), ("mslk", "1.1.3", True), ("mslk", "1.0.0", False), ("mslk", "1.2.0", False),
        ("mslk", "1.1.0+cu130", True), ("mslk", "0.0.0", False), ("mslk", "unknown", False),
        ("deep_gemm", "0.1.0", True), ("deep_gemm", "0.1.3", True), ("deep_gemm", "0.1.4", True),
        ("deep_gemm", "0.0.1", False), ("deep_gemm", "0.1.5.post3", False), ("deep_gemm", "0.2.5", False),
        ("transformer_engine", "2.20.2", True), ("transformer_engine", "2.9.0", False),
        ("transformer_engine", "3.0", False),
    ],
)  # fmt: skip
def test_releases(name: str, version: str, loads: bool, install: Callable[..., None]) -> None:
    install(name, version)
    found = library(name)
    supply = LIBRARIES[name]
    assert (found.module is not None) is loads
    assert found.version == version
    assert found.reason == (
        "" if loads else f"found {supply.distribution} {version}, needs {supply.needed} ({supply.install})"
    )
    assert bool(found.support) is loads


def test_the_ranges_read_well() -> None:
    assert LIBRARIES["mslk"].needed == "mslk-cuda >=1.1, <1.2"
    assert LIBRARIES["deep_gemm"].needed == "sgl-deep-gemm >=0.1.0, <0.1.5"


def test_a_wheel_for_another_torch_is_not_loaded(install: Callable[..., None]) -> None:
    install("mslk", "1.1.0", torch_version="2.13.0+cpu", fails=RuntimeError("must not be tried"))
    assert library("mslk").reason == "mslk-cuda 1.1.0 is built for torch 2.11, found torch 2.13.0+cpu"


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudart.so.13: cannot open shared object file"),
        OSError("undefined symbol: _ZN3c10"),
        RuntimeError("operator mslk::x already registered\nsecond line"),
        AssertionError(),
    ],
)
def test_a_broken_library_is_a_reason(error: Exception, install: Callable[..., None]) -> None:
    install("deep_gemm", "0.1.4", fails=error)
    text = (str(error).splitlines() or [""])[0]
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    assert library("deep_gemm").reason == (
        f"sgl-deep-gemm 0.1.4 does not load: {shown} "
        "(needs sgl-deep-gemm >=0.1.0, <0.1.5, `pip install loka[deep-gemm]`)"
    )


def test_a_package_without_metadata_is_judged_once_loaded(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("mslk", None)
    assert library("mslk").reason.startswith("found mslk-cuda an unknown release, needs mslk-cuda >=1.1")
    library.cache_clear()
    monkeypatch.setattr(sys.modules["mslk"], "__version__", "1.1.0", raising=False)
    assert library("mslk").module is sys.modules["mslk"]
    assert library("mslk").version == "1.1.0"


def test_it_is_looked_for_once(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("mslk", "1.1.0")
    first = library("mslk")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    assert library("mslk") is first


def test_an_unknown_library_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown library `cutlass`"):
        library("cutlass")


def test_kernels_ask_their_library_only_where_the_device_fits(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = GemmProblem(64, 32, 64)
    install("mslk", "1.0.0")
    mslk = kernel("mslk.rowwise")
    assert usable(mslk, problem, H200).reason.startswith("found mslk-cuda 1.0.0, needs mslk-cuda >=1.1, <1.2")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: pytest.fail("was asked for"))
    library.cache_clear()
    assert usable(mslk, problem, Device("cpu", "CPU")).reason == "needs SM 9.0, found CPU"


def test_deep_gemm_must_also_compile(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("deep_gemm", "0.1.4")
    chosen = kernel("deep_gemm.blockwise_1x128")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen.available().reason == "DeepGEMM compiles on the GPU it runs on, and torch sees none"

    deep_gemm._trial.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tried: list[GemmProblem] = []

    def warm_up(self: object, problem: GemmProblem, where: torch.device) -> None:
        tried.append(problem)
        if len(tried) > 2:
            raise RuntimeError("nvcc not found\nlong log")

    monkeypatch.setattr(deep_gemm.DeepGemm, "warm_up", warm_up)
    assert chosen.available()
    assert chosen.available()
    assert [p.pass_ for p in tried] == ["fwd", "wgrad"]  # both forms, once
    deep_gemm._trial.cache_clear()
    assert chosen.available().reason == "DeepGEMM cannot compile here: nvcc not found"


def test_importing_the_kernels_loads_no_library() -> None:
    code = (
        "import sys, loka, loka.kernels, torch\n"
        "loaded = {'mslk', 'deep_gemm', 'transformer_engine', 'triton', 'tvm_ffi'} & set(sys.modules)\n"
        "sys.exit(f'{loaded}' if loaded or torch.cuda.is_initialized() else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
