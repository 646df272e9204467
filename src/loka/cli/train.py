"""`loka train`: train one model, as it is or by a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.grouped import grouped
from loka.cli.options import (
    FolderOptions,
    JsonFlag,
    ModelArgument,
    ModelOptions,
    TalkOptions,
    TrainOptions,
)
from loka.cli.talk import bar_wanted, logger, set_level
from loka.errors import UsageError

if TYPE_CHECKING:
    from loka.recsys.evaluation.metrics import TaskMetrics
    from loka.recsys.training.step import TrainResult

__all__ = ["train"]


@grouped
def train(
    model: ModelArgument,
    source: ModelOptions,
    folder: FolderOptions,
    training: TrainOptions,
    talk: TalkOptions,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="Train by this plan; without, in bf16.", show_default=False),
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Run a plan made for other hardware by emulated kernels.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Train MODEL on the training rows, and predict the validation and test rows.

    Leaves the checkpoint, the predictions and metrics.json in the folder.
    """
    set_level(talk)
    if emulate and plan is None:
        raise UsageError("--emulate needs a plan", hint="add --plan PLAN")
    from loka.api import load_plan
    from loka.artifacts import write_benchmark
    from loka.cli.configs import job_config
    from loka.cli.metrics_view import flat_metrics, metrics_table
    from loka.cli.output import print_json, print_tables
    from loka.dispatch import apply_plan
    from loka.recsys import Trainer
    from loka.recsys.evaluation.metrics import evaluate
    from loka.recsys.evaluation.predictions import write_predictions
    from loka.recsys.job.check import check_job
    from loka.recsys.job.folder import METRICS_NAME, held_folder
    from loka.recsys.job.main_job import BASELINE, PLANNED, plan_digest
    from loka.recsys.job.observed import fresh_model
    from loka.recsys.pairs.paired_result import JUDGED_SPLITS

    job = job_config(model, source, training)
    rows = check_job(job)
    arm = BASELINE if plan is None else PLANNED
    identity: dict[str, Any] = {"verb": "train", **job.identity(), "plan": None, "emulate": emulate}
    network = fresh_model(job, rows, job.train.seed).to(job.train.device)
    if plan is not None:
        chosen = load_plan(plan)
        apply_plan(network, chosen, emulate=emulate)
        identity["plan"] = plan_digest(chosen)
    trainer = Trainer(
        network,
        rows,
        job.train,
        directory=folder.out,
        identity=identity,
        description=f"train {arm}",
        bar=bar_wanted(),
    )
    with held_folder(folder.out, identity, resume=folder.resume, overwrite=folder.overwrite):
        if folder.resume:
            trainer.resume()
        result = trainer.train()
        found: dict[str, dict[str, TaskMetrics]] = {}
        for split in JUDGED_SPLITS:
            predictions = trainer.evaluate(split)
            write_predictions(folder.out / f"predictions-{split}.parquet", {arm: predictions})
            found[str(split)] = evaluate(predictions)
        for reason, count in rows.skipped.items():
            logger.warning("%s rows left out: %s", f"{count:,}", reason)
        numbers = flat_metrics(found, result)
        write_benchmark(folder.out / METRICS_NAME, numbers, {"run": identity})
    if json:
        print_json({"arm": arm, "metrics": numbers, "skipped": rows.skipped, "folder": str(folder.out)})
    else:
        print_tables(metrics_table(found, arm), *_speed(result))
    logger.info("written to %s: checkpoint, predictions, %s", folder.out, METRICS_NAME)


def _speed(result: TrainResult) -> list[str]:
    ne = result.progressive.normalized_entropy()
    before = ", ".join("undefined" if v is None else f"{v:.5f}" for v in ne)
    lines = [f"{result.steps:,} steps, {result.rows:,} rows; NE of training rows before learning: {before}"]
    if result.speed is not None:
        lines.append(f"{result.speed.steps_per_s:.2f} steps/s, {result.speed.rows_per_s:,.0f} rows/s")
    return lines
