"""The modules that mods put into a model: BlockNorm, hard swish, and both as one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.kernels.block_norm import block_norm, load_norms
from loka.vocab import BlockNormSpec

__all__ = ["BlockNorm", "BlockNormHardSwish", "HardSwish"]


class BlockNorm(nn.Module):
    """RMS normalization over fixed blocks of the last dimension, the same in training and evaluation.

        y = x / sqrt(mean(x^2 over the block) + eps)      of each row and block

    No mean is subtracted; one outlier dampens its own block only; and no magnitude of y exceeds sqrt(block),
    so FP8 needs no amax. Computed in fp32, given back in the input's dtype, under autocast too.

    Features that are no multiple of `block` lie in ceil(features / block) blocks whose widths differ by one
    at most, the wider ones first. `block=features` is RMSNorm.

    Source: "LoKA" (arXiv 2605.10886); RMS normalization: Zhang and Sennrich 2019 (arXiv 1910.07467).

    Args:
        features: Size N of the last dimension.
        block: Features of a block at most.
        eps: Added to the mean square.
        affine: Multiply by a learned weight [N], initially 1. The output then has no bound, and FP8 behind it
            takes its scale from an amax.

    Attributes:
        features: N.
        norm: Block, eps and whether hard swish follows.
        weight: [N], or None.

    Raises:
        UsageError: for sizes that are no positive integers, or an eps that is not positive.
    """

    weight: nn.Parameter | None
    block_norm_link = True  # `apply_plan` may run it and the linear behind it as one
    _swish = False

    def __init__(
        self,
        features: int,
        block: int = 256,
        *,
        eps: float = 1e-6,
        affine: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(features, bool) or not isinstance(features, int) or features < 1:
            raise UsageError(f"BlockNorm(features={features!r}) must be a positive integer")
        self.features = features
        self.norm = BlockNormSpec(block, eps, self._swish)
        weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype)) if affine else None
        self.register_parameter("weight", weight)
        if torch.version.cuda is not None or torch.version.hip is not None:
            load_norms()  # here, since what imports a module inside compiled code breaks the graph

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., N]; a row with NaN or infinity spoils its own blocks only.

        Raises:
            UsageError: for another last dimension, or a dtype that is no float.
        """
        if x.dim() == 0 or x.shape[-1] != self.features:
            raise UsageError(
                f"{type(self).__name__}({self.features}) takes [..., {self.features}], got {list(x.shape)}"
            )
        return block_norm(x, self.norm, self.weight)

    def reset_parameters(self) -> None:
        """Set the weight to 1, where there is one."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    @property
    def mod_name(self) -> str:
        """As a plan records it: `block_norm.256`, with `.affine` where there is a weight."""
        return f"block_norm.{self.norm.block}" + (".affine" if self.weight is not None else "")

    def extra_repr(self) -> str:
        """Features, block and eps."""
        affine = ", affine=True" if self.weight is not None else ""
        return f"{self.features}, block={self.norm.block}, eps={self.norm.eps:g}{affine}"


class BlockNormHardSwish(BlockNorm):
    """Hard swish of `BlockNorm` in one kernel, with no rounding in between. Takes what `BlockNorm` takes.

    It stands for x * sigmoid(Norm(x)) and for an activation behind a normalization.
    """

    block_norm_link = True
    _swish = True

    @property
    def mod_name(self) -> str:
        """`block_norm.256+hard_swish`."""
        return f"{super().mod_name}+hard_swish"


class HardSwish(nn.Module):
    """x * clamp(x + 3, 0, 6) / 6: swish without exponentials. Howard et al. 2019 (arXiv 1905.02244)."""

    mod_name = "hard_swish"

    def forward(self, x: Tensor) -> Tensor:
        """Apply to any shape.

        Raises:
            UsageError: for a dtype that is no float.
        """
        if not x.is_floating_point():
            raise UsageError(f"HardSwish takes floats, got {x.dtype}")
        return nn.functional.hardswish(x)
