"""The options of the verbs. Nothing here imports torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from loka.vocab import Requirement

__all__ = [
    "FolderOptions",
    "JsonFlag",
    "ModelArgument",
    "ModelOptions",
    "ProbeEvery",
    "ProbeOptions",
    "RequirementOptions",
    "TalkOptions",
    "TrainOptions",
]

_DEFAULTS = Requirement()

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A reference model: dlrm, dcnv2 or wukong.", show_default=False)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]
ProbeEvery = Annotated[
    int | None,
    typer.Option(
        "--probe-every",
        metavar="STEPS",
        help="Observe each such step; 100, or less where the run is short.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkOptions:
    """How much is said on stderr."""

    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only warnings and errors.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which rows, and which sizes of the model."""

    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="KIND[:PATH][?option=value&...] or a path; kinds: synthetic, adult, criteo, parquet, "
            "open_bandit, movielens.",
            show_default=False,
        ),
    ]
    on_bad_row: Annotated[
        str,
        typer.Option(metavar="error|skip", help="Stop at a row that cannot be read, or leave out and count."),
    ] = "error"
    preset: Annotated[str, typer.Option(metavar="tiny|small|published", help="Size of the model.")] = "tiny"
    set: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help="Replace a size of the preset, such as `deep=256,128`; may be repeated.",
            show_default=False,
        ),
    ] = field(default_factory=list)
    mods: Annotated[
        list[str],
        typer.Option(
            metavar="MOD,...",
            help="Mods of the model: no_bias, block_norm (block_norm.128), hard_swish; may be repeated.",
            show_default=False,
        ),
    ] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How to train."""

    seed: Annotated[int, typer.Option(help="Of the initial weights and every draw.")] = 0
    epochs: Annotated[int, typer.Option(help="Passes over the training rows.")] = 1
    batch_size: Annotated[int, typer.Option(metavar="ROWS", help="Rows a step.")] = 1024
    max_rows: Annotated[
        int | None,
        typer.Option(metavar="ROWS", help="Stop training after this many rows.", show_default=False),
    ] = None
    lr_dense: Annotated[float, typer.Option(help="Learning rate of the tower (Adam).")] = 1e-3
    lr_sparse: Annotated[float, typer.Option(help="Learning rate of the embeddings (Adagrad).")] = 2e-2
    dtype: Annotated[str, typer.Option(metavar="bf16|fp32", help="In what the tower multiplies.")] = "bf16"
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda", help="Where to train; a GPU where torch sees one.", show_default=False
        ),
    ] = None
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile the tower.")] = False
    checkpoint_every: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time between two checkpoints.")
    ] = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """Where the files go."""

    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="Folder for everything written.", show_default=False),
    ]
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that was stopped in this folder.")
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the earlier run in this folder first.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """How much Probe learns, and where its curves go."""

    live_every: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="Every such observed step measures errors and distributions too; 10, or 1 in a short run.",
            show_default=False,
        ),
    ] = None
    rows: Annotated[
        list[int],
        typer.Option(
            metavar="M",
            min=1,
            help="Measure at this many rows of a product too, as of a batch that serving will have; may be "
            "repeated.",
            show_default=False,
        ),
    ] = field(default_factory=list)
    loss_rows: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            min=0,
            help="Validation rows on which the change of the loss is estimated; 65,536 or what there are, "
            "0 for no estimate.",
            show_default=False,
        ),
    ] = None
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write curves of every site for TensorBoard.", show_default=False),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementOptions:
    """What a plan must keep. `none` lifts one of the last two limits."""

    min_sqnr_db: Annotated[
        float, typer.Option(metavar="DB", help="Least SQNR of a product against FP32.")
    ] = _DEFAULTS.min_sqnr_db
    max_row_error_p99: Annotated[
        float, typer.Option(metavar="NUMBER", help="Largest 99th percentile of the relative error of a row.")
    ] = _DEFAULTS.max_row_error_p99
    max_loss_increase: Annotated[
        str, typer.Option(metavar="NUMBER|none", help="Largest relative increase of the loss.")
    ] = str(_DEFAULTS.max_loss_increase)
    min_speedup: Annotated[
        str, typer.Option(metavar="NUMBER|none", help="Least speed-up of what is switched, where timed.")
    ] = str(_DEFAULTS.min_speedup)
    allow: Annotated[
        list[str],
        typer.Option(metavar="GLOB", help="Use only kernels like this; may be repeated.", show_default=False),
    ] = field(default_factory=list)
    deny: Annotated[
        list[str],
        typer.Option(metavar="GLOB", help="Use no kernel like this; may be repeated.", show_default=False),
    ] = field(default_factory=list)
    pin: Annotated[
        list[str],
        typer.Option(
            metavar="SITE[:PASS]=KERNEL",
            help="Use this kernel (or bf16) there, whatever its error; may be repeated.",
            show_default=False,
        ),
    ] = field(default_factory=list)
