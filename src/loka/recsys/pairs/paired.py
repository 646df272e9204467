"""Arms trained from the same weights on the same rows in the same order, seed by seed.

Pairing takes out most of the noise between runs: what is left between two arms of a seed is what the arms do
differently. Validation rows are for choosing, test rows only judge.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.errors import UsageError
from loka.recsys.pairs.paired_result import JUDGED_SPLITS, ArmRun, PairedResult
from loka.recsys.source import Source
from loka.recsys.training.config import TrainConfig
from loka.recsys.training.step import DivergedError, StepInfo
from loka.recsys.training.trainer import Trainer

__all__ = ["paired", "run_arm"]

logger = logging.getLogger("loka")


def run_arm(
    model: nn.Module,
    data: Source,
    config: TrainConfig,
    *,
    arm: str,
    directory: Path | None = None,
    resume: bool = False,
    after_step: Callable[[StepInfo], object] | None = None,
    identity: Mapping[str, Any] | None = None,
    bar: bool | None = None,
) -> ArmRun:
    """Train one model as one arm, and predict the validation and test rows.

    Args:
        model: Trained in place.
        data: The rows.
        config: `config.seed` is the arm's seed.
        arm: Name of the arm.
        directory: Where the checkpoint goes, or None.
        resume: Go on from the checkpoint in the directory, if there is one.
        after_step: As in `Trainer`.
        identity: As in `Trainer`, beside the arm's name.
        bar: As in `Progress`.

    Returns:
        The run; a run that diverged is a result too.
    """
    trainer = Trainer(
        model,
        data,
        config,
        directory=directory,
        after_step=after_step,
        identity={"arm": arm, **(identity or {})},
        description=f"train {arm}, seed {config.seed}",
        bar=bar,
    )
    if resume:
        trainer.resume()
    try:
        result = trainer.train()
        predictions = {split: trainer.evaluate(split) for split in JUDGED_SPLITS}
    except DivergedError as error:
        logger.warning("arm `%s`, seed %d: %s", arm, config.seed, error.what)
        return ArmRun(arm, config.seed, None, {}, error.what)
    return ArmRun(arm, config.seed, result, predictions)


def paired(
    model: nn.Module | Callable[[int], nn.Module],
    data: Source,
    arms: Mapping[str, Callable[[nn.Module], object]],
    seeds: Sequence[int],
    config: TrainConfig | None = None,
    *,
    directory: Path | None = None,
    resume: bool = False,
    after_step: Callable[[str, int, StepInfo], object] | None = None,
    identities: Mapping[str, Mapping[str, Any]] | None = None,
    bar: bool | None = None,
) -> PairedResult:
    """Train every arm from the same initial weights on the same rows in the same order, for each seed.

    A seed gives new initial weights and new dropout masks; rows always come in the source's order.

    Args:
        model: Gives the initial model of a seed; or, for a single seed, a model, which is left untouched.
        data: The rows.
        arms: What to do with the initial model, in place and on the device, before it is trained, such as
            `lambda m: loka.apply_plan(m, plan)`. The first arm is the baseline.
        seeds: One pair each.
        config: Settings of all runs, their seed set to each of `seeds`; None for the defaults.
        directory: Keeps a checkpoint of each run under `seed-<seed>/<arm>`; None for none.
        resume: Go on from those checkpoints; runs that had finished are only evaluated again.
        after_step: Called with arm, seed and step after each step.
        identities: By arm, what else makes it what it is (the plan's hash); kept in its checkpoint.
        bar: As in `Progress`.

    Returns:
        All runs, those that diverged included.

    Raises:
        UsageError: if there are fewer than two arms, no seeds, a seed twice, several seeds for one given
            model, or an arm whose name cannot be a file name.
    """
    config = config or TrainConfig()
    _check(model, arms, seeds)
    device = torch.device(config.device)
    runs = []
    for seed in seeds:
        initial = model if isinstance(model, nn.Module) else model(seed)
        for arm, change in arms.items():
            own = copy.deepcopy(initial).to(device)
            change(own)
            hook = None if after_step is None else _bound(after_step, arm, seed)
            runs.append(
                run_arm(
                    own,
                    data,
                    config.with_seed(seed),
                    arm=arm,
                    directory=None if directory is None else directory / f"seed-{seed}" / arm,
                    resume=resume,
                    after_step=hook,
                    identity=(identities or {}).get(arm),
                    bar=bar,
                )
            )
    return PairedResult(tuple(arms), tuple(seeds), data.schema.tasks, tuple(runs))


def _bound(
    after_step: Callable[[str, int, StepInfo], object], arm: str, seed: int
) -> Callable[[StepInfo], object]:
    return lambda info: after_step(arm, seed, info)


def _check(model: object, arms: Mapping[str, object], seeds: Sequence[int]) -> None:
    if len(arms) < 2:
        raise UsageError(f"a comparison needs at least two arms, got {len(arms)}")
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"seeds must be given and differ, got {list(seeds)}")
    if isinstance(model, nn.Module) and len(seeds) > 1:
        raise UsageError(
            f"one model has one set of initial weights: {len(seeds)} seeds would repeat one run",
            hint="give a function from seed to model",
        )
    for arm in arms:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", arm):
            raise UsageError(f"the arm's name `{arm}` cannot be a file name", hint="letters, digits, _ . -")
