from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_profiles import H200, ProfileBuilder, linear, tensor_shape

from loka.artifacts import Plan, Profile
from loka.dispatch.planner.facts import Facts
from loka.dispatch.planner.make_plan import make_plan
from loka.kernels import HIGH_PRECISION, KERNELS
from loka.vocab import PASS_OPERANDS, Format, Operand, OperandSpec, Pass, Requirement, Site


def flat_product(fp8: float, bf16: float, site: Site, pass_: Pass, kernel: str) -> float:
    return bf16 if kernel == HIGH_PRECISION else fp8


def flat_cast(us: float, site: Site, operand: Operand, specs: frozenset[OperandSpec]) -> float:
    return us * len(specs)


def timed(
    sites: list[Site], *, fp8: float = 6.0, bf16: float = 10.0, cast: float = 1.0, **more: object
) -> Profile:
    return ProfileBuilder(
        sites,
        device=H200,
        product_us=partial(flat_product, fp8, bf16),
        cast_us=partial(flat_cast, cast),
        **more,  # type: ignore[arg-type]
    ).build()


def kernels(plan: Plan, site: str = "s") -> list[str]:
    found = plan.site(site)
    assert found is not None
    return [found.choices(p)[0].kernel for p in Pass]


def test_speedup_counts_casts_and_gates() -> None:
    # One orientation and one scale each: 3 products x 6 us; x, w, g cast in both orientations: 6 us.
    profile = timed([linear("s")])
    plan = make_plan(profile, Requirement(min_speedup=1.25))
    assert plan.basis == "time"
    assert all(k.startswith("torch.") for k in kernels(plan))
    assert plan.predicted.saved_us == pytest.approx(30 - 24)
    assert "24.0 us with casts, bf16 30.0 us (1.25x)" in plan.sites[0].fwd[0].reason
    strict = make_plan(profile, Requirement(min_speedup=1.26))
    assert kernels(strict) == [HIGH_PRECISION] * 3
    assert strict.predicted.saved_us == 0
    assert strict.sites[0].fwd[0].reason.startswith("no FP8 kernel reaches min_speedup=1.26: best torch.")
    assert strict.sites[0].fwd[0].reason.endswith("alone 1.25x")
    reasons = {r.reason for r in strict.rejected if r.kernel == "torch.rowwise" and r.pass_ is Pass.FWD}
    assert reasons == {"speed-up 1.25 < 1.26"}


def test_a_slower_fp8_is_taken_only_without_min_speedup() -> None:
    profile = timed([linear("s")], fp8=11.0)
    assert kernels(make_plan(profile, Requirement(min_speedup=0.5))) == [HIGH_PRECISION] * 3
    asked = make_plan(profile, Requirement(min_speedup=None))
    assert all(k.startswith("torch.") for k in kernels(asked))
    assert asked.predicted.saved_us == pytest.approx(30 - 39)
    assert asked.sites[0].fwd[0].reason.startswith("fastest FP8, no min_speedup asked")


def test_calls_multiply_the_saving() -> None:
    once = make_plan(timed([linear("s")]), Requirement())
    thrice = make_plan(timed([linear("s", calls=3)]), Requirement())
    assert once.predicted.saved_us is not None
    assert thrice.predicted.saved_us == pytest.approx(3 * once.predicted.saved_us)


def test_sharing_decides_the_granularity() -> None:
    """Rowwise is the faster fwd alone; tensorwise wins: wgrad needs it, and a pair of it is cheap."""

    def cast_us(site: Site, operand: Operand, specs: frozenset[OperandSpec]) -> float:
        kinds = {spec.granularity.value for spec in specs}
        return 1.2 if kinds == {"tensorwise"} else 1.0 * len(specs)

    def db(site: str, pass_: Pass, a: str, b: str, accumulation: str) -> float:
        return 10.0 if pass_ is Pass.DGRAD or (pass_ is Pass.WGRAD and "rowwise" in a) else 30.0

    def product_us(site: Site, pass_: Pass, kernel: str) -> float:
        return 10.0 if kernel == HIGH_PRECISION else 5.9 if ".rowwise" in kernel else 6.0

    profile = ProfileBuilder(
        [linear("s")], device=H200, db=db, product_us=product_us, cast_us=cast_us
    ).build()
    plan = make_plan(profile, Requirement())
    fwd, dgrad, wgrad = (plan.sites[0].choices(p)[0] for p in Pass)
    assert (fwd.spec_a.recipe_key, wgrad.spec_b.recipe_key) == ("e4m3.tensorwise", "e4m3.tensorwise")
    assert dgrad.kernel == HIGH_PRECISION
    # 6 + 6, x both ways 1.2 together, w 1.2, g 1.2; rowwise fwd would cost 5.9 + 6 and x 2.0, w 1.0, g 1.2.
    assert plan.predicted.saved_us == pytest.approx(20 - 15.6)
    reasons = [r.reason for r in plan.rejected if r.kernel == "torch.rowwise" and r.pass_ is Pass.FWD]
    assert reasons == [f"the site is faster with {fwd.kernel} (alone 7.9 us with casts)"]


def test_missing_times_are_reasons() -> None:
    def product_us(site: Site, pass_: Pass, kernel: str) -> float | None:
        if pass_ is Pass.DGRAD and kernel == HIGH_PRECISION:
            return None
        if kernel == "torch.rowwise":
            return None
        return 10.0 if kernel == HIGH_PRECISION else 6.0

    def cast_us(site: Site, operand: Operand, specs: frozenset[OperandSpec]) -> float | None:
        if any(s.granularity == "rowwise" for s in specs) and operand is Operand.GRAD_OUTPUT:
            return None
        return 0.5

    profile = ProfileBuilder(
        [linear("s")], device=H200, product_us=product_us, cast_us=cast_us, unvetted=["torch.tensorwise.fast"]
    ).build()
    plan = make_plan(profile, Requirement())
    found = {(r.pass_, r.kernel, r.spec_a): r.reason for r in plan.rejected}
    assert found[Pass.FWD, "torch.rowwise", "e4m3.rowwise"] == "no measured time"
    assert found[Pass.FWD, "torch.tensorwise.fast", "e4m3.tensorwise"] == "its output was not vetted"
    assert (
        found[Pass.WGRAD, "torch.rowwise.fast", "e4m3.rowwise"]
        == "no measured cast of 1024x64 to e4m3.rowwise.T"
    )
    assert found[Pass.DGRAD, "torch.tensorwise", "e4m3.tensorwise"] == "no measured bf16 time to compare with"
    assert found[Pass.FWD, "emulated.rowwise", "e4m3.rowwise"].startswith("emulated: nothing is faster")
    assert kernels(plan)[1] == HIGH_PRECISION
    assert plan.sites[0].dgrad[0].reason.startswith("nothing to choose from: no measured")


def test_times_of_another_device_are_not_used() -> None:
    profile = timed([linear("s")])
    profile.products.device = ["NVIDIA H100"] * len(profile.products)
    profile.casts.device = ["NVIDIA H100"] * len(profile.casts)
    assert make_plan(profile, Requirement()).basis == "accuracy"


def test_times_in_bf16_are_preferred_over_other_dtypes() -> None:
    profile = timed([linear("s")])
    table = profile.products
    for name in table.__struct_fields__:
        column = getattr(table, name)
        setattr(table, name, [*column, *column])
    half = len(table) // 2
    table.out_dtype[:half] = [Format.FP32] * half
    table.p50_us[:half] = [1000.0] * half
    assert make_plan(profile, Requirement()).predicted.saved_us == pytest.approx(6.0)


def test_pinned_passes_share_casts_with_the_others() -> None:
    plan = make_plan(timed([linear("s")]), Requirement(pin={"s:fwd": "torch.rowwise", "s:dgrad": "bf16"}))
    assert kernels(plan)[:2] == ["torch.rowwise", HIGH_PRECISION]
    emulated = make_plan(timed([linear("s")]), Requirement(pin={"s:fwd": "emulated.rowwise"}))
    assert kernels(emulated)[0] == "emulated.rowwise"
    assert all(k.startswith("torch.") for k in kernels(emulated)[1:])
    # Its product was timed by the builder, so it counts: 3 x 6 + 6 casts.
    assert emulated.predicted.saved_us == pytest.approx(30 - 24)
    profile = timed([linear("s")])
    keep = [i for i, k in enumerate(profile.products.kernel) if not k.startswith("emulated")]
    for name in profile.products.__struct_fields__:
        column = getattr(profile.products, name)
        setattr(profile.products, name, [column[i] for i in keep])
    untimed = make_plan(profile, Requirement(pin={"s:fwd": "emulated.rowwise"}))
    # dgrad and wgrad: 20 bf16; 12 products, g twice, w and x once.
    assert untimed.predicted.saved_us == pytest.approx(20 - 16)
    assert "1 pinned passes have no measured time" in untimed.predicted.note


# ---- the best combination, against brute force over everything that may run


def random_profile(seed: int, sites: int = 2, *, loss: bool = False, device: object = H200) -> Profile:
    r = random.Random(seed)
    pair_discount = r.uniform(0.4, 1.0)
    single: dict[object, float] = {}

    def cast_us(site: Site, operand: Operand, specs: frozenset[OperandSpec]) -> float | None:
        total = sum(single.setdefault((site.name, operand, s), r.uniform(0.2, 2.0)) for s in specs)
        if len(specs) == 2 and r.random() < 0.5:
            return None
        return total * pair_discount if len(specs) == 2 else total

    def product_us(site: Site, pass_: Pass, kernel: str) -> float | None:
        if kernel == HIGH_PRECISION:
            return r.uniform(6, 12)
        return None if r.random() < 0.1 else r.uniform(2, 12)

    def db(*_: object) -> float | None:
        return None if r.random() < 0.1 else r.uniform(14, 34)

    def change(*_: object) -> tuple[float, float] | None:
        return None if r.random() < 0.1 else (r.uniform(-2e-5, 1e-4) * r.random() ** 3, r.uniform(0, 2e-5))

    # Different shapes: times are keyed by shape.
    shapes = [
        linear(f"s{i}", m=128 * (i + 1), n=64 + 16 * i, k=128, calls=r.choice([1, 1, 3]))
        for i in range(sites)
    ]
    return ProfileBuilder(
        shapes,
        device=device,  # type: ignore[arg-type]
        db=db,
        product_us=product_us if device is H200 else None,
        cast_us=cast_us if device is H200 else None,
        loss=change if loss else None,
    ).build()


def brute_force_saving(profile: Profile, requirement: Requirement) -> float:
    """Every combination of kernel and format over three passes, from the tables themselves."""
    facts = Facts.of(profile)
    total = 0.0
    for site in facts.sites:
        usable: list[list[tuple[float, list[tuple[Operand, OperandSpec]]] | None]] = []
        bf16 = [
            facts.products[(p.m, p.n, p.k, p.pass_, HIGH_PRECISION)].p50_us for p in map(site.problem, Pass)
        ]
        for pass_ in Pass:
            options: list[tuple[float, list[tuple[Operand, OperandSpec]]] | None] = [None]
            for kernel, format_ in itertools.product(KERNELS.values(), (Format.E4M3, Format.E5M2)):
                if (
                    kernel.emulated
                    or kernel.name == HIGH_PRECISION
                    or (pass_ is Pass.FWD and format_ != "e4m3")
                ):
                    continue
                problem = replace(site.problem(pass_), a_format=format_)
                single = replace(replace(site, rows=1).problem(pass_), a_format=format_)
                if not all(kernel.supports(p, profile.device) for p in (problem, single)):
                    continue
                a, b = kernel.operands(problem)
                key = (site.name, pass_, a.recipe_key, b.recipe_key, str(kernel.accumulation))
                error = facts.errors.get(key)
                time = facts.products.get((problem.m, problem.n, problem.k, pass_, kernel.name))
                if error is None or time is None or error.sqnr_db_low < requirement.min_sqnr_db:
                    continue
                operands = [(o, s) for (o, _), s in zip(PASS_OPERANDS[pass_], (a, b), strict=True)]
                options.append((time.p50_us, operands))
            usable.append(options)
        best = 0.0
        for combination in itertools.product(*usable):
            spent = sum(c[0] for c in combination if c)
            before = sum(t for c, t in zip(combination, bf16, strict=True) if c)
            for operand in Operand:
                specs = frozenset(s for c in combination if c for o, s in c[1] if o is operand)
                time_us = facts.casts.time_us(*tensor_shape(site, operand), specs, weight=operand == "weight")
                assert time_us is not None
                spent += time_us
            if requirement.min_speedup is None or before >= requirement.min_speedup * spent:
                best = max(best, before - spent)
        total += site.calls * best
    return total


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    min_speedup=st.sampled_from([0.9, 1.0, 1.05, 1.5, 2.0]),
    min_db=st.sampled_from([0, 20, 26]),
)
def test_the_saving_is_the_best_of_all_combinations(seed: int, min_speedup: float, min_db: float) -> None:
    profile = random_profile(seed)
    requirement = Requirement(min_sqnr_db=min_db, min_speedup=min_speedup)
    plan = make_plan(profile, requirement)
    assert plan.predicted.saved_us == pytest.approx(brute_force_saving(profile, requirement), abs=1e-9)
