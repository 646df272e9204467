"""`loka probe`: train in bf16 with Probe attached; write what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka.cli.grouped import grouped
from loka.cli.options import (
    FolderOptions,
    JsonFlag,
    ModelArgument,
    ModelOptions,
    ProbeEvery,
    ProbeOptions,
    TalkOptions,
    TrainOptions,
)
from loka.cli.talk import bar_wanted, logger, set_level
from loka.errors import UsageError

if TYPE_CHECKING:
    from loka.artifacts import Profile

__all__ = ["probe"]


@grouped
def probe(
    model: ModelArgument,
    source: ModelOptions,
    folder: FolderOptions,
    training: TrainOptions,
    learning: ProbeOptions,
    talk: TalkOptions,
    probe_every: ProbeEvery = None,
    json: JsonFlag = False,
) -> None:
    """Train MODEL in bf16 and measure the error of every usable recipe at every site and pass.

    Writes profile.json and statistics.safetensors. The first lines of the output are the ceiling: where the
    step's time goes and the most that FP8 could give. Then every pass of every site: safe or not, fast or
    not, and why.
    """
    set_level(talk)
    from loka.artifacts import read_profile
    from loka.cli.ceiling import ceiling_text
    from loka.cli.configs import job_config
    from loka.cli.output import print_json, print_tables
    from loka.cli.quadrant_view import judged_parts
    from loka.probe.tensorboard import ProbeWriter
    from loka.recsys.data import open_source
    from loka.recsys.job.check import check_job
    from loka.recsys.job.evaluate import loss_estimate
    from loka.recsys.job.folder import PROFILE_NAME, STATISTICS_NAME, held_folder
    from loka.recsys.job.observed import observed_training, write_learned

    job = job_config(model, source, training, probe_every=probe_every)
    rows = check_job(job, observed=True)
    # A source of its own, so that its bad rows are not counted twice.
    loss = loss_estimate(job, open_source(job.data, on_bad_row=job.on_bad_row), learning.loss_rows)
    learned = {
        "live_every": learning.live_every,
        "loss_rows": learning.loss_rows,
        "rows": list(learning.rows),
    }
    identity = {"verb": "probe", **learned, **job.identity()}
    with ExitStack() as stack:
        curves = _curves_folder(learning.tensorboard, folder.out)
        writer = None if curves is None else stack.enter_context(ProbeWriter(curves))
        stack.enter_context(
            held_folder(folder.out, identity, resume=folder.resume, overwrite=folder.overwrite)
        )
        run = observed_training(
            job,
            rows,
            directory=folder.out,
            arm="bf16",
            resume=folder.resume,
            on_ceiling=lambda found: logger.info("%s", ceiling_text(found.shares).partition("\n")[0]),
            bar=bar_wanted(),
            live_every=learning.live_every,
            loss=loss,
            on_observed=writer,
        )
        written = folder.out / PROFILE_NAME
        # Of a run that is over: what was clocked in its steps is known to it alone.
        kept = folder.resume and written.exists()
        profile = read_profile(written) if kept else write_learned(run, folder.out, rows=learning.rows)
    for reason, count in rows.skipped.items():
        logger.warning("%s rows left out: %s", f"{count:,}", reason)
    files = [folder.out / PROFILE_NAME, folder.out / STATISTICS_NAME]
    if json:
        print_json(_plain(profile, settled_at=run.settled_at, skipped=rows.skipped, files=files))
    else:
        print_tables(ceiling_text(profile.step), "", *judged_parts(profile))
    settled = f"settled after step {run.settled_at}" if run.settled_at else "had not settled within +-0.5 dB"
    logger.info("%d of %d steps observed; errors %s", profile.steps_observed, profile.steps_seen, settled)
    logger.info("written: %s", ", ".join(map(str, files)))


def _curves_folder(curves: Path | None, out: Path) -> Path | None:
    """Where TensorBoard's files go: not among the run's own, which `--overwrite` takes for all there is."""
    if curves is not None and curves.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"--tensorboard {curves} lies in the run's folder {out}", hint="give another folder")
    return curves


def _plain(
    profile: Profile, *, settled_at: int | None, skipped: Mapping[str, int], files: Sequence[Path]
) -> dict[str, Any]:
    """What `--json` prints."""
    import msgspec

    from loka.cli.ceiling import ceiling_json
    from loka.cli.profile_view import site_rows
    from loka.cli.quadrant_view import quadrants_json
    from loka.cli.quadrants import judge_passes

    return {
        "ceiling": ceiling_json(profile.step),
        "steps_seen": profile.steps_seen,
        "steps_observed": profile.steps_observed,
        "settled_at": settled_at,
        "skipped": skipped,
        "overhead": msgspec.to_builtins(profile.overhead),
        "quadrants": quadrants_json(judge_passes(profile)),
        "sites": site_rows(profile),
        "files": [str(path) for path in files],
    }
