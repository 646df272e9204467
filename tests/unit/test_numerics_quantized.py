"""Operands as kernels take them: what is not quantized, and how vectors of scales lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loka.numerics import cast_operand, decode, lay_out, product_of_operands, scale_per_element
from loka.vocab import OperandSpec, ScaleLayout


class Operators(TorchDispatchMode):
    """The names of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transposed", [False, True])
def test_an_operand_that_is_not_quantized_computes_nothing(transposed: bool) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    with Operators() as seen:
        made = cast_operand(x, OperandSpec.high_precision(transposed=transposed))
    # Allocating and viewing start no kernel on a GPU; a scale of one would.
    assert set(seen.names) <= {"empty", "t"}
    assert made.values.data_ptr() == x.data_ptr()
    assert torch.equal(made.values, x.t() if transposed else x)


def test_what_the_unread_scale_holds_changes_nothing() -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    spec = OperandSpec.high_precision()
    made = cast_operand(x, spec)._replace(scale=torch.tensor(float("nan")))
    assert torch.equal(decode(made, dtype=torch.float64), x.double())
    assert scale_per_element(made).item() == 1.0
    assert torch.equal(product_of_operands(made, made, dtype=torch.float64), x.double() @ x.double().t())


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_single_scale_becomes_a_vector_of_stride_one(rows: int) -> None:
    out = lay_out(torch.tensor(0.25), ScaleLayout.VECTOR, rows)
    assert out.shape == (rows,)
    assert out.stride() == (1,)
    assert out.tolist() == [0.25] * rows
