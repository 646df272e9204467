"""The rules of kernels as pure functions of problem and device.

A CPU enforces none of the GPU's rules, so a green CPU run proves nothing: the rules are tested here.
"""

from loka.kernels.rules.checks import FNUZ
from loka.kernels.rules.optional import (
    deep_gemm_rules,
    mslk_groupwise_rules,
    mslk_rules,
    transformer_engine_mx_rules,
)
from loka.kernels.rules.torch_library import (
    block_scaled_mm_rules,
    emulated_rules,
    fnuz_scaled_mm_rules,
    mx_scaled_mm_rules,
    scaled_mm_rules,
)

__all__ = [
    "FNUZ",
    "block_scaled_mm_rules",
    "deep_gemm_rules",
    "emulated_rules",
    "fnuz_scaled_mm_rules",
    "mslk_groupwise_rules",
    "mslk_rules",
    "mx_scaled_mm_rules",
    "scaled_mm_rules",
    "transformer_engine_mx_rules",
]
