"""The words: values that cannot be are refused where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from loka.errors import UsageError
from loka.vocab import (
    PASS_OPERANDS,
    RECIPES,
    Format,
    GemmProblem,
    Granularity,
    OperandSpec,
    Pass,
    Requirement,
    ScaleRounding,
)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"min_sqnr_db": "x"}, "min_sqnr_db='x'"),
        ({"min_sqnr_db": None}, "min_sqnr_db=None"),
        ({"min_speedup": float("nan")}, "min_speedup=nan"),
        ({"min_speedup": 0.0}, "min_speedup=0.0"),
        ({"max_row_error_p99": 0.0}, "max_row_error_p99=0.0"),
        ({"max_loss_increase": True}, "max_loss_increase=True"),
        ({"otherwise": "fp16"}, "otherwise='fp16'"),
    ],
)
def test_a_requirement_that_cannot_be(values: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        Requirement(**values)
    assert what in str(caught.value)


def test_limits_can_be_lifted() -> None:
    assert Requirement(max_loss_increase=None, min_speedup=None).min_speedup is None


def test_mx_scales_are_powers_of_two() -> None:
    with pytest.raises(UsageError, match="power_of_two"):
        OperandSpec(Format.E4M3, Granularity.MX_1X32)
    spec = OperandSpec.of(Format.E4M3, Granularity.MX_1X32)
    assert spec.scale_rounding is ScaleRounding.POWER_OF_TWO
    with pytest.raises(UsageError, match="pad=0"):
        OperandSpec(pad=0)


def test_the_three_products_of_a_linear() -> None:
    """Decision 1: fwd (M, N, K), dgrad (M, K, N), wgrad (N, K, M)."""
    shapes = {
        pass_: GemmProblem.of_linear(pass_, rows=5, out_features=7, in_features=11).key for pass_ in Pass
    }
    assert shapes == {Pass.FWD: "5x7x11", Pass.DGRAD: "5x11x7", Pass.WGRAD: "7x11x5"}
    assert GemmProblem(5, 7, 11).flops == 2 * 5 * 7 * 11


def test_recipes_cast_each_operand_in_the_orientation_of_its_pass() -> None:
    for recipe in RECIPES.values():
        for pass_ in Pass:
            product = recipe.product(pass_)
            if product.is_quantized:
                flags = tuple(transposed for _, transposed in PASS_OPERANDS[pass_])
                assert (product.a.transposed, product.b.transposed) == flags
    hybrid = RECIPES["tensorwise_hybrid"]
    assert (hybrid.fwd.a.format, hybrid.dgrad.a.format) == (Format.E4M3, Format.E5M2)
    assert not RECIPES["rowwise_with_gw_hp"].wgrad.is_quantized
