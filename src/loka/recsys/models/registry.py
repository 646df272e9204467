"""Models by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from loka.errors import UsageError, unknown_name
from loka.mods import apply_mods
from loka.recsys.batch import Schema
from loka.recsys.models.base import RecModel, TowerConfig
from loka.recsys.models.dcnv2 import DCNV2_PRESETS, DCNv2Tower
from loka.recsys.models.dlrm import DLRM_PRESETS, DLRMTower
from loka.recsys.models.layers import initialize
from loka.recsys.models.wukong import WUKONG_PRESETS, WukongTower

__all__ = ["MODEL_NAMES", "PRESET_NAMES", "build_model", "model_config"]


@dataclass(frozen=True, slots=True)
class _Entry:
    tower: type[nn.Module]
    presets: Mapping[str, TowerConfig]


_MODELS: dict[str, _Entry] = {
    "dlrm": _Entry(DLRMTower, DLRM_PRESETS),
    "dcnv2": _Entry(DCNv2Tower, DCNV2_PRESETS),
    "wukong": _Entry(WukongTower, WUKONG_PRESETS),
}
MODEL_NAMES: tuple[str, ...] = tuple(_MODELS)
PRESET_NAMES: tuple[str, ...] = ("tiny", "small", "published")


def model_config(
    name: str, *, preset: str = "tiny", overrides: Mapping[str, Any] | None = None
) -> TowerConfig:
    """The sizes of a preset, some of them replaced.

    Args:
        name: One of `MODEL_NAMES`.
        preset: One of `PRESET_NAMES`.
        overrides: Values of the model's configuration to replace, by attribute name.

    Raises:
        UnknownNameError: for a name, preset or attribute that does not exist.
        UsageError: for a width that cannot be.
    """
    if name not in _MODELS:
        raise unknown_name("model", name, MODEL_NAMES)
    if preset not in PRESET_NAMES:
        raise unknown_name("preset", preset, PRESET_NAMES, where=f"model `{name}`")
    config = _MODELS[name].presets[preset]
    known = [f.name for f in fields(config)]
    for key in overrides or {}:
        if key not in known:
            raise unknown_name("option", key, known, where=type(config).__name__)
    return replace(config, **(overrides or {}))


def build_model(
    name: str,
    schema: Schema,
    *,
    preset: str = "tiny",
    seed: int = 0,
    config: TowerConfig | None = None,
    device: torch.device | str = "cpu",
    mods: Sequence[str] = (),
) -> RecModel:
    """A model for the columns of `schema`, its weights set by `seed` alone.

    The weights depend on (seed, parameter name) and are drawn on the CPU whatever `device` is; the global
    random state is neither read nor changed.

    Args:
        name: One of `MODEL_NAMES`.
        schema: The columns of the source that will feed it.
        preset: One of `PRESET_NAMES`; not looked at when `config` is given.
        seed: Seed of the initial weights.
        config: Sizes, instead of a preset (see `model_config`).
        device: Where the parameters lie; `meta` for shapes without memory or values.
        mods: Names of mods for all of its modules, as `apply_mods` takes them.

    Raises:
        UnknownNameError: for a model, preset or mod that does not exist, or a mod that changes nothing in it.
        UsageError: for a configuration of another model, widths that cannot be, or a schema without columns.
    """
    config = config or model_config(name, preset=preset)
    if name not in _MODELS:
        raise unknown_name("model", name, MODEL_NAMES)
    entry = _MODELS[name]
    wanted = type(entry.presets["tiny"])
    if not isinstance(config, wanted):
        raise UsageError(f"model `{name}` takes a {wanted.__name__}, got a {type(config).__name__}")
    config.check()
    rows = len(schema.fields) + bool(schema.dense)
    if rows < (2 if name == "dlrm" else 1) or not schema.tasks:
        raise UsageError(
            f"model `{name}` cannot be built from {len(schema.fields)} id fields, {len(schema.dense)} dense "
            f"features and {len(schema.tasks)} tasks",
            hint="a source needs a label and at least two id fields, or one and dense features",
        )
    # Built on the meta device, so that the constructors' own random initialization never runs.
    with torch.device("meta"):
        tower = entry.tower(
            config, dense_features=len(schema.dense), fields=len(schema.fields), tasks=len(schema.tasks)
        )
        model = RecModel(schema, config, tower)
        if mods:
            apply_mods(model, {"*": list(mods)})
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialize(model, seed=seed)
    return model
