"""What stands in for a site's forward product when the site is switched: y_MN = q(x_MK) q(w_NK).T + bias.

Shapes: M rows, N output features, K input features of a site.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loka.kernels import KERNELS, Kernel, cast, device_of, usable
from loka.numerics import amax_of, decode_scale, product_of_operands
from loka.numerics.exact import exact_products
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Pass, ProductRecipe

__all__ = ["RecipeProduct", "StandIn", "Switch", "stand_in_of"]

# Elements of an operand or a result that are handled at once; more are done in pieces of rows.
_CHUNK_ELEMENTS = 1 << 25
# Pieces are multiples of this many rows, so that every kernel that takes all rows takes a piece.
_CHUNK_ROWS = 128


class StandIn(Protocol):
    """A forward product with an error of its own.

    Attributes:
        spec_a: What the loss table calls the cast of the input, such as `e4m3.rowwise`.
        spec_b: The same for the weight.
    """

    @property
    def spec_a(self) -> str: ...  # noqa: D102 - described above

    @property
    def spec_b(self) -> str: ...  # noqa: D102

    def __call__(
        self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, /, *, out_dtype: torch.dtype
    ) -> Tensor:
        """y_MN in `out_dtype`."""
        ...


Switch = ProductRecipe | StandIn


def stand_in_of(switch: Switch) -> StandIn:
    """A recipe as a product; what is one already stays as it is."""
    return RecipeProduct(switch) if isinstance(switch, ProductRecipe) else switch


@dataclass(frozen=True, slots=True)
class RecipeProduct:
    """A recipe's forward product, as a planned linear computes it.

    On a GPU a verified kernel of the recipe multiplies where one takes the problem; else, and on a CPU, the
    cast operands are multiplied in FP32 (the emulated kernel's numbers). A tensorwise scale is taken from the
    whole operand, whatever pieces it is multiplied in.
    """

    recipe: ProductRecipe

    @property
    def spec_a(self) -> str:
        """Recipe key of the input's cast."""
        return self.recipe.a.recipe_key

    @property
    def spec_b(self) -> str:
        """Recipe key of the weight's cast."""
        return self.recipe.b.recipe_key

    def __call__(
        self, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype
    ) -> Tensor:
        """y_MN in `out_dtype`, outside any autocast."""
        (M, K), N = x_MK.shape, w_NK.shape[0]
        problem = GemmProblem(M, N, K, Pass.FWD, self.recipe.a.format, self.recipe.b.format)
        kernel = _kernel_for(self.recipe, problem, device_of(x_MK.device))
        spec_a, spec_b = (self.recipe.a, self.recipe.b) if kernel is None else kernel.operands(problem)
        with exact_products(x_MK.device.type):
            (b,) = cast(w_NK, (spec_b,))
            pieces = x_MK.split(_rows_at_once(M, N, K))
            scale = _scale_of_all(x_MK, spec_a) if len(pieces) > 1 else None
            out = []
            for piece in pieces:
                (a,) = cast(piece, (spec_a,), scale=scale)
                if kernel is None:
                    out.append(product_of_operands(a, b, bias=bias_N).to(out_dtype))
                else:
                    out.append(kernel.matmul(a, b, out_dtype=out_dtype, bias=bias_N))
        return out[0] if len(out) == 1 else torch.cat(out)


def _rows_at_once(M: int, N: int, K: int) -> int:
    rows = _CHUNK_ELEMENTS // max(N, K) // _CHUNK_ROWS * _CHUNK_ROWS
    return min(M, max(rows, _CHUNK_ROWS)) or 1


def _scale_of_all(x_MK: Tensor, spec: OperandSpec) -> Tensor | None:
    if not spec.is_quantized or spec.granularity is not Granularity.TENSORWISE:
        return None
    return decode_scale(amax_of(x_MK, Granularity.TENSORWISE), spec.format, spec.scale_rounding)


@functools.lru_cache(maxsize=4096)
def _kernel_for(recipe: ProductRecipe, problem: GemmProblem, device: Device) -> Kernel | None:
    """The first verified kernel of the recipe that runs the problem on a GPU; None to emulate it."""
    if device.type == "cpu":
        return None
    wanted = (recipe.a.recipe_key, recipe.b.recipe_key, recipe.accumulation)
    for kernel in KERNELS.values():
        if kernel.emulated or not kernel.verified or not kernel.supports(problem, device):
            continue
        a, b = kernel.operands(problem)
        if (a.recipe_key, b.recipe_key, kernel.accumulation) == wanted and usable(kernel, problem, device):
            return kernel
    return None
