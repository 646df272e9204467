"""What a pass multiplies and how: tensors cast for all the passes that take them, and the product itself."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.kernels import cast
from loka.numerics import Quantized, decode_scale
from loka.planned.routes import Route
from loka.vocab import PASS_OPERANDS, Granularity, Operand, OperandSpec, Pass

__all__ = ["LinearRoutes", "Use", "cast_for", "multiply", "spec_of", "uses_of", "weight_for"]

LinearRoutes = tuple[Route, Route, Route]
"""What runs fwd, dgrad and wgrad at one M."""

Use = tuple[Pass, int]
"""A pass, and 0 for its operand A or 1 for B."""

_PASSES = tuple(Pass)


def uses_of(operand: Operand, passes: tuple[Pass, ...]) -> list[Use]:
    """Where these passes take the operand."""
    return [(pass_, side) for pass_ in passes for side in (0, 1) if PASS_OPERANDS[pass_][side][0] is operand]


def spec_of(routes: LinearRoutes, use: Use) -> OperandSpec:
    """How the operand is cast there."""
    route = routes[_PASSES.index(use[0])]
    return route.b if use[1] else route.a


def cast_for(
    passes: tuple[Pass, ...],
    operand: Operand,
    tensor: Tensor,
    routes: LinearRoutes,
    compute_dtype: torch.dtype,
    *,
    amax: Tensor | None = None,
) -> dict[Use, Quantized]:
    """A tensor as every operand that it is of `passes`, cast once for all of them.

    Args:
        passes: Which products.
        operand: What the tensor is to them.
        tensor: 2-D.
        routes: Of the three passes.
        compute_dtype: Of what is not quantized.
        amax: fp32 (), the tensor's largest finite magnitude where it is known: tensorwise casts read the
            tensor once less, and give the same bits.
    """
    made: dict[Use, Quantized] = {}
    uses = uses_of(operand, passes)
    plain = [use for use in uses if not spec_of(routes, use).is_quantized]
    # FP8 is cast from the tensor as it came: rounding to bf16 in between would round twice.
    rounded = tensor.to(compute_dtype) if plain else tensor
    groups: list[tuple[list[Use], Tensor, Tensor | None]] = [(plain, rounded, None)]
    left = [use for use in uses if spec_of(routes, use).is_quantized]
    while amax is not None and (first := _first_tensorwise(left, routes)) is not None:
        spec = spec_of(routes, first)
        alike = [use for use in left if spec_of(routes, use).recipe_key == spec.recipe_key]
        groups.append((alike, tensor, decode_scale(amax, spec.format, spec.scale_rounding)))
        left = [use for use in left if use not in alike]
    groups.append((left, tensor, None))
    for group, source, scale in groups:
        specs = tuple(spec_of(routes, use) for use in group)
        made.update(zip(group, cast(source, specs, scale=scale) if group else (), strict=True))
    return made


def weight_for(
    passes: tuple[Pass, ...],
    weight: Tensor,
    routes: LinearRoutes,
    compute_dtype: torch.dtype,
    fixed: tuple[Tensor | None, ...],
) -> dict[Use, Quantized]:
    """The weight for every pass that takes it.

    Args:
        passes: Which products.
        weight: [N, K].
        routes: Of the three passes.
        compute_dtype: Of what is not quantized.
        fixed: Values and scales for fwd and dgrad that were cast before (`FixedWeight.at`), None for what is
            to be cast; or empty.
    """
    made: dict[Use, Quantized] = {}
    for place, pass_ in enumerate((Pass.FWD, Pass.DGRAD) if fixed else ()):
        values, scale = fixed[2 * place], fixed[2 * place + 1]
        if pass_ in passes and values is not None and scale is not None:
            made[pass_, 1] = Quantized(values, scale, spec_of(routes, (pass_, 1)))
    left = tuple(pass_ for pass_ in passes if (pass_, 1) not in made)
    return made | cast_for(left, Operand.WEIGHT, weight, routes, compute_dtype)


def _first_tensorwise(uses: list[Use], routes: LinearRoutes) -> Use | None:
    for use in uses:
        if spec_of(routes, use).granularity is Granularity.TENSORWISE:
            return use
    return None


def multiply(
    pass_: Pass,
    operands: dict[Use, Quantized],
    routes: LinearRoutes,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The pass's product by its kernel."""
    kernel = routes[_PASSES.index(pass_)].kernel
    return kernel.matmul(operands[pass_, 0], operands[pass_, 1], out_dtype=out_dtype, bias=bias)
