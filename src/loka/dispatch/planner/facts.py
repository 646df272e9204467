"""What a profile says, indexed for the planner. Pure lookups, no decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from loka.artifacts.profile import CastTable, ErrorTable, LossTable, ProductTable, Profile
from loka.kernels import HIGH_PRECISION
from loka.vocab import Accumulation, Format, GemmProblem, OperandSpec, Pass, Site

__all__ = ["CastTimes", "Facts", "LossChange", "MeasuredError", "ProductTime"]

# The dtype an operand usually comes in: activations and gradients in the compute dtype, weights as the
# fp32 master. The first one that was measured is taken.
_ACTIVATION_DTYPES = (Format.BF16, Format.FP16, Format.FP32)
_WEIGHT_DTYPES = (Format.FP32, Format.BF16, Format.FP16)

RecipeAt = tuple[str, Pass, str, str, str]  # site, pass, recipe key of A, of B, accumulation


class MeasuredError(NamedTuple):
    """The row of the error table that decides (sqnr in dB)."""

    sqnr_db: float
    sqnr_db_low: float
    row_p99: float
    saturation: float
    source: str


class LossChange(NamedTuple):
    """Relative change of the loss and its standard error."""

    delta_ne: float
    se: float


class ProductTime(NamedTuple):
    """Median time of one product."""

    p50_us: float
    vetted: bool


@dataclass(frozen=True, slots=True)
class CastTimes:
    """(rows, columns) -> set of specs -> dtype -> median us, for tensors read from memory."""

    table: dict[tuple[int, int], dict[frozenset[OperandSpec], dict[Format, float]]]

    def time_us(
        self, rows: int, columns: int, specs: frozenset[OperandSpec], *, weight: bool = False
    ) -> float | None:
        """Time of casting one tensor to all `specs`: the measured set, or else the sum of single casts.

        None where a spec was not measured for this shape; 0 for no specs.
        """
        if not specs:
            return 0.0
        sets = self.table.get((rows, columns), {})
        exact = _preferred(sets.get(specs), weight)
        if exact is not None or len(specs) == 1:
            return exact
        total = 0.0
        for spec in specs:
            single = _preferred(sets.get(frozenset((spec,))), weight)
            if single is None:
                return None
            total += single
        return total


def _preferred(times: dict[Format, float] | None, weight: bool) -> float | None:
    if not times:
        return None
    for dtype in _WEIGHT_DTYPES if weight else _ACTIVATION_DTYPES:
        if dtype in times:
            return times[dtype]
    return next(iter(times.values()))


@dataclass(frozen=True, slots=True)
class Facts:
    """A profile, indexed.

    Attributes:
        sites: Every site, in order.
        errors: (site, pass, recipe key of A, of B, accumulation) to the row that decides.
        kernel_errors: The same key with a kernel's name, to the row that was measured with that very kernel.
        products: (m, n, k, pass, kernel) to its time on the profile's device.
        casts: Times of casts on the profile's device.
        loss: (site, pass, recipe key of A, of B) to the change of the loss.
        estimated: The kinds of pass for which a change of the loss was estimated at any site.
    """

    sites: tuple[Site, ...]
    errors: dict[RecipeAt, MeasuredError]
    kernel_errors: dict[tuple[RecipeAt, str], MeasuredError]
    products: dict[tuple[int, int, int, Pass, str], ProductTime]
    casts: CastTimes
    loss: dict[tuple[str, Pass, str, str], LossChange]
    estimated: frozenset[Pass]

    @classmethod
    def of(cls, profile: Profile) -> Facts:
        """Index a profile."""
        device = profile.device.name
        return cls(
            profile.sites.sites(),
            _errors(profile.errors),
            _kernel_errors(profile.errors),
            _products(profile.products, device),
            CastTimes(_casts(profile.casts, device)),
            _loss(profile.loss),
            frozenset(profile.loss.pass_),
        )

    @property
    def timed(self) -> bool:
        """True when products were timed on the profile's device."""
        return bool(self.products)

    def error(
        self,
        site: str,
        pass_: Pass,
        a: OperandSpec,
        b: OperandSpec,
        accumulation: Accumulation,
        *,
        kernel: str = "",
    ) -> MeasuredError | None:
        """The error of a recipe at a site, and of a kernel of it.

        A live row of the kernel decides. Where only drawn operands were tried with it, the worse of that and
        of its recipe's row: a kernel may be worse than its recipe, but drawn operands do not overrule real
        ones; for a weight's gradient, which no draw foretells, the recipe's live row decides.
        """
        key = (site, pass_, a.recipe_key, b.recipe_key, str(accumulation))
        return self.decisive(key, kernel)

    def decisive(self, key: RecipeAt, kernel: str) -> MeasuredError | None:
        """`error` by (site, pass, recipe key of A, of B, accumulation)."""
        own, of_recipe = self.kernel_errors.get((key, kernel)), self.errors.get(key)
        if own is None or of_recipe is None or own.source == "live" or of_recipe.source != "live":
            return own or of_recipe
        if key[1] is Pass.WGRAD:
            return of_recipe
        return min(own, of_recipe, key=lambda row: row.sqnr_db_low)

    def product(self, problem: GemmProblem, kernel: str) -> ProductTime | None:
        """The time of a product."""
        return self.products.get((problem.m, problem.n, problem.k, problem.pass_, kernel))

    def bf16_us(self, problem: GemmProblem) -> float | None:
        """The time of a product in bf16."""
        found = self.product(problem, HIGH_PRECISION)
        return None if found is None else found.p50_us


def _errors(t: ErrorTable) -> dict[RecipeAt, MeasuredError]:
    out: dict[RecipeAt, MeasuredError] = {}
    for key, _, new in _rows(t):
        out[key] = _deciding(out.get(key), new)
    return out


def _kernel_errors(t: ErrorTable) -> dict[tuple[RecipeAt, str], MeasuredError]:
    out: dict[tuple[RecipeAt, str], MeasuredError] = {}
    for key, kernel, new in _rows(t):
        if kernel:  # version 1 did not say
            out[key, kernel] = _deciding(out.get((key, kernel)), new)
    return out


def _rows(t: ErrorTable) -> Iterator[tuple[RecipeAt, str, MeasuredError]]:
    keys = zip(t.site, t.pass_, t.spec_a, t.spec_b, t.accumulation, strict=True)
    values = zip(t.sqnr_db, t.sqnr_db_low, t.row_p99, t.saturation, t.source, strict=True)
    for key, kernel, value in zip(keys, t.kernel, values, strict=True):
        yield key, kernel, MeasuredError(*value)


def _deciding(old: MeasuredError | None, new: MeasuredError) -> MeasuredError:
    """Real rows are worth more than drawn ones; of equals the worse one decides."""
    if old is None or (new.source == "live", -new.sqnr_db_low) > (old.source == "live", -old.sqnr_db_low):
        return new
    return old


def _products(t: ProductTable, device: str) -> dict[tuple[int, int, int, Pass, str], ProductTime]:
    out: dict[tuple[int, int, int, Pass, str], ProductTime] = {}
    keys = zip(t.m, t.n, t.k, t.pass_, t.kernel, strict=True)
    rows = zip(t.device, t.out_dtype, keys, t.p50_us, t.vetted, strict=True)
    wanted = [row for row in rows if row[0] == device]
    # A bf16 result is what the compute dtype gives; another dtype's time stands in where bf16 is missing.
    for _, _, key, p50_us, vetted in sorted(wanted, key=lambda row: row[1] is not Format.BF16):
        out.setdefault(key, ProductTime(p50_us, vetted))
    return out


def _casts(
    t: CastTable, device: str
) -> dict[tuple[int, int], dict[frozenset[OperandSpec], dict[Format, float]]]:
    out: dict[tuple[int, int], dict[frozenset[OperandSpec], dict[Format, float]]] = {}
    rows = zip(t.device, t.producer, t.rows, t.columns, t.specs, t.from_dtype, t.p50_us, strict=True)
    for where, producer, height, width, specs, dtype, p50_us in rows:
        if where == device and producer == "memory":
            sets = out.setdefault((height, width), {})
            sets.setdefault(frozenset(specs), {}).setdefault(dtype, p50_us)
    return out


def _loss(t: LossTable) -> dict[tuple[str, Pass, str, str], LossChange]:
    out: dict[tuple[str, Pass, str, str], LossChange] = {}
    keys = zip(t.site, t.pass_, t.spec_a, t.spec_b, strict=True)
    for key, delta, se in zip(keys, t.delta_ne, t.se, strict=True):
        new = LossChange(delta, se)
        # Two methods may have measured one switch: the more pessimistic one decides.
        out[key] = max(out.get(key, new), new)
    return out
