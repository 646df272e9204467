"""Optional kernel libraries: loaded when first asked for, and never an exception.

A library that is missing, too old, too new or broken is a reason that says what was found, what is needed and
how to get it. Versions are checked before anything is loaded: a wheel for another torch may end the process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import subprocess
from dataclasses import dataclass
from types import ModuleType

import torch

from loka.errors import unknown_name
from loka.vocab import Support

__all__ = ["FOREIGN_ERRORS", "LIBRARIES", "Library", "Supply", "library"]

_log = logging.getLogger("loka")

# What foreign packages raise while they load or compile: missing files and symbols, failed checks of CUDA
# and of versions, errors of their build tools.
FOREIGN_ERRORS = (
    ImportError,
    OSError,
    RuntimeError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    SyntaxError,
    TypeError,
    ValueError,
    subprocess.SubprocessError,
)

_Release = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Supply:
    """Where a library comes from and which of its releases fit.

    Attributes:
        modules: What to import, in order; the first is the library itself.
        distribution: Its name on the package index.
        low: First release that fits, as numbers.
        below: First release that does not fit any more.
        torch: The torch release (major, minor) it is built for; None for any.
        install: How to get it.
    """

    modules: tuple[str, ...]
    distribution: str
    low: _Release
    below: _Release
    torch: tuple[int, int] | None
    install: str

    @property
    def needed(self) -> str:
        """`mslk-cuda >=1.1, <1.2`."""
        return f"{self.distribution} >={_shown(self.low)}, <{_shown(self.below)}"

    def fits(self, version: str) -> bool:
        """Whether a release is in the range; local and post suffixes do not count."""
        release = _release(version)
        return bool(release) and self.low <= release < self.below


LIBRARIES: dict[str, Supply] = {
    # Each mslk release is built for one torch: 1.1 for 2.11.
    "mslk": Supply(("mslk", "mslk.gemm"), "mslk-cuda", (1, 1), (1, 2), (2, 11), "`pip install loka[mslk]`"),
    # Later wheels miss symbols of torch 2.11, some of them only when first called.
    "deep_gemm": Supply(
        ("deep_gemm",), "sgl-deep-gemm", (0, 1, 0), (0, 1, 5), None, "`pip install loka[deep-gemm]`"
    ),
    "transformer_engine": Supply(
        ("transformer_engine", "transformer_engine.pytorch"),
        "transformer-engine",
        (2, 20),
        (3,),
        None,
        '`pip install --no-build-isolation "transformer_engine[pytorch,core_cu13]"`',
    ),
}


@dataclass(frozen=True, slots=True)
class Library:
    """What was found of an optional library.

    Attributes:
        name: Its import name.
        module: The loaded module; None where it cannot be used.
        version: The installed release; empty where none was found.
        reason: Why it cannot be used; empty where it can.
    """

    name: str
    module: ModuleType | None
    version: str
    reason: str

    @property
    def support(self) -> Support:
        """The same as a yes, or a no with the reason."""
        return Support.yes() if self.module is not None else Support.no(self.reason)


@functools.cache
def library(name: str) -> Library:
    """Find and load an optional library, once in a process.

    Args:
        name: An import name of `LIBRARIES`.

    Raises:
        UnknownNameError: for a library that no kernel uses.
    """
    supply = LIBRARIES.get(name)
    if supply is None:
        raise unknown_name("library", name, list(LIBRARIES))
    version = _installed_version(supply)
    reason = _why_not_loaded(supply, version)
    if reason:
        return Library(name, None, version, reason)
    try:
        first, *_ = (importlib.import_module(module) for module in supply.modules)
    except FOREIGN_ERRORS as error:
        _log.debug("%s does not load", name, exc_info=True)
        return Library(name, None, version, _broken(supply, version, error))
    version = version or str(getattr(first, "__version__", ""))
    if not supply.fits(version):  # known only now: a package without metadata
        return Library(name, None, version, _unfit(supply, version))
    return Library(name, first, version, "")


def _why_not_loaded(supply: Supply, version: str) -> str:
    """What speaks against loading at all; empty where nothing does."""
    if not version and not _is_importable(supply.modules[0]):
        return f"{supply.distribution} is not installed: needs {supply.needed} ({supply.install})"
    if version and not supply.fits(version):
        return _unfit(supply, version)
    if supply.torch is not None and _release(torch.__version__)[:2] != supply.torch:
        wanted = f"{supply.torch[0]}.{supply.torch[1]}"
        found = f"{supply.distribution} {version}".strip()
        return f"{found} is built for torch {wanted}, found torch {torch.__version__}"
    return ""


def _installed_version(supply: Supply) -> str:
    try:
        return importlib.metadata.version(supply.distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a half-removed package, or a module without a spec
        return False


def _unfit(supply: Supply, version: str) -> str:
    found = version or "an unknown release"
    return f"found {supply.distribution} {found}, needs {supply.needed} ({supply.install})"


def _broken(supply: Supply, version: str, error: Exception) -> str:
    text = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    found = f"{supply.distribution} {version}".strip()
    return f"{found} does not load: {what} (needs {supply.needed}, {supply.install})"


def _release(version: str) -> _Release:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def _shown(release: _Release) -> str:
    return ".".join(map(str, release))
