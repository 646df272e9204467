"""`loka bench`: how fast kernels are on this machine, as a user pays for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.grouped import grouped
from loka.cli.options import JsonFlag, TalkOptions
from loka.cli.talk import bar_wanted, logger, set_level
from loka.errors import UsageError, unknown_name
from loka.vocab import Pass

if TYPE_CHECKING:
    from loka.bench import Shape

__all__ = ["app", "gemm"]

app = typer.Typer(
    help="Time kernels on this machine, as a user pays for them.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """Which linear layers."""

    shapes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV with the columns m,n,k; the list that comes with LoKA where neither this nor --model "
            "is given.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The layers of a model: dlrm, dcnv2 or wukong.", show_default=False
        ),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="tiny|small|published", help="Size of --model; tiny if not given.", show_default=False
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="ROWS", help="Rows a step of --model; 1024 if not given.", show_default=False),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Where the record goes."""

    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="RECORD",
            help="File for the record; without one nothing is written and nothing can be resumed.",
            show_default=False,
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that was stopped, keeping what it measured.")
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over, and replace an earlier record.")
    ] = False


@app.callback()
def _bench() -> None:
    """Time kernels on this machine, as a user pays for them."""


@app.command("gemm", short_help="Products of linear layers, casts included, against bf16.")
@grouped
def gemm(
    which: ShapeOptions,
    record: RecordOptions,
    talk: TalkOptions,
    passes: Annotated[
        str, typer.Option(metavar="PASS,...", help="Of the three products of a layer.")
    ] = "fwd,dgrad,wgrad",
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB,...",
            help="Time only kernels like these beside bf16; all that are not emulated if not given.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each; one half chooses, one judges.")] = 16,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="Where; a GPU where torch sees one.", show_default=False),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Compile and vet in N processes first, which also outlive a kernel that kills one.",
        ),
    ] = 0,
    json: JsonFlag = False,
) -> None:
    """Time every usable kernel at every shape and pass: casts of both operands, product and bias.

    A kernel is vetted before it is timed. A pass is given FP8 where its fastest kernel is 1.05 times as fast
    as bf16 on one half of the samples; the speed told is that on the other half. A run that was stopped goes
    on with the same command and --resume.
    """
    set_level(talk)
    chosen = _passes(passes)
    import torch

    from loka.bench import GemmBench, bench_gemm
    from loka.cli.bench_view import PairProgress, gemm_json, gemm_table, summary_lines
    from loka.cli.output import print_json, print_tables

    if record.out is None and (record.resume or record.overwrite):
        raise UsageError("--resume and --overwrite are about a record", hint="name it with --out RECORD")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = GemmBench(
        shapes=_shapes(which, where),
        passes=chosen,
        kernels=tuple(p.strip() for p in (kernels or "").split(",") if p.strip()),
        rounds=rounds,
        device=where,
    )
    with PairProgress(bar=bar_wanted()) as progress:
        result = bench_gemm(
            settings,
            record=record.out,
            resume=record.resume,
            overwrite=record.overwrite,
            workers=workers,
            on_pair=progress.update,
        )
    if json:
        print_json(gemm_json(result))
    else:
        print_tables(gemm_table(result), *summary_lines(result))
    if record.out is not None:
        logger.info("written to %s", record.out)


def _passes(text: str) -> tuple[Pass, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [str(pass_) for pass_ in Pass]
    for name in names:
        if name not in known:
            raise unknown_name("pass", name, known, where="--passes")
    return tuple(pass_ for pass_ in Pass if pass_ in names)


def _shapes(which: ShapeOptions, where: str) -> tuple[Shape, ...]:
    from loka.bench import default_shapes, read_shapes

    if which.model is None:
        if which.preset is not None or which.batch_size is not None:
            raise UsageError("--preset and --batch-size are about a model", hint="name it with --model")
        return default_shapes() if which.shapes is None else read_shapes(which.shapes)
    if which.shapes is not None:
        raise UsageError("--shapes and --model exclude each other", hint="give one of them")
    from loka.cli.bench_model import model_shapes

    batch_size = 1024 if which.batch_size is None else which.batch_size
    return model_shapes(which.model, preset=which.preset or "tiny", batch_size=batch_size, device=where)
