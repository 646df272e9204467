"""Kernels that the planner treats apart: those nobody has run yet, and those that cast nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from planner_profiles import H200, ProfileBuilder, add_error, linear

from loka.artifacts import PLAN, Plan, Profile, body_text
from loka.dispatch.planner.checks import validate_plan
from loka.dispatch.planner.make_plan import make_plan
from loka.errors import ArtifactError, NoKernelError
from loka.kernels import HIGH_PRECISION, KERNELS
from loka.vocab import Device, Format, Operand, OperandSpec, Pass, Requirement, Site

MI300X = Device("hip", "AMD Instinct MI300X", (9, 4), (2, 11))
B200 = Device("cuda", "NVIDIA B200", (10, 0), (2, 11))
UNVERIFIED = [name for name, k in KERNELS.items() if not k.verified]


def kernels(plan: Plan) -> list[str]:
    return [plan.sites[0].choices(p)[0].kernel for p in Pass]


def why(plan: Plan, pass_: Pass = Pass.FWD) -> str:
    return plan.sites[0].choices(pass_)[0].reason


def product_us(fp8: float, site: Site, pass_: Pass, kernel: str) -> float:
    return {HIGH_PRECISION: 10.0, "triton.bf16": 7.0}.get(kernel, fp8)


def cast_us(site: Site, operand: Operand, specs: frozenset[OperandSpec]) -> float:
    return 0.5 * len(specs)


def fnuz(*, timed: bool, unvetted: tuple[str, ...] = ()) -> Profile:
    """A profile of an MI300X: errors of its own formats, and times where wanted."""
    site = linear("s", n=64, k=128)
    builder = ProfileBuilder(
        [site], device=MI300X, db=lambda *_: None, unvetted=unvetted, product_us=partial(product_us, 6.0)
    )
    if not timed:
        builder = replace(builder, product_us=None)
    profile = builder.build()
    for pass_ in Pass:
        add_error(profile, "s", pass_, "e4m3fnuz.tensorwise", "e4m3fnuz.tensorwise", 30.0)
    if timed:
        for rows, columns in ((1024, 128), (64, 128), (1024, 64)):
            for turned in (False, True):
                table = profile.casts
                table.device.append(MI300X.name)
                table.rows.append(rows)
                table.columns.append(columns)
                table.from_dtype.append(Format.BF16)
                table.producer.append("memory")
                spec = KERNELS["torch.tensorwise.fnuz"].operands(site.problem(Pass.FWD))[0]
                table.specs.append([spec.with_transposed(turned)])
                table.p50_us.append(0.5)
    return profile


def test_a_kernel_that_nobody_ran_is_never_taken_without_a_time() -> None:
    assert {"torch.mx_1x32", "torch.tensorwise.fnuz", "transformer_engine.mx_1x32"} <= set(UNVERIFIED)
    plan = make_plan(fnuz(timed=False), Requirement())
    assert kernels(plan) == [HIGH_PRECISION] * 3
    assert why(plan).startswith("nothing to choose from: unverified: ")
    (reason,) = {r.reason for r in plan.rejected if r.kernel == "torch.tensorwise.fnuz" and r.pass_ == "fwd"}
    assert reason.startswith("unverified: ")


def test_once_vetted_and_timed_on_the_device_it_is_like_the_others() -> None:
    plan = make_plan(fnuz(timed=True), Requirement())
    assert kernels(plan) == ["torch.tensorwise.fnuz"] * 3
    # 3 products of 6 us, three tensors cast in both orientations at 0.5 us each.
    assert plan.predicted.saved_us == pytest.approx(30 - 18 - 3)
    refused = make_plan(fnuz(timed=True, unvetted=("torch.tensorwise.fnuz",)), Requirement())
    assert kernels(refused) == [HIGH_PRECISION] * 3
    reasons = [
        r.reason
        for r in refused.rejected
        if (r.kernel, r.spec_a) == ("torch.tensorwise.fnuz", "e4m3fnuz.tensorwise")
    ]
    assert reasons == ["its output was not vetted"] * 3


def test_a_pin_may_ask_for_an_unverified_kernel_where_its_rules_allow_it() -> None:
    profile = ProfileBuilder([linear("s")], device=B200).build()
    assert not set(UNVERIFIED) & set(kernels(make_plan(profile, Requirement(allow=("*mx_1x32",)))))
    pinned = make_plan(profile, Requirement(pin={"s:fwd": "torch.mx_1x32"}))
    assert kernels(pinned)[0] == "torch.mx_1x32"
    with pytest.raises(NoKernelError, match=r"needs SM 10\.0, found 9\.0"):
        make_plan(
            ProfileBuilder([linear("s")], device=H200).build(), Requirement(pin={"s:fwd": "torch.mx_1x32"})
        )


def timed(fp8: float = 6.0) -> Profile:
    return ProfileBuilder(
        [linear("s")], device=H200, product_us=partial(product_us, fp8), cast_us=cast_us
    ).build()


def test_a_kernel_that_casts_nothing_is_no_candidate_for_fp8() -> None:
    for profile in (timed(), ProfileBuilder([linear("s")], device=H200).build()):
        plan = make_plan(profile, Requirement())
        assert "triton.bf16" not in kernels(plan) + [r.kernel for r in plan.rejected]
        assert HIGH_PRECISION not in [r.kernel for r in plan.rejected]


def test_a_pin_to_another_bf16_kernel_is_kept_timed_and_valid() -> None:
    plan = make_plan(timed(), Requirement(pin={"s:wgrad": "triton.bf16"}))
    assert kernels(plan)[2] == "triton.bf16"
    choice = plan.sites[0].wgrad[0]
    assert (choice.spec_a, choice.spec_b) == (OperandSpec.high_precision(transposed=True),) * 2
    assert choice.reason == "pinned by `s:wgrad`"
    # fwd and dgrad in FP8: 12 us of products, x and g once, w both ways: 2 us; wgrad 7 us for 10.
    assert plan.predicted.saved_us == pytest.approx((20 - 14) + (10 - 7))
    assert "14.0 us with casts, bf16 20.0 us" in why(plan)
    validate_plan(plan)
    assert body_text(PLAN, plan)


def test_a_pinned_bf16_kernel_is_no_reason_for_the_other_passes() -> None:
    plan = make_plan(timed(fp8=11.0), Requirement(pin={"s:wgrad": "triton.bf16"}))
    assert kernels(plan) == [HIGH_PRECISION, HIGH_PRECISION, "triton.bf16"]
    assert plan.predicted.saved_us == pytest.approx(3.0)
    assert why(plan).startswith("no FP8 kernel reaches min_speedup=1.05: best torch.tensorwise alone ")


def test_a_pinned_bf16_kernel_costs_no_loss_and_may_be_untimed() -> None:
    profile = ProfileBuilder([linear("s")], device=H200, loss=lambda *_: (1e-5, 1e-6)).build()
    plan = make_plan(profile, Requirement(pin={"s": "triton.bf16"}))
    assert kernels(plan) == ["triton.bf16"] * 3
    assert (plan.predicted.delta_ne, plan.predicted.se) == (0.0, 0.0)
    assert "was not estimated" not in plan.predicted.note


def test_a_bf16_kernel_with_specs_of_fp8_is_refused() -> None:
    plan = make_plan(timed(), Requirement(pin={"s:wgrad": "triton.bf16"}))
    site = plan.sites[0]
    wrong = _changed(site.wgrad[0], spec_a=OperandSpec())
    edited = _plan_with(plan, wrong)
    with pytest.raises(ArtifactError, match=r"wgrad of `s`: spec_a is not what triton\.bf16 takes"):
        validate_plan(edited)


def _changed(choice: object, **changes: object) -> object:
    fields = {name: getattr(choice, name) for name in choice.__struct_fields__}  # type: ignore[attr-defined]
    return type(choice)(**fields | changes)


def _plan_with(plan: Plan, wgrad: object) -> Plan:
    return _changed(plan, sites=(_changed(plan.sites[0], wgrad=(wgrad,)),))  # type: ignore[return-value]


def test_a_kernel_that_takes_only_some_m_is_not_for_a_choice_that_serves_every_m() -> None:
    """MSLK's blocks want M % 128 = 0; the last batch of an epoch may have any M."""
    sites = [linear("s", m=1024, n=256, k=256)]
    allow = ("torch.blockwise*", "mslk.blockwise*")
    plan = make_plan(ProfileBuilder(sites, device=H200).build(), Requirement(allow=allow))
    assert kernels(plan) == ["torch.blockwise_1x128"] * 3
    reasons = {r.kernel: r.reason for r in plan.rejected if r.pass_ is Pass.FWD}
    assert reasons["mslk.blockwise_1x128"] == "needs M % 128 == 0, got M=1: a plan's choice serves every M"
    profile = ProfileBuilder(sites, device=H200).build()
    with pytest.raises(NoKernelError, match="needs M % 128 == 0, got M=1: a plan's choice serves every M"):
        make_plan(profile, Requirement(pin={"s:fwd": "mslk.blockwise_1x128"}))
