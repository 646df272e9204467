from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from artifact_examples import plan as example_plan
from planner_profiles import H200, ProfileBuilder, linear
from rich.console import Console

from loka.artifacts import Choice, Plan, read_plan, write_plan
from loka.dispatch.explain import plan_changes, plan_flop_shares, render_diff, render_plan
from loka.dispatch.planner.checks import validate_plan
from loka.dispatch.planner.make_plan import make_plan
from loka.errors import ArtifactError, UnknownNameError
from loka.vocab import Format, Pass, Requirement, ScaleLayout


def _plan() -> Plan:
    return make_plan(ProfileBuilder([linear("a"), linear("b", n=32)], device=H200).build(), Requirement())


def _edited(plan: Plan, pass_: Pass, *choices: Choice) -> Plan:
    site = msgspec.structs.replace(plan.sites[0], **{str(pass_): choices})
    return msgspec.structs.replace(plan, sites=(site, *plan.sites[1:]))


def _with(choice: Choice, **changes: object) -> Choice:
    return msgspec.structs.replace(choice, **changes)


def test_plans_of_the_planner_are_valid_also_after_a_file(tmp_path: Path) -> None:
    plan = _plan()
    validate_plan(plan)
    write_plan(tmp_path / "p.json", plan)
    read = read_plan(tmp_path / "p.json")
    assert read == plan
    validate_plan(read)
    validate_plan(make_plan(ProfileBuilder([linear("a")]).build(), Requirement(min_sqnr_db=99)))


def test_order_of_m() -> None:
    plan = _plan()
    last = plan.sites[0].fwd[0]
    below = [_with(last, m_below=m) for m in (64, 128, 256, 512)]
    validate_plan(_edited(plan, Pass.FWD, *below[:3], last))
    for choices, message in [
        ([], r"`p.json`: fwd of `a` has 0 choices"),
        ([*below, last], "has 5 choices"),
        (below[:2], "the last choice ends at m_below=128"),
        ([below[1], below[0], last], "m_below=64 does not rise above 128"),
        ([below[0], below[0], last], "m_below=64 does not rise above 64"),
        ([_with(last, m_below=0), last], "m_below=0 does not rise above 0"),
        ([last, last], "m_below=null is not the last"),
    ]:
        with pytest.raises(ArtifactError, match=message):
            validate_plan(_edited(plan, Pass.FWD, *choices), where="p.json")


def test_kernels_and_specs() -> None:
    plan = _plan()
    fwd = plan.sites[0].fwd[0]
    with pytest.raises(UnknownNameError, match=r"unknown kernel `torch\.tensorwize`"):
        validate_plan(_edited(plan, Pass.FWD, _with(fwd, kernel="torch.tensorwize")))
    with pytest.raises(ArtifactError, match=r"fwd of `a`: spec_a is not what torch\.rowwise takes") as caught:
        validate_plan(_edited(plan, Pass.FWD, _with(fwd, kernel="torch.rowwise")))
    assert "granularity     needs rowwise, found tensorwise" in str(caught.value)
    wrong = replace(fwd.spec_b, pad=1)
    with pytest.raises(ArtifactError, match=r"spec_b is not what torch\.tensorwise takes") as caught:
        validate_plan(_edited(plan, Pass.FWD, _with(fwd, spec_b=wrong)))
    assert "pad             needs 16, found 1" in str(caught.value)
    assert "scale_layout" not in str(caught.value)
    with pytest.raises(ArtifactError, match="takes 8-bit operands, spec_a has format bf16"):
        validate_plan(_edited(plan, Pass.FWD, _with(fwd, spec_a=replace(fwd.spec_a, format=Format.BF16))))
    bf16 = _with(fwd, kernel="high_precision.bf16")
    with pytest.raises(ArtifactError, match=r"spec_a is not what high_precision\.bf16 takes"):
        validate_plan(_edited(plan, Pass.FWD, bf16))
    layout = replace(fwd.spec_a, scale_layout=ScaleLayout.K_MAJOR)
    with pytest.raises(ArtifactError, match="spec_a"):
        validate_plan(_edited(plan, Pass.FWD, _with(fwd, spec_a=layout)))
    e5m2 = _with(plan.sites[0].wgrad[0], spec_a=replace(plan.sites[0].wgrad[0].spec_a, format=Format.E5M2))
    validate_plan(_edited(plan, Pass.WGRAD, e5m2))


def test_basis_and_names() -> None:
    plan = _plan()
    with pytest.raises(ArtifactError, match="basis `guess` is not known"):
        validate_plan(msgspec.structs.replace(plan, basis="guess"))
    with pytest.raises(ArtifactError, match="site `a` stands 2 times"):
        validate_plan(msgspec.structs.replace(plan, sites=(plan.sites[0], *plan.sites)))
    zero = msgspec.structs.replace(plan.sites[0], n=0)
    with pytest.raises(ArtifactError, match="has N=0 K=128"):
        validate_plan(msgspec.structs.replace(plan, sites=(zero,)))


# ---- for people


def _shown(table: object) -> str:
    console = Console(width=200, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_rendered_plan() -> None:
    profile = ProfileBuilder([linear("a"), linear("b", n=1)]).build()
    plan = make_plan(profile, Requirement())
    text = _shown(render_plan(plan, profile=profile))
    assert "3 of 6 passes in FP8, at 1 of 2 sites" in text
    assert "30.5" in text  # the mean, where the gate looks at the lower bound of 30.0
    assert "N=1 < 16" in text
    assert "others rejected]" in text
    detailed = _shown(render_plan(plan, rejected=True))
    assert "not emulated.mx_1x32" in detailed
    assert " dB " in text.splitlines()[2]
    assert " dB " not in detailed.splitlines()[2]  # nothing to say there without a profile
    assert "a coarser recipe passes" in detailed
    assert "functional" in _shown(render_plan(example_plan()))


def test_differences_of_plans() -> None:
    profile = ProfileBuilder([linear("a"), linear("b", n=32)]).build()
    old = make_plan(profile, Requirement())
    assert plan_changes(old, old) == []
    assert "no difference" in _shown(render_diff(old, old))
    new = make_plan(profile, Requirement(pin={"b:dgrad": "bf16"}))
    changes = plan_changes(old, new)
    assert [(c.site, c.pass_) for c in changes] == [("", "requirement: pin"), ("b", "dgrad")]
    assert changes[1].old == "emulated.tensorwise (e4m3.tensorwise x e4m3.tensorwise)"
    assert changes[1].new == "high_precision.bf16 (bf16 x bf16)"
    assert changes[1].why == "pinned by `b:dgrad`"
    assert "2 differences" in _shown(render_diff(old, new))
    other = make_plan(ProfileBuilder([linear("a"), linear("c")], device=H200).build(), Requirement())
    found = {(c.site, c.pass_): (c.old, c.new) for c in plan_changes(old, other)}
    assert found["", "device"] == ("CPU", "NVIDIA H200")
    assert found["c", ""] == ("", "planned")
    assert found["b", ""] == ("planned", "")
    assert ("", "model") in found
    assert found["a", "fwd"][1].startswith("torch.tensorwise")


def test_flop_shares() -> None:
    sites = [linear("a", m=100, n=64, k=32), linear("b", m=300, n=16, k=64, calls=2)]
    profile = ProfileBuilder(sites).build()
    plan = make_plan(profile, Requirement(pin={"b:fwd": "bf16"}))
    shares = plan_flop_shares(plan)
    assert shares.shares == {
        Pass.FWD: pytest.approx(64 * 32 / (64 * 32 + 16 * 64)),
        Pass.DGRAD: 1.0,
        Pass.WGRAD: 1.0,
    }
    assert shares.sites_fp8 == {Pass.FWD: 1, Pass.DGRAD: 2, Pass.WGRAD: 2}
    assert (shares.sites_planned, shares.sites) == (2, 2)
    functional = replace(linear("f", m=100, n=64, k=32), kind="functional", not_planned="functional")
    counted = plan_flop_shares(plan, [*sites, functional])
    work = {"a": 100 * 64 * 32, "b": 2 * 300 * 16 * 64, "f": 100 * 64 * 32}
    total = sum(work.values())
    assert counted.shares[Pass.FWD] == pytest.approx(work["a"] / total)
    assert counted.shares[Pass.WGRAD] == pytest.approx((work["a"] + work["b"]) / total)
    assert (counted.sites_planned, counted.sites) == (2, 3)
    empty = make_plan(ProfileBuilder([]).build(), Requirement())
    assert plan_flop_shares(empty).shares == dict.fromkeys(Pass, 0.0)


def test_flop_shares_follow_m() -> None:
    plan = _plan()
    fp8 = plan.sites[0].fwd[0]
    bf16 = example_plan().sites[0].fwd[0]
    split = _edited(plan, Pass.FWD, _with(bf16, m_below=512), fp8)
    assert plan_flop_shares(split).sites_fp8[Pass.FWD] == 2
    small = plan_flop_shares(split, [linear("a", m=511), linear("b", n=32, m=511)])
    assert small.sites_fp8[Pass.FWD] == 1
    assert plan_flop_shares(split, [linear("a", m=512)]).sites_fp8[Pass.FWD] == 1
