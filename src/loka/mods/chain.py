"""A Sequential of which every link can be planned as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from loka.errors import UsageError
from loka.mods.modules import BlockNorm, BlockNormHardSwish, HardSwish

__all__ = ["Chain"]

_LINKS = (nn.Linear, BlockNorm, HardSwish)


class Chain(nn.Sequential):
    """Linear, BlockNorm, HardSwish, Linear, ...: an nn.Sequential that `apply_plan` can run as one.

    Where the plan runs a Linear in FP8, what stands before it hands over FP8 with no bf16 in between. Without
    a plan it is an nn.Sequential, with the same names and state_dict.

    Args:
        *modules: The links, in order.

    Raises:
        UsageError: for a module of another kind, no module, or widths that do not fit.
    """

    runs_as_one = True

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        _check(modules)

    @classmethod
    def of(
        cls,
        widths: Sequence[int],
        *,
        block: int = 256,
        bias: bool = False,
        last_norm: bool = True,
    ) -> Chain:
        """Linear and BlockNorm with hard swish for each width behind the first.

        Args:
            widths: Features that come in, then those of each Linear; at least two.
            block: Of the normalizations.
            bias: Whether the Linears have biases.
            last_norm: Whether the last Linear is normalized too.

        Raises:
            UsageError: for fewer than two widths.
        """
        if len(widths) < 2:
            raise UsageError(f"Chain.of(widths={list(widths)}) needs the width that comes in and one more")
        links: list[nn.Module] = []
        for inside, outside in pairwise(widths):
            links += [nn.Linear(inside, outside, bias=bias), BlockNormHardSwish(outside, block)]
        return cls(*(links if last_norm else links[:-1]))


def _check(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise UsageError("Chain() needs at least one module")
    width: int | None = None
    for place, module in enumerate(modules):
        if not isinstance(module, _LINKS):
            raise UsageError(
                f"link {place} of a Chain is a {type(module).__name__}",
                hint="a Chain holds nn.Linear, BlockNorm, HardSwish and BlockNormHardSwish; "
                "use nn.Sequential for others",
            )
        if isinstance(module, HardSwish):
            continue
        takes = module.in_features if isinstance(module, nn.Linear) else module.features
        if width is not None and takes != width:
            raise UsageError(
                f"link {place} of a Chain takes {takes} features, link {place - 1} gives {width}"
            )
        width = module.out_features if isinstance(module, nn.Linear) else takes
