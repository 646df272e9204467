"""`loka run`: the main job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.grouped import grouped
from loka.cli.options import (
    FolderOptions,
    JsonFlag,
    ModelArgument,
    ModelOptions,
    ProbeEvery,
    RequirementOptions,
    TalkOptions,
    TrainOptions,
)
from loka.cli.talk import bar_wanted, logger, set_level
from loka.errors import RequirementNotMetError

if TYPE_CHECKING:
    from loka.recsys import JobResult

__all__ = ["run"]


@grouped
def run(
    model: ModelArgument,
    source: ModelOptions,
    folder: FolderOptions,
    training: TrainOptions,
    requirement: RequirementOptions,
    talk: TalkOptions,
    seeds: Annotated[int, typer.Option(metavar="PAIRS", help="Pairs of runs, each with its own seed.")] = 1,
    probe_every: ProbeEvery = None,
    json: JsonFlag = False,
) -> None:
    """Train MODEL in bf16 with Probe, plan, train it by the plan, and compare the two.

    Prints the comparison and leaves profile.json, plan.json, comparison.json and the predictions in the
    folder. Exit code 1: the planned model's loss is worse than --max-loss-increase allows.
    """
    set_level(talk)
    from loka.artifacts import plan_headline
    from loka.cli.ceiling import ceiling_text
    from loka.cli.configs import job_config, requirement_of
    from loka.cli.output import print_json, print_tables
    from loka.recsys import run_job
    from loka.recsys.evaluation.comparison_table import comparison_table

    job = job_config(
        model,
        source,
        training,
        requirement=requirement_of(requirement),
        seeds=seeds,
        probe_every=probe_every,
    )
    result = run_job(
        job,
        folder.out,
        resume=folder.resume,
        overwrite=folder.overwrite,
        on_ceiling=lambda probe: logger.info("%s", ceiling_text(probe.shares)),
        on_plan=lambda plan: logger.info("%s", plan_headline(plan)),
        bar=bar_wanted(),
    )
    files = sorted(path for path in folder.out.iterdir() if path.is_file())
    if json:
        print_json(
            {
                "comparison": result.comparison.to_dict(),
                "plan": plan_headline(result.plan),
                "keeps_the_loss": result.keeps_the_loss,
                "files": [str(path) for path in files],
            }
        )
    else:
        print_tables(comparison_table(result.comparison))
    logger.info("written to %s: %s", folder.out, ", ".join(path.name for path in files))
    if result.keeps_the_loss is False:
        raise _not_kept(result)


def _not_kept(result: JobResult) -> RequirementNotMetError:
    comparison = result.comparison
    limit = 100 * (result.plan.requirement.max_loss_increase or 0.0)
    lost = comparison.diverged[comparison.candidate]
    lines = []
    for task in comparison.tasks:
        change = task.relative_ne_percent
        if change.difference is None:
            continue
        between = "" if change.low is None else f", {change.low:+.4f} .. {change.high:+.4f} %"
        over = (result.least_change_percent(task) or 0.0) - limit
        verdict = f"at least {over:.4f} % too much" if over > 0 else "within the limit"
        lines.append(f"{task.task}: relative NE {change.difference:+.4f} %{between}: {verdict}")
    if lost:
        lines.append(f"the planned model diverged in {lost} of {comparison.pairs} runs")
    return RequirementNotMetError(
        f"the planned model does not keep the loss: at most {limit:g} % more NE was allowed",
        lines=lines,
        hint="raise --min-sqnr-db, --pin the worst sites to bf16, or allow more with --max-loss-increase",
    )
