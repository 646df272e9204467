"""`loka doctor`: what this machine can do, and on request what FP8 could give a model on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
    kernels: Annotated[
        list[str],
        typer.Option(metavar="GLOB", help="Only kernels like this; may be repeated.", show_default=False),
    ] = [],  # noqa: B006 - typer copies it
    repro: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --vet: write a stand-alone script for each failure there.",
            show_default=False,
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show versions, the device, and what each kernel can do here or why not.

    Exit code 1: with --vet, a kernel gave a wrong result. One whose runs differ is named, no plan takes it,
    and it does not change the exit code.
    """
    set_level(talk)
    if model is None and data != "synthetic":
        raise UsageError("--data is for --model", hint="add --model MODEL, or leave --data out")
    if repro is not None and not vet:
        raise UsageError("--repro is for --vet", hint="add --vet, or leave --repro out")
    from loka.cli import doctor_vet
    from loka.cli import doctor_view as view
    from loka.cli.ceiling import ceiling_json, ceiling_text
    from loka.cli.configs import device_named
    from loka.cli.output import print_json, print_tables

    chosen = view.matching_kernels(kernels)
    if repro is not None:
        doctor_vet.check_repro_folder(repro)
    where = device_named(device)
    shares = None
    if model is not None:
        from loka.cli.ceiling_run import measure_shares

        shares = measure_shares(
            model, data, preset=preset, batch_size=batch_size, device=where, bar=bar_wanted()
        )
    versions = view.versions(where)
    said = view.kernel_rows(where, chosen)
    found = doctor_vet.vet_all(where, chosen) if vet else []
    verdicts = [row for row, _ in found]
    if json:
        answer: dict[str, Any] = {"versions": versions, "kernels": said}
        if model is not None:
            answer = {"ceiling": ceiling_json(shares), **answer}
        if vet:
            answer["vetting"] = verdicts
        print_json(answer)
    else:
        first = [] if model is None else [ceiling_text(shares), ""]
        tables = [view.versions_table(versions), view.kernels_table(said)]
        tables += [doctor_vet.vetting_table(verdicts)] if vet else []
        print_tables(*first, *tables)
    if repro is not None:
        _say_written(doctor_vet.write_repros(repro, found, chosen, where), repro)
    if vet:
        _judge(verdicts, where)


def _say_written(files: Sequence[Path], folder: Path) -> None:
    if files:
        logger.info("written to %s: %s", folder, ", ".join(path.name for path in files))
    else:
        logger.info("no library's kernel failed: nothing to write to %s", folder)


def _judge(verdicts: Sequence[dict[str, Any]], where: str) -> None:
    wrong = [v for v in verdicts if not v["ok"]]
    if wrong:
        raise RequirementNotMetError(
            f"{len(wrong)} of {len(verdicts)} checks of kernels failed on {where}",
            lines=[f"{v['kernel']} {v['pass']} {v['shape']}: {v['reason']}" for v in wrong],
            hint="keep them out of plans with `--deny KERNEL`; `--repro DIR` writes a script for each",
        )
    differ = list(dict.fromkeys(v["kernel"] for v in verdicts if not v["deterministic"]))
    if differ:
        logger.warning("nondeterministic, so in no plan: %s", ", ".join(differ))
    logger.info("%d checks of kernels passed", len(verdicts))
