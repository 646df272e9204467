"""Mods: what a model is changed to before FP8 pays: No Bias, BlockNorm, Hard Swish."""

from loka.mods.apply import apply_mods
from loka.mods.chain import Chain
from loka.mods.modules import BlockNorm, BlockNormHardSwish, HardSwish
from loka.mods.no_bias import NoBias
from loka.mods.rules import UseBlockNorm, UseHardSwish

__all__ = [
    "BlockNorm",
    "BlockNormHardSwish",
    "Chain",
    "HardSwish",
    "NoBias",
    "UseBlockNorm",
    "UseHardSwish",
    "apply_mods",
]
