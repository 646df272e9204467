"""What `loka doctor` finds: versions, the device, and what each kernel says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import torch
from rich.table import Table

from loka.artifacts import describe_environment
from loka.cli.output import cell
from loka.kernels import HIGH_PRECISION, KERNELS, check_patterns, device_of, usable
from loka.kernels.protocol import Kernel
from loka.vocab import A_FORMATS, GemmProblem, Pass

__all__ = [
    "kernel_rows",
    "kernels_table",
    "versions",
    "linear_problems",
    "matching_kernels",
    "versions_table",
]

Row = dict[str, Any]
_SIZE = 1024
_OPTIONAL = (
    "triton",
    "mslk-cuda",
    "sgl-deep-gemm",
    "apache-tvm-ffi",
    "torchao",
    "torchrec",
    "fbgemm-gpu",
    "transformer-engine",
)


def versions(where: str) -> dict[str, str]:
    """Name to version or description, of all that decides what runs here."""
    device = device_of(where)
    environment = msgspec.to_builtins(describe_environment())
    found = {
        name: str(environment[name] or "none")
        for name in ("loka", "commit", "python", "platform", "machine", "cpu_count", "torch", "cuda")
    }
    found["driver"] = str(environment["driver"] or "none")
    found["device"] = f"{where}: {device.name} ({device.sm})"
    if device.type != "cpu":
        properties = torch.cuda.get_device_properties(torch.device(where))
        found["device memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
    found |= environment["libraries"]
    return found | {name: found.get(name) or _installed(name) for name in _OPTIONAL}


def _installed(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed (optional)"


def versions_table(found: dict[str, str]) -> Table:
    """`versions` as a table."""
    table = Table(title="environment", title_justify="left")
    table.add_column("what")
    table.add_column("found")
    for name, value in found.items():
        table.add_row(name, cell(value))
    return table


def linear_problems(rows: int, out: int, inside: int, *, bias: bool = False) -> list[GemmProblem]:
    """The three products of a linear layer; gradients in both formats."""
    return [
        GemmProblem.of_linear(
            pass_, rows=rows, out_features=out, in_features=inside, grad_format=grad_format, bias=bias
        )
        for pass_ in Pass
        for grad_format in A_FORMATS[pass_]
    ]


def matching_kernels(patterns: Sequence[str]) -> dict[str, Kernel]:
    """The kernels whose names match a pattern, in the registry's order; all where there is none.

    Args:
        patterns: Globs, several to a string with commas between.

    Raises:
        UnknownNameError: for a pattern that matches nothing.
    """
    globs = tuple(glob for text in patterns for glob in text.split(",") if glob)
    check_patterns(globs)
    wanted = globs or ("*",)
    return {name: k for name, k in KERNELS.items() if any(fnmatchcase(name, glob) for glob in wanted)}


def kernel_rows(where: str, kernels: Mapping[str, Kernel]) -> list[Row]:
    """What every kernel says of a product of 1024 x 1024 x 1024, by pass and formats."""
    device = device_of(where)
    rows = []
    for name, kernel in kernels.items():
        for problem in linear_problems(_SIZE, _SIZE, _SIZE):
            support = usable(kernel, problem, device)
            rows.append(
                {
                    "kernel": name,
                    "pass": str(problem.pass_),
                    "formats": f"{problem.a_format} x {problem.b_format}",
                    "ok": support.ok,
                    "reason": support.reason,
                    "emulated": kernel.emulated,
                    "verified": kernel.verified,
                }
            )
    return rows


def kernels_table(rows: Sequence[Row]) -> Table:
    """A line a kernel: yes or no by pass and formats, and the reasons."""
    heads = list(dict.fromkeys((row["pass"], row["formats"]) for row in rows))
    table = Table(title=f"kernels, for {_SIZE} x {_SIZE} x {_SIZE}", title_justify="left")
    table.add_column("kernel", no_wrap=True)
    for pass_, formats in heads:
        table.add_column(f"{pass_}\n{formats.partition(' ')[0]}")
    table.add_column("why not, and what else")
    for name in dict.fromkeys(row["kernel"] for row in rows):
        mine = {(row["pass"], row["formats"]): row for row in rows if row["kernel"] == name}
        reasons = list(dict.fromkeys(row["reason"] for row in mine.values() if row["reason"]))
        if name == HIGH_PRECISION:
            reasons = ["leaves the product as it is"]
        elif any(row["emulated"] for row in mine.values()):
            reasons.append("FP8 numbers, nothing faster")
        if not all(row["verified"] for row in mine.values()):
            reasons.insert(0, "unverified: written by its library's contract, never run by us")
        answers = ["yes" if mine[head]["ok"] else "no" for head in heads]
        table.add_row(name, *answers, cell("; ".join(reasons)))
    return table
