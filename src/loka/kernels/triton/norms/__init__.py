"""Block norm in Triton: forward, gradients, and straight to FP8; as `loka.kernels.block_norm` calls them."""

from loka.kernels.triton.norms.host import block_norm, block_norm_gradients, normed_operands
from loka.kernels.triton.norms.tiles import MOST_FEATURES

__all__ = ["MOST_FEATURES", "block_norm", "block_norm_gradients", "normed_operands"]
