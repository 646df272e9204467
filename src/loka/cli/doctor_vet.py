"""What `loka doctor --vet` finds, and the scripts that show it to a library's authors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table

from loka.artifacts import write_atomically
from loka.cli.doctor_view import linear_problems
from loka.cli.output import cell
from loka.errors import ArtifactError, UsageError
from loka.kernels import HIGH_PRECISION, device_of, usable
from loka.kernels.protocol import Kernel
from loka.kernels.vetting import Verdict, examine, repro_name, repro_script
from loka.vocab import GemmProblem, OperandSpec, Pass

__all__ = ["check_repro_folder", "vet_all", "vetting_table", "write_repros"]

Row = dict[str, Any]
logger = logging.getLogger("loka")

# (rows, out, in): a multiple of every tile; rows that are no multiple of 16; a wide and short product; and
# 27 blocks of 128 along k, no multiple of 4, where ill-padded block scales show.
_SHAPES = ((128, 256, 256), (18, 64, 272), (130, 512, 48), (24, 32, 3456))


def check_repro_folder(folder: Path) -> None:
    """Refuse a folder that holds anything: nothing of the user's is overwritten or mixed with scripts.

    Raises:
        UsageError: for a folder that is not empty.
        ArtifactError: for a path that is no folder, or one that cannot be read.
    """
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(
                f"the folder `{folder}` is not empty", hint="give a folder that is empty or does not exist"
            )
    except OSError as error:
        raise ArtifactError(
            f"cannot write scripts to `{folder}`: {error.strerror or error}", hint="give another folder"
        ) from error


def vet_all(where: str, kernels: Mapping[str, Kernel]) -> list[tuple[Row, Verdict]]:
    """Examine every kernel usable here on a few shapes, each pass and pair of formats.

    `high_precision.bf16` is not examined: it is what PyTorch does without LoKA.
    """
    device = device_of(where)
    found = []
    for name, kernel in kernels.items():
        if name == HIGH_PRECISION:
            continue
        for problem in _problems(kernel):
            if not usable(kernel, problem, device):
                continue
            verdict = examine(kernel, problem, torch.device(where))
            logger.debug("%s %s %s: %s", name, problem.pass_, problem.key, verdict.reason or "passed")
            row = {
                "kernel": name,
                "pass": str(problem.pass_),
                "formats": f"{problem.a_format} x {problem.b_format}",
                "shape": problem.key,
                **msgspec.to_builtins(verdict),
            }
            row["failed"] = str(verdict.failed) if verdict.failed else None
            found.append((row, verdict))
    return found


def _problems(kernel: Kernel) -> list[GemmProblem]:
    """Those that differ for the kernel: one that does not quantize takes no notice of 8-bit formats."""
    unlike: dict[tuple[str, Pass, tuple[OperandSpec, OperandSpec]], GemmProblem] = {}
    for shape in _SHAPES:
        for problem in linear_problems(*shape, bias=True):
            unlike.setdefault((problem.key, problem.pass_, kernel.operands(problem)), problem)
    return list(unlike.values())


def vetting_table(rows: Sequence[Row]) -> Table:
    """A line a kernel: how many checks passed, in how many two runs differed, and what was found."""
    table = Table(title="vetting: every element against FP64, repeated", title_justify="left")
    table.add_column("kernel", no_wrap=True)
    table.add_column("passed", justify="right")
    table.add_column("nondeterministic", justify="right")
    table.add_column("worst row", justify="right")
    table.add_column("one sign", justify="right")
    table.add_column("found")
    for name in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == name]
        passed = sum(row["ok"] for row in mine)
        differ = sum(not row["deterministic"] for row in mine)
        notes = [f"{r['pass']} {r['formats']} {r['shape']}: {r['reason']}" for r in mine if r["reason"]]
        table.add_row(
            name,
            f"{passed} of {len(mine)}",
            str(differ or ""),
            _largest(mine, "worst_row"),
            _largest(mine, "one_sign_error"),
            cell("; ".join(notes)),
        )
    return table


def _largest(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    return f"{max(values):.1e}" if values else ""


def write_repros(
    folder: Path, found: Sequence[tuple[Row, Verdict]], kernels: Mapping[str, Kernel], where: str
) -> list[Path]:
    """Write a script for each failure of a library's kernel; the folder is made if there is one to write.

    Args:
        folder: Checked by `check_repro_folder` before anything was run.
        found: Of `vet_all`.
        kernels: By name.
        where: The device that the scripts use.

    Returns:
        The files. Kernels of LoKA's own have no script: nobody else can be asked.

    Raises:
        ArtifactError: for a folder or file that cannot be written.
    """
    texts: dict[str, str] = {}
    for row, verdict in found:
        if verdict.failed is None:
            continue
        kernel = kernels[row["kernel"]]
        text = repro_script(kernel, verdict.failed, reason=verdict.reason, device=where)
        if text:
            texts.setdefault(repro_name(kernel, verdict.failed), text)
    if not texts:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"cannot make the folder `{folder}`: {error.strerror or error}", hint="give another folder"
        ) from error
    check_repro_folder(folder)
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in texts]
