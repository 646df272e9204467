"""Recipes: how the operands of the three products are cast.

x = input, w = weight, g = grad_output; q = cast to FP8 with its decode scale. Each recipe is

    y = q(x) @ q(w).T        dx = q(g) @ q(w)        dw = q(g).T @ q(x)

with the formats and granularities below; a product without quantized operands runs in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.vocab.formats import Accumulation, Format, Granularity, Pass
from loka.vocab.operands import PASS_OPERANDS, OperandSpec

__all__ = ["BF16_PRODUCT", "RECIPES", "ProductRecipe", "Recipe"]


@dataclass(frozen=True, slots=True)
class ProductRecipe:
    """How one product's operands are cast and its sums are kept."""

    a: OperandSpec
    b: OperandSpec
    accumulation: Accumulation = Accumulation.EXACT

    @property
    def is_quantized(self) -> bool:
        """True when an operand is in FP8."""
        return self.a.is_quantized or self.b.is_quantized

    @property
    def key(self) -> str:
        """`e4m3.rowwise*e4m3.tensorwise`, with `.fast` where sums are kept in the fast mode."""
        tail = ".fast" if self.accumulation is Accumulation.FAST else ""
        return f"{self.a.recipe_key}*{self.b.recipe_key}{tail}"


BF16_PRODUCT = ProductRecipe(OperandSpec.high_precision(), OperandSpec.high_precision())


@dataclass(frozen=True, slots=True)
class Recipe:
    """The three equations of a linear layer in low precision."""

    name: str
    fwd: ProductRecipe
    dgrad: ProductRecipe
    wgrad: ProductRecipe

    def product(self, pass_: Pass) -> ProductRecipe:
        """The recipe of one pass."""
        return {Pass.FWD: self.fwd, Pass.DGRAD: self.dgrad, Pass.WGRAD: self.wgrad}[pass_]


def _product(
    pass_: Pass, a: Granularity, b: Granularity, *, grad: Format = Format.E4M3, fast: bool = False
) -> ProductRecipe:
    (_, a_transposed), (_, b_transposed) = PASS_OPERANDS[pass_]
    a_format = Format.E4M3 if pass_ is Pass.FWD else grad
    accumulation = Accumulation.FAST if fast else Accumulation.EXACT
    return ProductRecipe(
        OperandSpec.of(a_format, a, transposed=a_transposed),
        OperandSpec.of(Format.E4M3, b, transposed=b_transposed),
        accumulation,
    )


def _uniform(name: str, granularity: Granularity, grad: Format = Format.E4M3) -> Recipe:
    fwd, dgrad, wgrad = (_product(p, granularity, granularity, grad=grad) for p in Pass)
    return Recipe(name, fwd, dgrad, wgrad)


_T, _R = Granularity.TENSORWISE, Granularity.ROWWISE
_B1, _B2 = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", BF16_PRODUCT, BF16_PRODUCT, BF16_PRODUCT),
        _uniform("tensorwise", _T),
        _uniform("tensorwise_hybrid", _T, Format.E5M2),
        _uniform("rowwise", _R),
        Recipe(
            "rowwise_with_gw_hp",
            _product(Pass.FWD, _R, _R),
            _product(Pass.DGRAD, _R, _T),
            BF16_PRODUCT,
        ),
        Recipe(
            "blockwise",
            _product(Pass.FWD, _B1, _B2),
            _product(Pass.DGRAD, _B1, _B2),
            _product(Pass.WGRAD, _B1, _B1),
        ),
        _uniform("mx", Granularity.MX_1X32),
    )
}
