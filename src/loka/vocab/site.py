"""A place in a model with GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from loka.vocab.formats import Pass
from loka.vocab.problem import GemmProblem

__all__ = ["NARROW", "Site"]

# Below this many features a product has nothing to gain in FP8, and its few outputs carry the loss.
NARROW = 16


@dataclass(frozen=True, slots=True)
class Site:
    """A product with a Parameter.

    Attributes:
        name: Qualified name of the module (`tower.mlp.0`), or of the parameter for a functional product.
        kind: `linear` (an nn.Linear, can be planned), `functional` (another product with a Parameter) or
            `interaction` (both operands are activations); the last two are listed, not planned.
        n: Output features N.
        k: Input features K.
        bias: Whether a bias is added.
        rows: M seen when the batch was run: the product of the input's leading dimensions.
        calls: Calls in one forward; in one training step where Probe found the site, so gradient
            accumulation counts every forward.
        input_group: Sites with the same number were given the same input tensor.
        parameter: Qualified name of the weight.
        not_planned: Why the site cannot be planned; empty when it can.
    """

    name: str
    kind: str
    n: int
    k: int
    bias: bool
    rows: int
    calls: int = 1
    input_group: int = 0
    parameter: str = ""
    not_planned: str = ""

    @property
    def is_narrow(self) -> bool:
        """True where N or K is too small for FP8."""
        return min(self.n, self.k) < NARROW

    @property
    def plannable(self) -> bool:
        """True when `apply_plan` can switch this site."""
        return not self.not_planned

    def problem(self, pass_: Pass) -> GemmProblem:
        """The GEMM of one pass at the M that was seen."""
        return GemmProblem.of_linear(
            pass_,
            rows=self.rows,
            out_features=self.n,
            in_features=self.k,
            bias=self.bias and pass_ is Pass.FWD,
        )

    @property
    def flops(self) -> int:
        """FLOPs of one pass over all calls (the three passes cost the same)."""
        return 2 * self.rows * self.n * self.k * self.calls
