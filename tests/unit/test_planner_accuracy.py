from __future__ import annotations

from dataclasses import replace

import pytest
from planner_profiles import CPU, H200, ProfileBuilder, add_error, linear

from loka.artifacts import PLAN, Plan, body_text
from loka.dispatch.planner.make_plan import make_plan
from loka.errors import ArtifactError, NoKernelError, UnknownNameError
from loka.kernels import HIGH_PRECISION
from loka.vocab import Accumulation, Format, Pass, Requirement


def kernels(plan: Plan, site: str = "s") -> tuple[str, str, str]:
    found = plan.site(site)
    assert found is not None
    assert all(len(found.choices(p)) == 1 and found.choices(p)[0].m_below is None for p in Pass)
    fwd, dgrad, wgrad = (found.choices(p)[0].kernel for p in Pass)
    return fwd, dgrad, wgrad


def why(plan: Plan, pass_: Pass = Pass.FWD, site: str = "s") -> str:
    found = plan.site(site)
    assert found is not None
    return found.choices(pass_)[0].reason


def rejected(plan: Plan, kernel: str, pass_: Pass = Pass.FWD, spec_a: str = "", site: str = "s") -> str:
    found = [
        r.reason
        for r in plan.rejected
        if (r.site, r.pass_, r.kernel) == (site, pass_, kernel) and r.spec_a.startswith(spec_a)
    ]
    assert len(found) == 1, found
    return found[0]


def table(**levels: float) -> object:
    """dB by granularity of A (and E5M2 by the same name with `e5m2_` before it)."""

    def db(site: str, pass_: Pass, a: str, b: str, accumulation: str) -> float | None:
        format_, granularity = a.split(".")[:2]
        if granularity == "rowwise" and b.endswith("tensorwise"):
            granularity = "rowwise_tensorwise"
        return levels.get(granularity if format_ == "e4m3" else f"e5m2_{granularity}")

    return db


def test_coarsest_recipe_that_passes_is_taken() -> None:
    db = table(tensorwise=19.9, rowwise=20.0, blockwise_1x128=25.0, mx_1x32=26.0)
    plan = make_plan(ProfileBuilder([linear("s")], db=db).build(), Requirement())
    assert plan.basis == "accuracy"
    assert kernels(plan) == ("emulated.rowwise", "emulated.rowwise", "emulated.rowwise")
    assert why(plan) == (
        "coarsest recipe that keeps the requirement: sqnr 20.0 dB, row error p99 0.05 (live)"
    )
    assert rejected(plan, "emulated.tensorwise") == "sqnr 19.9 dB < 20.0"
    assert rejected(plan, "emulated.blockwise_1x128") == "a coarser recipe passes"
    assert rejected(plan, "emulated.mx_1x32") == "a coarser recipe passes"
    assert "same recipe" in rejected(plan, "torch.rowwise")
    assert rejected(plan, "torch.rowwise.fast") == "a CPU ignores fast accumulation"
    assert rejected(plan, "emulated.rowwise.tensorwise_weight") == "not defined for fwd"
    assert rejected(plan, "emulated.tensorwise", Pass.WGRAD, "e5m2") == "no measured error"
    assert "min_speedup does not apply" in plan.predicted.note
    assert (plan.predicted.saved_us, plan.predicted.delta_ne) == (None, None)


def test_order_of_coarseness_and_of_formats() -> None:
    order = ["tensorwise", "rowwise_tensorwise", "rowwise", "blockwise_1x128", "mx_1x32"]
    names = ["tensorwise", "rowwise.tensorwise_weight", "rowwise", "blockwise_1x128", "mx_1x32"]
    for position, name in enumerate(names):
        levels = dict.fromkeys(order[position:], 30.0)
        plan = make_plan(ProfileBuilder([linear("s")], db=table(**levels)).build(), Requirement())
        assert kernels(plan)[1] == f"emulated.{name}"
    both = make_plan(ProfileBuilder([linear("s")], db=table(tensorwise=30, e5m2_tensorwise=40)).build())
    assert both.site("s").wgrad[0].spec_a.format is Format.E4M3
    assert rejected(both, "emulated.tensorwise", Pass.WGRAD, "e5m2") == "e4m3 passes with the same scales"
    # E5M2 with coarse scales comes before E4M3 with finer ones.
    coarse = make_plan(ProfileBuilder([linear("s")], db=table(rowwise=30, e5m2_tensorwise=30)).build())
    assert kernels(coarse) == ("emulated.rowwise", "emulated.tensorwise", "emulated.tensorwise")
    assert coarse.site("s").dgrad[0].spec_a.format is Format.E5M2
    assert coarse.site("s").dgrad[0].spec_b.format is Format.E4M3


def test_bf16_says_what_came_nearest() -> None:
    db = table(tensorwise=12.0, rowwise=15.0, mx_1x32=17.3)
    plan = make_plan(ProfileBuilder([linear("s")], db=db).build(), Requirement())
    assert kernels(plan) == (HIGH_PRECISION,) * 3
    assert why(plan) == "no recipe keeps the requirement: best emulated.mx_1x32 at 17.3 dB"
    assert not plan.site("s").wgrad[0].spec_a.is_quantized
    assert plan.site("s").wgrad[0].spec_a.transposed


def test_row_and_saturation_gates() -> None:
    rows = make_plan(ProfileBuilder([linear("s")], p99=0.26).build(), Requirement())
    assert kernels(rows) == (HIGH_PRECISION,) * 3
    assert rejected(rows, "emulated.rowwise") == "row error p99 0.26 > 0.25"
    assert why(rows).endswith("at 30.0 dB (row error p99 0.26 > 0.25)")
    profile = ProfileBuilder([linear("s")], db=lambda *_: None).build()
    add_error(profile, "s", Pass.FWD, "e4m3.tensorwise", "e4m3.tensorwise", 30.0, saturation=2e-4)
    add_error(profile, "s", Pass.FWD, "e4m3.rowwise", "e4m3.rowwise", float("nan"))
    plan = make_plan(profile, Requirement())
    assert rejected(plan, "emulated.tensorwise") == "saturation 2.0e-04 > 1e-04"
    assert rejected(plan, "emulated.rowwise") == "sqnr nan dB < 20.0"
    assert why(plan, Pass.DGRAD) == "nothing to choose from: no measured error"


def test_live_errors_decide_over_sampled_ones() -> None:
    for order in (("live", "sampled"), ("sampled", "live")):
        profile = ProfileBuilder([linear("s")], db=lambda *_: None).build()
        for source in order:
            level = 10.0 if source == "live" else 40.0
            add_error(profile, "s", Pass.FWD, "e4m3.rowwise", "e4m3.rowwise", level, source=source)
        assert rejected(make_plan(profile), "emulated.rowwise") == "sqnr 10.0 dB < 20.0"
    sampled = ProfileBuilder([linear("s")], db=lambda *_: None).build()
    add_error(sampled, "s", Pass.FWD, "e4m3.rowwise", "e4m3.rowwise", 40.0, source="sampled")
    assert why(make_plan(sampled)).endswith("(sampled)")


@pytest.mark.parametrize(("n", "k", "word"), [(15, 32, "N=15"), (1, 256, "N=1"), (512, 8, "K=8")])
def test_narrow_sites_stay_in_bf16(n: int, k: int, word: str) -> None:
    plan = make_plan(ProfileBuilder([linear("s", n=n, k=k)]).build(), Requirement())
    assert kernels(plan) == (HIGH_PRECISION,) * 3
    assert why(plan) == f"{word} < 16: narrow products stay in bf16"
    assert rejected(plan, "emulated.rowwise") == why(plan)
    pinned = make_plan(
        ProfileBuilder([linear("s", n=n, k=k)]).build(), Requirement(pin={"s:fwd": "emulated.rowwise"})
    )
    assert kernels(pinned) == ("emulated.rowwise", HIGH_PRECISION, HIGH_PRECISION)


def test_on_a_gpu_without_times_a_real_exact_kernel_is_taken() -> None:
    plan = make_plan(ProfileBuilder([linear("s", n=64, k=128)], device=H200).build(), Requirement())
    assert (plan.basis, kernels(plan)) == ("accuracy", ("torch.tensorwise",) * 3)
    assert rejected(plan, "torch.tensorwise.fast") == "torch.tensorwise has the same scales and is preferred"
    assert rejected(plan, "emulated.tensorwise").startswith("emulated: nothing is faster for it")
    odd = make_plan(ProfileBuilder([linear("s", n=100, k=128)], device=H200).build(), Requirement())
    # The libraries want N in whole loads of 16 bytes; LoKA's own product takes any N. dgrad's N is 128.
    assert kernels(odd) == ("triton.tensorwise", "torch.tensorwise", "torch.tensorwise")
    assert rejected(odd, "torch.tensorwise") == "needs N % 16 == 0, got N=100"
    assert rejected(odd, "mslk.rowwise") == "needs N % 8 == 0, got N=100"
    without = make_plan(
        ProfileBuilder([linear("s", n=100, k=128)], device=H200).build(), Requirement(deny=("triton.*",))
    )
    assert kernels(without) == (HIGH_PRECISION, "torch.tensorwise", "torch.tensorwise")


def test_of_equal_recipes_without_times_the_commoner_library_is_taken() -> None:
    db = table(rowwise=30, blockwise_1x128=30)
    profile = ProfileBuilder([linear("s", n=256, k=256)], device=H200, db=db).build()
    order = ["torch.*", "triton.*", "mslk.*", "deep_gemm.*"]
    firsts = [
        kernels(make_plan(profile, Requirement(deny=tuple(order[:gone]))))[0] for gone in range(len(order))
    ]
    # mslk has a rowwise recipe, deep_gemm has blocks only; exact sums go before fast ones.
    assert firsts == ["torch.rowwise", "triton.rowwise", "mslk.rowwise", "deep_gemm.blockwise_1x128"]
    fast = make_plan(profile, Requirement(allow=("torch.rowwise.fast", "mslk.rowwise")))
    assert kernels(fast) == ("mslk.rowwise",) * 3


def test_fast_and_exact_have_their_own_errors() -> None:
    def db(site: str, pass_: Pass, a: str, b: str, accumulation: str) -> float:
        return 30.0 if accumulation == Accumulation.FAST else 15.0

    plan = make_plan(ProfileBuilder([linear("s")], device=H200, db=db).build(), Requirement())
    assert kernels(plan) == ("torch.tensorwise.fast",) * 3
    assert rejected(plan, "torch.tensorwise") == "sqnr 15.0 dB < 20.0"


def test_functional_sites_are_listed_with_their_reason() -> None:
    sites = [linear("s"), replace(linear("f"), kind="functional", not_planned="functional: raw Parameter")]
    plan = make_plan(ProfileBuilder(sites).build(), Requirement())
    assert [s.name for s in plan.sites] == ["s"]
    assert plan.unplanned == {"f": "functional: raw Parameter"}


def test_allow_and_deny() -> None:
    profile = ProfileBuilder([linear("s")]).build()
    denied = make_plan(profile, Requirement(deny=("emulated.tens*",)))
    assert kernels(denied) == ("torch.tensorwise",) * 3
    assert rejected(denied, "emulated.tensorwise") == "denied by `emulated.tens*`"
    allowed = make_plan(profile, Requirement(allow=("emulated.mx*",)))
    assert kernels(allowed) == ("emulated.mx_1x32",) * 3
    assert rejected(allowed, "emulated.rowwise") == "not among those allowed"
    assert kernels(make_plan(profile, Requirement(deny=("*",)))) == (HIGH_PRECISION,) * 3
    with pytest.raises(UnknownNameError, match=r"kernel pattern `torch\.rowise` matches no kernel"):
        make_plan(profile, Requirement(allow=("torch.rowise",)))
    with pytest.raises(UnknownNameError, match=r"`cutlass\*` matches no kernel"):
        make_plan(profile, Requirement(deny=("cutlass*",)))


def test_pins_override_gates_and_are_recorded() -> None:
    sites = [linear("tower.mlp.0"), linear("tower.mlp.1"), linear("tower.head")]
    profile = ProfileBuilder(sites, db=table(tensorwise=30, rowwise=5)).build()
    pin = {"tower.mlp.*": "emulated.rowwise", "tower.mlp.1:fwd": "bf16", "tower.head:wgrad": "bf16"}
    plan = make_plan(profile, Requirement(pin=pin))
    assert kernels(plan, "tower.mlp.0") == ("emulated.rowwise",) * 3
    assert kernels(plan, "tower.mlp.1") == (HIGH_PRECISION, "emulated.rowwise", "emulated.rowwise")
    assert kernels(plan, "tower.head") == ("emulated.tensorwise", "emulated.tensorwise", HIGH_PRECISION)
    assert len(plan.overrides) == 7
    first, last = plan.overrides[0], plan.overrides[-1]
    assert (first.site, first.pass_, first.kernel) == ("tower.mlp.0", Pass.FWD, "emulated.rowwise")
    assert (first.instead_of, first.by) == ("emulated.tensorwise", "pin `tower.mlp.*`")
    assert (last.site, last.pass_, last.by) == ("tower.head", Pass.WGRAD, "pin `tower.head:wgrad`")
    assert why(plan, Pass.FWD, "tower.mlp.0").startswith("pinned by `tower.mlp.*`: sqnr 5.0 dB")
    assert why(plan, Pass.FWD, "tower.mlp.1") == "pinned by `tower.mlp.1:fwd`"
    reason = rejected(plan, "emulated.tensorwise", site="tower.mlp.0")
    assert reason == "pinned to emulated.rowwise by `tower.mlp.*`"
    assert (
        len([r for r in plan.rejected if r.kernel == "emulated.rowwise" and r.spec_a == "e4m3.rowwise"]) == 4
    )
    assert make_plan(profile, Requirement()).overrides == ()


def test_pin_takes_the_gradient_format_that_passes() -> None:
    profile = ProfileBuilder([linear("s")], db=table(rowwise=10, e5m2_rowwise=25)).build()
    plan = make_plan(profile, Requirement(pin={"s": "emulated.rowwise"}))
    assert plan.site("s").dgrad[0].spec_a.format is Format.E5M2
    assert plan.site("s").fwd[0].spec_a.format is Format.E4M3
    unmeasured = ProfileBuilder([linear("s")], db=lambda *_: None).build()
    plan = make_plan(unmeasured, Requirement(pin={"s": "emulated.rowwise"}))
    assert plan.site("s").dgrad[0].spec_a.format is Format.E4M3
    assert why(plan) == "pinned by `s`: no measured error"


def test_pins_that_cannot_be() -> None:
    sites = [linear("s"), replace(linear("f"), not_planned="functional")]
    profile = ProfileBuilder(sites, device=H200).build()
    with pytest.raises(UnknownNameError, match="pin `towr` matches no site") as caught:
        make_plan(profile, Requirement(pin={"towr": "bf16"}))
    assert "hint: sites: s" in str(caught.value)
    with pytest.raises(UnknownNameError, match="matches only sites that cannot be planned, such as `f`"):
        make_plan(profile, Requirement(pin={"f": "bf16"}))
    with pytest.raises(UnknownNameError, match=r"unknown pass `bwd` in pin `s:bwd`"):
        make_plan(profile, Requirement(pin={"s:bwd": "bf16"}))
    with pytest.raises(UnknownNameError, match=r"unknown kernel `torch\.rowise`"):
        make_plan(profile, Requirement(pin={"s": "torch.rowise"}))


def test_a_pinned_kernel_that_cannot_run_names_needed_and_found() -> None:
    profile = ProfileBuilder([linear("layers.2", m=512, n=100, k=64)], device=H200).build()
    with pytest.raises(NoKernelError) as caught:
        make_plan(profile, Requirement(pin={"layers.*:fwd": "torch.rowwise"}))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "`torch.rowwise`, pinned by `layers.*:fwd`, cannot run at `layers.2` for fwd (M=512 N=100 K=64)"
    )
    assert lines[1].split("  ")[1] == "torch.rowwise"
    assert lines[1].endswith("needs N % 16 == 0, got N=100")
    assert lines[-2] == ""
    hint = "hint: pin one that can: "
    assert lines[-1].startswith(hint)
    able = lines[-1].removeprefix(hint).split(", ")
    # 100 is a multiple of neither 16 nor 8, so every library is out; LoKA's own take any N.
    assert able[0] == HIGH_PRECISION
    assert {name.partition(".")[0] for name in able[1:]} == {"triton", "emulated"}
    assert {"triton.bf16", "triton.rowwise", "emulated.mx_1x32"} <= set(able)


def test_the_plan_is_pure_and_deterministic() -> None:
    profile = ProfileBuilder([linear("a"), linear("b", n=32)], loss=lambda *_: (1e-6, 1e-7)).build()
    before = repr(profile)
    requirement = Requirement(pin={"a:fwd": "emulated.mx_1x32"})
    first, second = (body_text(PLAN, make_plan(profile, requirement)) for _ in range(2))
    assert first == second
    assert repr(profile) == before


def test_unequal_columns_are_refused() -> None:
    profile = ProfileBuilder([linear("s")]).build()
    profile.errors.mere.pop()
    with pytest.raises(ArtifactError, match=r"errors\.mere"):
        make_plan(profile, Requirement())


def test_every_candidate_is_taken_or_rejected_once() -> None:
    plan = make_plan(ProfileBuilder([linear("s")], device=CPU).build(), Requirement())
    keys = [(r.pass_, r.kernel, r.spec_a, r.spec_b) for r in plan.rejected]
    assert len(keys) == len(set(keys))
    taken = [
        (p, c.kernel, c.spec_a.recipe_key, c.spec_b.recipe_key)
        for p in Pass
        for c in plan.site("s").choices(p)
    ]
    assert not set(taken) & set(keys)
    assert {k for _, k, _, _ in [*keys, *taken]} >= {
        "torch.rowwise",
        "emulated.mx_1x32",
        "emulated.tensorwise",
    }
    assert all(r.reason for r in plan.rejected)
