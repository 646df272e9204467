"""Profiles for the planner's tests, built row by row with stated numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from loka.artifacts import CastTable, ErrorTable, LossTable, ProductTable, Profile, SiteTable, fingerprint
from loka.kernels import KERNELS
from loka.vocab import PASS_OPERANDS, Device, Format, GemmProblem, Operand, OperandSpec, Pass, Site

CPU = Device("cpu", "CPU", (0, 0), (2, 13))
H200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))


def linear(name: str, m: int = 1024, n: int = 64, k: int = 128, **more: object) -> Site:
    return Site(name=name, kind="linear", n=n, k=k, bias=True, rows=m, **more)  # type: ignore[arg-type]


def _append(table: object, **row: object) -> None:
    for name, value in row.items():
        getattr(table, name).append(value)


def problems(site: Site, pass_: Pass) -> list[GemmProblem]:
    base = site.problem(pass_)
    return [base] if pass_ is Pass.FWD else [base, replace(base, a_format=Format.E5M2)]


def tensor_shape(site: Site, operand: Operand) -> tuple[int, int]:
    return {
        Operand.INPUT: (site.rows, site.k),
        Operand.WEIGHT: (site.n, site.k),
        Operand.GRAD_OUTPUT: (site.rows, site.n),
    }[operand]


@dataclass
class ProfileBuilder:
    """db(site, pass, a_key, b_key, accumulation) gives the dB of a recipe, or None to leave it unmeasured."""

    sites: Sequence[Site]
    device: Device = CPU
    db: Callable[[str, Pass, str, str, str], float | None] = lambda *_: 30.0
    p99: float = 0.05
    product_us: Callable[[Site, Pass, str], float | None] | None = None
    cast_us: Callable[[Site, Operand, frozenset[OperandSpec]], float | None] | None = None
    loss: Callable[[str, Pass, str, str], tuple[float, float] | None] | None = None
    unvetted: Sequence[str] = field(default_factory=tuple)

    def build(self) -> Profile:
        profile = Profile(
            model=fingerprint(self.sites, 1),
            device=self.device,
            steps_seen=100,
            steps_observed=4,
            sites=SiteTable(),
            errors=ErrorTable(),
            products=ProductTable(),
            casts=CastTable(),
            loss=LossTable(),
        )
        for site in self.sites:
            self._site(profile, site)
            for pass_ in Pass:
                self._errors(profile, site, pass_)
                self._products(profile, site, pass_)
            self._casts(profile, site)
        return profile

    def _site(self, profile: Profile, s: Site) -> None:
        _append(
            profile.sites, name=s.name, kind=s.kind, n=s.n, k=s.k, bias=s.bias, calls=s.calls,
            input_group=s.input_group, parameter=s.parameter, not_planned=s.not_planned,
            m_min=s.rows, m_p50=s.rows, m_max=s.rows,
            nonfinite_rows=0,
        )  # fmt: skip

    def _errors(self, profile: Profile, site: Site, pass_: Pass) -> None:
        keys: dict[tuple[str, str, str], None] = {}
        for kernel in KERNELS.values():
            for problem in problems(site, pass_):
                a, b = kernel.operands(problem)
                if a.is_quantized and kernel.supports(problem, H200):
                    keys[a.recipe_key, b.recipe_key, str(kernel.accumulation)] = None
        for a_key, b_key, accumulation in keys:
            level = self.db(site.name, pass_, a_key, b_key, accumulation)
            if level is not None:
                add_error(profile, site.name, pass_, a_key, b_key, level, accumulation, p99=self.p99)
            change = self.loss and self.loss(site.name, pass_, a_key, b_key)
            if change and accumulation == "exact":
                _append(
                    profile.loss, site=site.name, pass_=pass_, spec_a=a_key, spec_b=b_key,
                    delta_ne=change[0], se=change[1], method="paired",
                )  # fmt: skip

    def _products(self, profile: Profile, site: Site, pass_: Pass) -> None:
        if self.product_us is None:
            return
        p = site.problem(pass_)
        for kernel in KERNELS.values():
            time = self.product_us(site, pass_, kernel.name)
            if time is not None:
                _append(
                    profile.products, device=self.device.name, m=p.m, n=p.n, k=p.k, pass_=pass_,
                    out_dtype=Format.BF16, kernel=kernel.name, p10_us=time, p50_us=time, p90_us=time,
                    vetted=kernel.name not in self.unvetted,
                )  # fmt: skip

    def _casts(self, profile: Profile, site: Site) -> None:
        if self.cast_us is None:
            return
        for operand, specs in operand_specs(site).items():
            ordered = sorted(specs, key=repr)
            sets = [(s,) for s in ordered] + list(combinations(ordered, 2))
            for chosen in sets:
                time = self.cast_us(site, operand, frozenset(chosen))
                if time is not None:
                    rows, columns = tensor_shape(site, operand)
                    _append(
                        profile.casts, device=self.device.name, rows=rows, columns=columns,
                        from_dtype=Format.FP32 if operand is Operand.WEIGHT else Format.BF16,
                        producer="memory", specs=list(chosen), p50_us=time,
                    )  # fmt: skip


def operand_specs(site: Site) -> Mapping[Operand, set[OperandSpec]]:
    found: dict[Operand, set[OperandSpec]] = {operand: set() for operand in Operand}
    for pass_ in Pass:
        (a_operand, _), (b_operand, _) = PASS_OPERANDS[pass_]
        for kernel in KERNELS.values():
            for problem in problems(site, pass_):
                a, b = kernel.operands(problem)
                if a.is_quantized and kernel.supports(problem, H200):
                    found[a_operand].add(a)
                    found[b_operand].add(b)
    return found


def add_error(
    profile: Profile, site: str, pass_: Pass, a_key: str, b_key: str, db: float,
    accumulation: str = "exact", *, p99: float = 0.05, source: str = "live", saturation: float = 0.0,
    kernel: str = "", m: int = 0,
) -> None:  # fmt: skip
    numbers = {
        "rel_err": 10 ** (-(db + 0.5) / 20), "row_p50": p99 / 2, "row_p99": p99, "row_max": 2 * p99,
        "bias": 0.0, "mere": 0.1, "underflow": 0.0, "saturation": saturation,
    }  # fmt: skip
    _append(
        profile.errors, site=site, pass_=pass_, spec_a=a_key, spec_b=b_key, accumulation=accumulation,
        kernel=kernel, source=source, m=m, observations=4, sqnr_db=db + 0.5, sqnr_db_low=db,
        sqnr_db_high=db + 1, **numbers, **{f"{name}_half": 0.0 for name in numbers},
    )  # fmt: skip
