"""Which mods a model carries: what a plan records and is held against."""

from __future__ import annotations

from torch import nn

__all__ = ["MOD_NAME", "mods_of"]

# The attribute by which a module says which mods it is, or was changed by; several joined by `+`.
MOD_NAME = "mod_name"


def mods_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the mods in a model, such as `block_norm.256`; sorted, each once."""
    told = (getattr(module, MOD_NAME, None) for module in model.modules())
    return tuple(sorted({name for names in told if isinstance(names, str) for name in names.split("+")}))
