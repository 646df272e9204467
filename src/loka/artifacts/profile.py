"""The profile: what was measured. Errors belong to recipes, times to shapes (decision 8).

Tables are columns of equal length, so that thousands of sites stay a few megabytes. Times are in us.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loka.artifacts.profile_text import profile_text
from loka.vocab import Device, Format, OperandSpec, Pass, Site

__all__ = [
    "CastTable",
    "ErrorTable",
    "Fingerprint",
    "LossTable",
    "Overhead",
    "ProductTable",
    "Profile",
    "SiteTable",
    "StepShares",
]


class _Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename={"pass_": "pass"}):
    """Columns of equal length. `pass_` is `pass` in the file."""

    def __len__(self) -> int:
        return len(getattr(self, self.__struct_fields__[0]))

    def __repr__(self) -> str:
        """Rows and columns: thousands of numbers help nobody."""
        return f"<{type(self).__name__}: {len(self)} rows of {', '.join(self.__struct_encode_fields__)}>"

    def records(self) -> list[dict[str, Any]]:
        """Each row as column to value, as `pandas.DataFrame` and `pyarrow.Table.from_pylist` take them."""
        names = self.__struct_encode_fields__
        columns = [getattr(self, field) for field in self.__struct_fields__]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What makes two models the same to a plan.

    Attributes:
        sites: SHA-256 over the sorted (name, kind, n, k, bias) of every site, in hex.
        parameters: Number of parameters of the model.
        mods: Names of the mods in it, sorted.
    """

    sites: str
    parameters: int
    mods: tuple[str, ...] = ()


class SiteTable(_Table):
    """One row a site. `m_*` are quantiles of the rows seen in one call; `calls` is calls in one step.

    `nonfinite_rows` counts the rows of input and output gradient that held a NaN or an infinity; they are
    in no statistics.
    """

    name: list[str] = []
    kind: list[str] = []
    n: list[int] = []
    k: list[int] = []
    bias: list[bool] = []
    calls: list[int] = []
    input_group: list[int] = []
    parameter: list[str] = []
    not_planned: list[str] = []
    m_min: list[int] = []
    m_p50: list[int] = []
    m_max: list[int] = []
    nonfinite_rows: list[int] = []

    def sites(self) -> tuple[Site, ...]:
        """The rows as sites, in order, with `rows` = `m_p50`."""
        return tuple(
            Site(
                name=self.name[i],
                kind=self.kind[i],
                n=self.n[i],
                k=self.k[i],
                bias=self.bias[i],
                rows=self.m_p50[i],
                calls=self.calls[i],
                input_group=self.input_group[i],
                parameter=self.parameter[i],
                not_planned=self.not_planned[i],
            )
            for i in range(len(self))
        )


class ErrorTable(_Table):
    """One row a (site, pass, recipe of the product, kernel, M).

    `spec_a` and `spec_b` are `OperandSpec.recipe_key`s, `accumulation` is exact or fast, `kernel` is what
    stood for the recipe (empty in a file of version 1), `source` is `live` (real rows) or `sampled` (drawn
    from the learned statistics). `m` is the contracted length that a wgrad was tried at; 0 where the error
    does not depend on M (fwd and dgrad: rows are independent) or the M was the training's own.

    Numbers are means over `observations`, `row_max` the worst of them. `sqnr_db_low` and `_high` bound the
    90 % interval (Student's t) of the mean of `sqnr_db`, `<name>_half` is half the width of that of `<name>`
    (of `row_max`: of the mean over observations of the worst row); both are 0 wide where less than two
    observations, or a file of version 1, say nothing of a spread. `underflow` and `saturation` are the worse
    operand's.
    """

    site: list[str] = []
    pass_: list[Pass] = []
    spec_a: list[str] = []
    spec_b: list[str] = []
    accumulation: list[str] = []
    kernel: list[str] = []
    source: list[str] = []
    m: list[int] = []
    observations: list[int] = []
    sqnr_db: list[float] = []
    sqnr_db_low: list[float] = []
    sqnr_db_high: list[float] = []
    rel_err: list[float] = []
    rel_err_half: list[float] = []
    row_p50: list[float] = []
    row_p50_half: list[float] = []
    row_p99: list[float] = []
    row_p99_half: list[float] = []
    row_max: list[float] = []
    row_max_half: list[float] = []
    bias: list[float] = []
    bias_half: list[float] = []
    mere: list[float] = []
    mere_half: list[float] = []
    underflow: list[float] = []
    underflow_half: list[float] = []
    saturation: list[float] = []
    saturation_half: list[float] = []


class ProductTable(_Table):
    """Time of one product, operands ready. `vetted` is false until the kernel's output was checked."""

    device: list[str] = []
    m: list[int] = []
    n: list[int] = []
    k: list[int] = []
    pass_: list[Pass] = []
    out_dtype: list[Format] = []
    kernel: list[str] = []
    p10_us: list[float] = []
    p50_us: list[float] = []
    p90_us: list[float] = []
    vetted: list[bool] = []


class CastTable(_Table):
    """Time of casting one tensor [rows, columns] to `specs` in one call.

    `producer` is `memory` when the tensor is read anew.
    """

    device: list[str] = []
    rows: list[int] = []
    columns: list[int] = []
    from_dtype: list[Format] = []
    producer: list[str] = []
    specs: list[list[OperandSpec]] = []
    p50_us: list[float] = []


class LossTable(_Table):
    """Change of the loss when one product is switched, relative (2e-4 is 0.02 %), with its standard error."""

    site: list[str] = []
    pass_: list[Pass] = []
    spec_a: list[str] = []
    spec_b: list[str] = []
    delta_ne: list[float] = []
    se: list[float] = []
    method: list[str] = []


class StepShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the bf16 step's time goes: shares of `step_us` that add up to 1, and what FP8 could give.

    Attributes:
        step_us: Median time of one training step.
        eligible_gemm: Products at sites that FP8 could speed up.
        other_gemm: Every other product.
        norm_cast_activation: Norms, casts, activations and other element-wise work.
        embedding: Lookups and their gradients.
        optimizer: Optimizer steps.
        other: What is left, reading and launch gaps included.
        ceiling: The step's speed-up if every eligible product ran at the FP8 rate and casts were free.
        basis: How `ceiling` follows from the shares, in one sentence.
    """

    step_us: float
    eligible_gemm: float
    other_gemm: float
    norm_cast_activation: float
    embedding: float
    optimizer: float
    other: float
    ceiling: float
    basis: str


class Overhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What observing costs the training, by the clock.

    Attributes:
        plain_step_us: Median time of a step that was not observed.
        observed_step_us: Mean time of an observed step that keeps statistics only; null where none was.
        full_step_us: With `live_every` 1, mean time of one that looks at every site in full; null where none
            was.
        every: Steps from one observed step to the next, as it was in the end.
        live_every: Observed steps from one full look at a site to the next.
        percent: Mean extra time of an observed step over `every` plain steps.
    """

    plain_step_us: float
    observed_step_us: float | None
    full_step_us: float | None
    every: int
    live_every: int
    percent: float


class Profile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `profile.json`."""

    model: Fingerprint
    device: Device
    steps_seen: int
    steps_observed: int
    sites: SiteTable
    errors: ErrorTable
    products: ProductTable
    casts: CastTable
    loss: LossTable
    step: StepShares | None = None
    overhead: Overhead | None = None
    notes: list[str] = []

    def __str__(self) -> str:
        """A headline and a line a site, in plain text."""
        return profile_text(self)
