"""`loka probe`: train in bf16 with Probe attached; write what was learned."""

from __future__ import annotations

from loka.cli.grouped import grouped
from loka.cli.options import (
    FolderOptions,
    JsonFlag,
    ModelArgument,
    ModelOptions,
    ProbeEvery,
    TalkOptions,
    TrainOptions,
)
from loka.cli.talk import bar_wanted, logger, set_level

__all__ = ["probe"]


@grouped
def probe(
    model: ModelArgument,
    source: ModelOptions,
    folder: FolderOptions,
    training: TrainOptions,
    talk: TalkOptions,
    probe_every: ProbeEvery = None,
    json: JsonFlag = False,
) -> None:
    """Train MODEL in bf16 and measure the error of every usable recipe at every site and pass.

    Writes profile.json and statistics.safetensors. The first lines of the output are the ceiling: where the
    step's time goes and the most that FP8 could give.
    """
    set_level(talk)
    from loka.cli.ceiling import ceiling_json, ceiling_text
    from loka.cli.configs import job_config
    from loka.cli.output import print_json, print_tables
    from loka.cli.profile_view import site_rows, sites_table
    from loka.recsys.job.check import check_job
    from loka.recsys.job.folder import PROFILE_NAME, STATISTICS_NAME, held_folder
    from loka.recsys.job.observed import observed_training, write_learned

    job = job_config(model, source, training, probe_every=probe_every)
    rows = check_job(job, observed=True)
    identity = {"verb": "probe", **job.identity()}
    with held_folder(folder.out, identity, resume=folder.resume, overwrite=folder.overwrite):
        run = observed_training(
            job,
            rows,
            directory=folder.out,
            arm="bf16",
            resume=folder.resume,
            on_ceiling=lambda found: logger.info("%s", ceiling_text(found.shares)),
            bar=bar_wanted(),
        )
        profile = write_learned(run, folder.out)
    for reason, count in rows.skipped.items():
        logger.warning("%s rows left out: %s", f"{count:,}", reason)
    sites = site_rows(profile)
    files = [folder.out / PROFILE_NAME, folder.out / STATISTICS_NAME]
    if json:
        print_json(
            {
                "ceiling": ceiling_json(profile.step),
                "steps_seen": profile.steps_seen,
                "steps_observed": profile.steps_observed,
                "settled_at": run.settled_at,
                "skipped": rows.skipped,
                "sites": sites,
                "files": [str(path) for path in files],
            }
        )
    else:
        print_tables(ceiling_text(profile.step), "", sites_table(sites))
    settled = f"settled after step {run.settled_at}" if run.settled_at else "had not settled within +-0.5 dB"
    logger.info("%d of %d steps observed; errors %s", profile.steps_observed, profile.steps_seen, settled)
    logger.info("written: %s", ", ".join(map(str, files)))
