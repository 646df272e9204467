"""What a normalization over blocks of features is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loka.errors import UsageError

__all__ = ["BlockNormSpec"]

_LEAST_EPS = 2.0**-126  # below, fp32 may take it for 0


@dataclass(frozen=True, slots=True)
class BlockNormSpec:
    """RMS normalization over blocks, perhaps with hard swish behind it. N features in ceil(N / block) blocks.

    Attributes:
        block: Features of a block at most.
        eps: Added to the mean square.
        swish: Hard swish behind it.

    Raises:
        UsageError: for a block that is no positive integer, or an eps that is no positive number.
    """

    block: int = 256
    eps: float = 1e-6
    swish: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise UsageError(
                f"BlockNorm(block={self.block!r}) must be a positive integer",
                hint="256 fits the tile of a product; the number of features makes it RMSNorm",
            )
        number = isinstance(self.eps, int | float) and not isinstance(self.eps, bool)
        if not number or not _LEAST_EPS <= self.eps < math.inf:
            raise UsageError(
                f"BlockNorm(eps={self.eps!r}) must be a positive number",
                hint="a block of zeros, as ReLU leaves them, has no scale of its own; 1e-6 is usual",
            )

    def widths(self, features: int) -> tuple[int, ...]:
        """The widths of the blocks of so many features, as `torch.tensor_split` cuts: the wider ones first.

        They differ by one at most, so no block is left with a few features, whose norm would keep little
        but their signs.

        Raises:
            UsageError: for no features.
        """
        features = int(features)  # where torch's compiler traces with symbols: the cut depends on the number
        if features < 1:
            raise UsageError(f"BlockNorm needs at least one feature, got {features}")
        count = -(-features // self.block)
        width, wider = divmod(features, count)
        return (width + 1,) * wider + (width,) * (count - wider)

    def bound(self, features: int) -> float:
        """What no magnitude of the output exceeds where no weight follows: sqrt(widest block)."""
        return math.sqrt(self.widths(features)[0])
