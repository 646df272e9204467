"""The field's words as frozen types. Imports nothing but `loka.errors`."""

from loka.vocab.formats import (
    Accumulation,
    Format,
    Granularity,
    Operand,
    Pass,
    ScaleLayout,
    ScaleRounding,
)
from loka.vocab.norm import BlockNormSpec
from loka.vocab.operands import A_FORMATS, PASS_OPERANDS, OperandSpec
from loka.vocab.problem import Device, GemmProblem, Support
from loka.vocab.recipe import BF16_PRODUCT, RECIPES, ProductRecipe, Recipe
from loka.vocab.requirement import Requirement
from loka.vocab.shape_class import shape_class
from loka.vocab.site import NARROW, Site

__all__ = [
    "A_FORMATS",
    "BF16_PRODUCT",
    "NARROW",
    "PASS_OPERANDS",
    "RECIPES",
    "Accumulation",
    "BlockNormSpec",
    "Device",
    "Format",
    "GemmProblem",
    "Granularity",
    "Operand",
    "OperandSpec",
    "Pass",
    "ProductRecipe",
    "Recipe",
    "Requirement",
    "ScaleLayout",
    "ScaleRounding",
    "Site",
    "Support",
    "shape_class",
]
