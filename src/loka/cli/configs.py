"""From the options of a command line to the settings of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

import msgspec
import torch

from loka.cli.options import ModelOptions, RequirementOptions, TrainOptions
from loka.errors import UsageError, unknown_name
from loka.kernels import device_of
from loka.recsys import JobConfig, OnBadRow, TrainConfig
from loka.recsys.models import model_config
from loka.recsys.training.config import ComputeDtype
from loka.vocab import Requirement

__all__ = ["device_named", "job_config", "requirement_of"]

logger = logging.getLogger("loka")
E = TypeVar("E", bound=StrEnum)


def job_config(
    name: str,
    model: ModelOptions,
    train: TrainOptions,
    *,
    requirement: Requirement | None = None,
    seeds: int = 1,
    probe_every: int | None = None,
) -> JobConfig:
    """The settings of a job.

    Raises:
        UsageError: for a value that cannot be; UnknownNameError for a name that does not exist.
    """
    return JobConfig(
        model=name,
        data=model.data,
        preset=model.preset,
        overrides=_overrides(name, model),
        train=_train_config(train),
        requirement=requirement or Requirement(),
        seeds=seeds,
        probe_every=probe_every,
        on_bad_row=_member(OnBadRow, model.on_bad_row, "--on-bad-row"),
        mods=tuple(name for text in model.mods for name in text.split(",") if name),
    )


def device_named(name: str | None) -> str:
    """The device to use: the one asked for, else a GPU where torch sees one. Says which.

    Raises:
        UsageError: for a device that this torch does not know or cannot use.
    """
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(chosen)
    except RuntimeError as error:
        raise UsageError(f"unknown device `{chosen}`", hint="cpu, cuda or cuda:<number>") from error
    found = device_of(device)
    logger.info("device: %s (%s)", chosen, found.name)
    return chosen


def requirement_of(options: RequirementOptions) -> Requirement:
    """What the plan must keep.

    Raises:
        UsageError: for a value that cannot be.
    """
    return Requirement(
        min_sqnr_db=options.min_sqnr_db,
        max_row_error_p99=options.max_row_error_p99,
        max_loss_increase=_number_or_none("--max-loss-increase", options.max_loss_increase),
        min_speedup=_number_or_none("--min-speedup", options.min_speedup),
        allow=tuple(options.allow),
        deny=tuple(options.deny),
        pin=_pins(options.pin),
    )


def _train_config(options: TrainOptions) -> TrainConfig:
    return TrainConfig(
        batch_size=options.batch_size,
        epochs=options.epochs,
        max_rows=options.max_rows,
        lr_dense=options.lr_dense,
        lr_sparse=options.lr_sparse,
        dtype=_member(ComputeDtype, options.dtype, "--dtype"),
        seed=options.seed,
        device=device_named(options.device),
        compile=options.compile,
        checkpoint_every_s=options.checkpoint_every,
    )


def _member(kind: type[E], text: str, option: str) -> E:
    names = [str(member) for member in kind]
    if text not in names:
        raise unknown_name("value", text, names, where=f"`{option}`")
    return kind(text)


def _number_or_none(option: str, text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{option} is `{text}`", hint="give a finite number, or `none` for no limit")
    return value


def _pairs(option: str, form: str, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.rpartition("=") if option == "--pin" else text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{option} `{text}` is not {form}", hint=f"write `{option} {form}`")
        if name in pairs:
            raise UsageError(f"{option} gives `{name}` twice", hint="give it once")
        pairs[name] = value
    return pairs


def _pins(texts: Sequence[str]) -> dict[str, str]:
    return _pairs("--pin", "SITE[:PASS]=KERNEL", texts)


def _overrides(name: str, options: ModelOptions) -> dict[str, Any]:
    config = model_config(name, preset=options.preset)
    kinds = get_type_hints(type(config))
    values: dict[str, Any] = {}
    for key, text in _pairs("--set", "NAME=VALUE", options.set).items():
        if key not in kinds:
            raise unknown_name("option", key, list(kinds), where=f"--set for model `{name}`")
        values[key] = _value(key, text, kinds[key])
    model_config(name, preset=options.preset, overrides=values)
    return values


def _value(key: str, text: str, kind: Any) -> Any:
    plain: Any = text
    if text.lower() == "none":
        plain = None
    elif str(kind).startswith("tuple"):
        plain = [part for part in text.split(",") if part]
    try:
        return msgspec.convert(plain, kind, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at ")[0]
        raise UsageError(
            f"--set {key}={text}: {reason[:1].lower()}{reason[1:]}",
            hint="whole numbers; several separated by commas; `none` where a size may be left out",
        ) from error
