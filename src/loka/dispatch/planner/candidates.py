"""Candidates: every kernel and gradient format for one pass of one site, and what speaks against each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from loka.dispatch.planner.facts import Facts, LossChange, MeasuredError, ProductTime
from loka.kernels import KERNELS, Kernel
from loka.vocab import (
    A_FORMATS,
    NARROW,
    Accumulation,
    Device,
    Format,
    GemmProblem,
    Granularity,
    OperandSpec,
    Pass,
    Requirement,
    Site,
    Support,
)

__all__ = [
    "Candidate",
    "Candidates",
    "Coarseness",
    "coarseness",
    "narrow_reason",
    "pass_problem",
    "supports_every_m",
]

MAX_SATURATION = 1e-4  # share of elements beyond the format's range; above it a static scale is too small

_ORDER = {
    Granularity.TENSORWISE: 0,
    Granularity.ROWWISE: 1,
    Granularity.BLOCKWISE_128X128: 2,
    Granularity.BLOCKWISE_1X128: 3,
    Granularity.MX_1X32: 4,
}

_SHORT_EXPONENT = (Format.E4M3, Format.E4M3FNUZ)
# Without times nothing says which library is the fastest. torch is always there, Triton comes with it.
_LIBRARIES = ("torch", "triton", "mslk", "deep_gemm")

Coarseness = tuple[int, int, bool, bool, bool, bool, int, str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run one pass of one site.

    Attributes:
        kernel: The kernel.
        problem: The product at the M the profile saw.
        spec_a: How operand A is cast.
        spec_b: How operand B is cast.
        error: Its measured error; None where it was not measured.
        loss: What switching does to the loss; None where it was not estimated.
        product_us: Time of the product; None where it, its casts or bf16 were not measured.
        fault: Why it cannot be taken whatever is required; empty when it can.
        gate: Why the requirement refuses it; empty when it passes.
    """

    kernel: Kernel
    problem: GemmProblem
    spec_a: OperandSpec
    spec_b: OperandSpec
    error: MeasuredError | None
    loss: LossChange | None
    product_us: float | None
    fault: str
    gate: str

    @property
    def passes(self) -> bool:
        """True when neither facts nor gates speak against it."""
        return not self.fault and not self.gate

    @property
    def is_quantized(self) -> bool:
        """True when it runs in FP8."""
        return self.spec_a.is_quantized

    @property
    def label(self) -> str:
        """The kernel, with the gradient's format where that is not E4M3."""
        return self.kernel.name + ("" if self.spec_a.format is Format.E4M3 else f" ({self.spec_a.format})")


def pass_problem(site: Site, pass_: Pass, a_format: Format = Format.E4M3) -> GemmProblem:
    """The product of a pass at the M that was seen, with a format for its operand A."""
    problem = site.problem(pass_)
    return problem if a_format is problem.a_format else replace(problem, a_format=a_format)


def supports_every_m(kernel: Kernel, site: Site, problem: GemmProblem, device: Device) -> Support:
    """Whether the kernel takes the product at the M that was seen and at M = 1.

    A choice without bounds serves every M: the last batch of an epoch, and serving. Kernels that want a
    multiple of M refuse M = 1.
    """
    seen = kernel.supports(problem, device)
    if not seen:
        return seen
    single = pass_problem(replace(site, rows=1), problem.pass_, problem.a_format)
    support = kernel.supports(single, device)
    return support or Support.no(f"{support.reason}: a plan's choice serves every M")


@dataclass(frozen=True, slots=True)
class _Shape:
    """What one kernel says about one product whatever the site: shared by every site of the same shape."""

    kernel: Kernel
    problem: GemmProblem
    spec_a: OperandSpec
    spec_b: OperandSpec
    keys: tuple[str, str, str]
    product_us: float | None
    fault: str
    gate: str


class Candidates:
    """Makes the candidates of every site; sites of one shape share what does not depend on data."""

    def __init__(self, facts: Facts, device: Device, requirement: Requirement) -> None:
        self._facts = facts
        self._device = device
        self._requirement = requirement
        self._shapes: dict[tuple[int, int, int, bool, Pass], list[_Shape]] = {}

    def of(self, site: Site, pass_: Pass) -> list[Candidate]:
        """Every FP8 candidate of a pass, in the registry's order, E4M3 before E5M2.

        A kernel that refuses both gradient formats for one reason is listed once.
        """
        key = (site.rows, site.n, site.k, site.bias, pass_)
        if key not in self._shapes:
            self._shapes[key] = self._shapes_of(site, pass_)
        return [self._candidate(site.name, shape) for shape in self._shapes[key]]

    def pinned_plain(self, site: Site, pass_: Pass, kernel: Kernel) -> Candidate:
        """A kernel that casts nothing, for a pin: neither an error nor a change of the loss is known."""
        problem = pass_problem(site, pass_)
        a, b = kernel.operands(problem)
        timed = self._facts.product(problem, kernel.name)
        known = timed is not None and self._facts.bf16_us(problem) is not None
        return Candidate(
            kernel=kernel,
            problem=problem,
            spec_a=a,
            spec_b=b,
            error=None,
            loss=None,
            product_us=timed.p50_us if timed is not None and known else None,
            fault="",
            gate="",
        )

    def _candidate(self, site: str, shape: _Shape) -> Candidate:
        a, b, accumulation = shape.keys
        pass_ = shape.problem.pass_
        recipe = (site, pass_, a, b, accumulation)
        error = self._facts.decisive(recipe, shape.kernel.name)
        return Candidate(
            kernel=shape.kernel,
            problem=shape.problem,
            spec_a=shape.spec_a,
            spec_b=shape.spec_b,
            error=error,
            loss=self._facts.loss.get((site, pass_, a, b)),
            product_us=shape.product_us,
            fault=shape.fault or ("no measured error" if error is None else ""),
            gate=shape.gate or _error_gate(error, self._requirement),
        )

    def _shapes_of(self, site: Site, pass_: Pass) -> list[_Shape]:
        formats = A_FORMATS[pass_]
        problems = [pass_problem(site, pass_, a_format) for a_format in formats]
        found: list[_Shape] = []
        for kernel in KERNELS.values():
            if not kernel.operands(problems[0])[0].is_quantized:
                continue
            refused: set[str] = set()
            for problem in problems:
                support = supports_every_m(kernel, site, problem, self._device)
                if support or support.reason not in refused:
                    found.append(self._shape(site, kernel, problem, support.reason))
                if not support:
                    refused.add(support.reason)
        return found

    def _shape(self, site: Site, kernel: Kernel, problem: GemmProblem, unsupported: str) -> _Shape:
        facts = self._facts
        a, b = kernel.operands(problem)
        timed = facts.product(problem, kernel.name)
        no_time = _time_fault(site, problem, a, b, timed, facts) if facts.timed and not unsupported else ""
        fault = unsupported or _unfit(kernel, self._device, timed=facts.timed)
        return _Shape(
            kernel=kernel,
            problem=problem,
            spec_a=a,
            spec_b=b,
            keys=(a.recipe_key, b.recipe_key, str(kernel.accumulation)),
            product_us=None if timed is None or no_time else timed.p50_us,
            fault=fault or no_time or _unvetted(timed),
            gate=_name_gate(kernel.name, self._requirement),
        )


def _unfit(kernel: Kernel, device: Device, *, timed: bool) -> str:
    """Why the planner never takes the kernel on this device by itself; empty where it may."""
    if kernel.emulated and (timed or device.type != "cpu"):
        return "emulated: nothing is faster for it; a pin can ask for it"
    if not kernel.verified and not timed:
        return "unverified: never run by this project, so it must be vetted and timed on such a device first"
    return ""


def _unvetted(timed: ProductTime | None) -> str:
    return "its output was not vetted" if timed is not None and not timed.vetted else ""


def _time_fault(
    site: Site,
    problem: GemmProblem,
    a: OperandSpec,
    b: OperandSpec,
    timed: ProductTime | None,
    facts: Facts,
) -> str:
    if timed is None:
        return "no measured time"
    if facts.bf16_us(problem) is None:
        return "no measured bf16 time to compare with"
    for spec, shape, weight in operand_tensors(site, problem.pass_, a, b):
        if facts.casts.time_us(*shape, frozenset((spec,)), weight=weight) is None:
            return f"no measured cast of {shape[0]}x{shape[1]} to {spec}"
    return ""


def operand_tensors(
    site: Site, pass_: Pass, a: OperandSpec, b: OperandSpec
) -> list[tuple[OperandSpec, tuple[int, int], bool]]:
    """(spec, shape of the tensor that is cast, whether it is the weight) for both operands of a pass."""
    x, w, g = (site.rows, site.k), (site.n, site.k), (site.rows, site.n)
    if pass_ is Pass.FWD:
        return [(a, x, False), (b, w, True)]
    if pass_ is Pass.DGRAD:
        return [(a, g, False), (b, w, True)]
    return [(a, g, False), (b, x, False)]


def _name_gate(name: str, requirement: Requirement) -> str:
    for pattern in requirement.deny:
        if fnmatchcase(name, pattern):
            return f"denied by `{pattern}`"
    if requirement.allow and not any(fnmatchcase(name, pattern) for pattern in requirement.allow):
        return "not among those allowed"
    return ""


def _error_gate(error: MeasuredError | None, requirement: Requirement) -> str:
    if error is None:
        return ""
    # Written so that a NaN never passes.
    if not error.sqnr_db_low >= requirement.min_sqnr_db:
        return f"sqnr {error.sqnr_db_low:.1f} dB < {requirement.min_sqnr_db:.1f}"
    if not error.row_p99 <= requirement.max_row_error_p99:
        return f"row error p99 {error.row_p99:.3g} > {requirement.max_row_error_p99:.3g}"
    if not error.saturation <= MAX_SATURATION:
        return f"saturation {error.saturation:.1e} > {MAX_SATURATION:.0e}"
    return ""


def narrow_reason(site: Site) -> str:
    """Why a narrow site stays in bf16; empty where it is wide enough."""
    for word, value in (("N", site.n), ("K", site.k)):
        if value < NARROW:
            return f"{word}={value} < {NARROW}: narrow products stay in bf16"
    return ""


def coarseness(candidate: Candidate, *, prefer_emulated: bool) -> Coarseness:
    """Sorts the coarsest recipe first, then the shorter exponent, then what is preferred of equal recipes.

    Of equal recipes: the kernel that the machine can honour, exact sums, one that was run on hardware, the
    library that most machines have, the name.
    """
    a, b = _ORDER[candidate.spec_a.granularity], _ORDER[candidate.spec_b.granularity]
    kernel = candidate.kernel
    library = kernel.name.partition(".")[0]
    return (
        max(a, b),
        a + b,
        candidate.spec_a.format not in _SHORT_EXPONENT,
        kernel.emulated is not prefer_emulated,
        kernel.accumulation is not Accumulation.EXACT,
        not kernel.verified,
        _LIBRARIES.index(library) if library in _LIBRARIES else len(_LIBRARIES),
        kernel.name,
    )
