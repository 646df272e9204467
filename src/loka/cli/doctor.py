"""`loka doctor`: what this machine can do, and on request what FP8 could give a model on it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loka.cli.grouped import grouped
from loka.cli.options import JsonFlag, TalkOptions
from loka.cli.talk import bar_wanted, logger, set_level
from loka.errors import RequirementNotMetError, UsageError

__all__ = ["doctor"]


@grouped
def doctor(
    talk: TalkOptions,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Also train this model for a few steps and tell the ceiling of FP8.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[str, typer.Option(metavar="SOURCE", help="Rows for --model.")] = "synthetic",
    preset: Annotated[str, typer.Option(metavar="tiny|small|published", help="Size of --model.")] = "tiny",
    batch_size: Annotated[int, typer.Option(metavar="ROWS", help="Rows a step of --model.")] = 1024,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda", help="Which device; a GPU where torch sees one.", show_default=False
        ),
    ] = None,
    vet: Annotated[
        bool, typer.Option("--vet", help="Run every kernel usable here and check its output.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show versions, the device, and what each kernel can do here or why not.

    Exit code 1: with --vet, a kernel gave a wrong result.
    """
    set_level(talk)
    if model is None and data != "synthetic":
        raise UsageError("--data is for --model", hint="add --model MODEL, or leave --data out")
    from loka.cli import doctor_view as view
    from loka.cli.ceiling import ceiling_json, ceiling_text
    from loka.cli.configs import device_named
    from loka.cli.output import print_json, print_tables

    where = device_named(device)
    shares = None
    if model is not None:
        from loka.cli.ceiling_run import measure_shares

        shares = measure_shares(
            model, data, preset=preset, batch_size=batch_size, device=where, bar=bar_wanted()
        )
    versions = view.versions(where)
    kernels = view.kernel_rows(where)
    verdicts = view.vet_all(where) if vet else []
    if json:
        answer: dict[str, Any] = {"versions": versions, "kernels": kernels}
        if model is not None:
            answer = {"ceiling": ceiling_json(shares), **answer}
        if vet:
            answer["vetting"] = verdicts
        print_json(answer)
    else:
        first = [] if model is None else [ceiling_text(shares), ""]
        tables = [view.versions_table(versions), view.kernels_table(kernels)]
        tables += [view.vetting_table(verdicts)] if vet else []
        print_tables(*first, *tables)
    wrong = [v for v in verdicts if not v["ok"]]
    if wrong:
        raise RequirementNotMetError(
            f"{len(wrong)} of {len(verdicts)} checks of kernels failed on {where}",
            lines=[f"{v['kernel']} {v['pass']} {v['shape']}: {v['reason']}" for v in wrong],
            hint="keep them out of plans with `--deny KERNEL`, and report them",
        )
    if vet:
        logger.info("%d checks of kernels passed", len(verdicts))
