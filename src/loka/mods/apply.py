"""Put mods into a model, by name and pattern."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from loka.errors import UnknownNameError, UsageError
from loka.mods.no_bias import NoBias
from loka.mods.rules import Mod, UseBlockNorm, UseHardSwish
from loka.sites import matches

__all__ = ["apply_mods"]

_log = logging.getLogger("loka")

# In the order in which they are applied: hard swish looks for a BlockNorm to become one with.
_RULES: dict[str, type[NoBias | UseBlockNorm | UseHardSwish]] = {
    rule.name: rule for rule in (NoBias, UseBlockNorm, UseHardSwish)
}
_Given = str | Mod


def apply_mods(model: nn.Module, mods: Mapping[str, _Given | Sequence[_Given]]) -> nn.Module:
    """Change the model in place: `{"*": ("no_bias", "block_norm", "hard_swish")}`.

    Meant for a model that is not trained yet, before its optimizer is made: parameters of norms and biases
    disappear. Everything is checked before anything is changed. The order in which mods are given does not
    matter.

    Args:
        model: Not compiled, no plan on it.
        mods: Glob pattern on qualified names of modules to one mod or several: a name (`no_bias`,
            `block_norm`, `hard_swish`; `block_norm.128` for blocks of 128) or a rule with options (`NoBias`,
            `UseBlockNorm`, `UseHardSwish`).

    Returns:
        The same model. `loka.sites.mods.mods_of` tells its mods, and plans made for it record them.

    Raises:
        UnknownNameError: for a mod that does not exist, or a pattern that matches nothing that it changes.
        UsageError: for two rules of a kind at one module, a compiled or planned model, a norm over several
            dimensions, or biases that are not near zero in a trained model.
    """
    _check_order(model)
    asked = _asked(mods)
    changes: list[tuple[Mod, str]] = []
    for rule_name in _RULES:
        changes += _changes_of(model, [(pattern, mod) for pattern, mod in asked if mod.name == rule_name])
    _refuse_biases(model, changes)
    for mod, name in changes:
        mod.change(model, name)
    _log.info("mods applied: %s", ", ".join(_counted(changes)))
    return model


def _asked(mods: Mapping[str, _Given | Sequence[_Given]]) -> list[tuple[str, Mod]]:
    if not mods:
        raise UsageError("apply_mods got no mods", hint='for example {"*": ("block_norm", "hard_swish")}')
    asked: list[tuple[str, Mod]] = []
    for pattern, given in mods.items():
        some = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
        asked += [(pattern, _mod_of(one, pattern)) for one in some]
    return asked


def _mod_of(given: _Given, pattern: str) -> Mod:
    if isinstance(given, str) and given in _RULES:
        return _RULES[given]()
    if isinstance(given, str) and (block := given.removeprefix(f"{UseBlockNorm.name}.")).isdecimal():
        return UseBlockNorm(int(block))
    if isinstance(given, str) or not isinstance(given, tuple(_RULES.values())):
        raise UnknownNameError(
            f"apply_mods got {given!r} for `{pattern}`, which is no mod",
            hint=f"mods are {', '.join(_RULES)}, `block_norm.128`, or rules such as UseBlockNorm(block=128)",
        )
    return given


def _changes_of(model: nn.Module, asked: Sequence[tuple[str, Mod]]) -> list[tuple[Mod, str]]:
    """Each module that rules of one kind change, with its rule."""
    found: dict[str, Mod] = {}
    # A module that stands in several places is changed in each.
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern, mod in asked:
        own = [name for name in names if matches(name, (pattern,)) and mod.applies(model, name)]
        if not own:
            raise UnknownNameError(
                f"pattern `{pattern}` of mod `{mod.name}` matches nothing that it changes",
                hint=f"it changes {mod.takes}; patterns are globs on names such as `tower.*`",
            )
        for name in own:
            if found.setdefault(name, mod) != mod:
                raise UsageError(
                    f"two patterns give `{name}` different rules of mod `{mod.name}`",
                    lines=[str(found[name]), str(mod)],
                    hint="make the patterns exclude each other",
                )
    # One nn.Linear that stands in several places has one bias.
    seen: set[int] = set()
    changes: list[tuple[Mod, str]] = []
    for name, mod in found.items():
        module = id(model.get_submodule(name))
        if not isinstance(mod, NoBias) or module not in seen:
            changes.append((mod, name))
        seen.add(module)
    return changes


def _refuse_biases(model: nn.Module, changes: Sequence[tuple[Mod, str]]) -> None:
    lines: list[str] = []
    for rule in dict.fromkeys(mod for mod, _ in changes if isinstance(mod, NoBias)):
        lines += rule.refused(model, [name for mod, name in changes if mod == rule])
    if lines:
        raise UsageError(
            f"the model looks trained: dropping {len(lines)} biases that are not near zero would change it",
            lines=lines if len(lines) <= 12 else [*lines[:12], f"... and {len(lines) - 12} more"],
            hint="name them in `NoBias(keep=...)`, move them with `absorb=True` where that is exact, or say "
            "`trained=False`",
        )


def _check_order(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None:
            raise UsageError(
                f"the module `{name or type(module).__name__}` is compiled already",
                hint="apply mods first, then a plan, then call torch.compile",
            )
        if hasattr(module, "site_plan"):
            raise UsageError(
                f"the model carries a plan (at `{name}`)",
                hint="call `loka.revert(model)`, apply the mods, and make a plan for the changed model",
            )


def _counted(changes: Sequence[tuple[Mod, str]]) -> list[str]:
    return [
        f"{rule} at {count} modules"
        for rule in _RULES
        if (count := sum(mod.name == rule for mod, _ in changes))
    ]
