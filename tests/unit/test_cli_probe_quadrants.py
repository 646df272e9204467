"""Safe or not, fast or not: each quadrant from a profile with stated numbers, and the words for it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from planner_profiles import CPU, H200, ProfileBuilder, linear
from rich.console import Console
from rich.text import Text

from loka.artifacts import Profile
from loka.artifacts.profile import Overhead
from loka.cli.quadrant_view import judged_parts, limits_text, quadrants_json, quadrants_parts
from loka.cli.quadrants import Judgement, Quadrant, judge_passes
from loka.kernels import HIGH_PRECISION
from loka.vocab import Pass, Requirement, Site

SITE = linear("tower.deep.0", 4096, 512, 512)
BF16_US = 100.0


def timed(
    us: Callable[[str], float], *, db: Callable[[str], float] = lambda _: 30.0, **more: object
) -> Profile:
    """SITE on an H200; us(kernel) is the time of a product, db(recipe key of A) its SQNR; a cast takes 5."""
    return ProfileBuilder(
        [SITE],
        H200,
        db=lambda site, pass_, a, b, accumulation: db(a),
        product_us=lambda site, pass_, kernel: BF16_US if kernel == HIGH_PRECISION else us(kernel),
        cast_us=lambda site, operand, specs: 5.0,
        **more,  # type: ignore[arg-type]
    ).build()


def forward(profile: Profile, requirement: Requirement | None = None) -> Judgement:
    return next(j for j in judge_passes(profile, requirement) if j.pass_ is Pass.FWD)


def test_safe_and_fast() -> None:
    judged = forward(timed(lambda kernel: 40.0 if kernel == "torch.rowwise" else 70.0))
    assert judged.quadrant is Quadrant.SAFE_FAST
    # One product of 40 us and two casts of 5 against 100.
    assert (judged.kernel, judged.speedup) == ("torch.rowwise", 2.0)
    assert judged.sqnr_db == 30.5
    assert judged.reason == (
        "torch.rowwise: 2.00x with casts; 30.5 dB, row error p99 0.05 (live), loss not estimated"
    )


def test_safe_and_slow() -> None:
    judged = forward(timed(lambda _: 90.0))
    assert judged.quadrant is Quadrant.SAFE_SLOW
    assert judged.speedup == 1.0
    assert "1.00x < 1.05 with casts" in judged.reason


def test_a_fast_kernel_that_ruins_the_product_makes_no_pass_fast() -> None:
    judged = forward(
        timed(
            lambda kernel: 10.0 if "tensorwise" in kernel else 95.0,
            db=lambda a: 12.0 if "tensorwise" in a else 30.0,
        )
    )
    assert judged.quadrant is Quadrant.SAFE_SLOW
    assert judged.speedup is not None
    assert judged.speedup < 1.05
    assert "tensorwise" not in (judged.kernel or "")
    assert "has 5.00x, but sqnr 12.0 dB < 20.0" in judged.reason


def test_unsafe_and_fast() -> None:
    judged = forward(
        timed(
            lambda kernel: 10.0 if "tensorwise" in kernel else 60.0,
            db=lambda a: 12.0 if "tensorwise" in a else 17.0,
        )
    )
    assert judged.quadrant is Quadrant.UNSAFE_FAST
    # The error is that of the most exact kernel, the speed that of the fastest.
    assert judged.sqnr_db == 17.5
    assert judged.speedup == 5.0
    assert "tensorwise" in (judged.fastest or "")
    assert "sqnr 17.0 dB < 20.0" in judged.reason
    assert "has 5.00x, but sqnr 12.0 dB < 20.0" in judged.reason


def test_unsafe_and_slow() -> None:
    judged = forward(timed(lambda _: 190.0, db=lambda _: 17.0))
    assert judged.quadrant is Quadrant.UNSAFE_SLOW
    assert "sqnr 17.0 dB < 20.0" in judged.reason
    assert "0.50x < 1.05" in judged.reason


@pytest.mark.parametrize(
    ("requirement", "quadrant"),
    [
        (Requirement(min_sqnr_db=29), Quadrant.SAFE_FAST),
        (Requirement(min_sqnr_db=31), Quadrant.UNSAFE_FAST),
        (Requirement(max_row_error_p99=0.04), Quadrant.UNSAFE_FAST),
        (Requirement(min_speedup=1.7), Quadrant.SAFE_SLOW),
        (Requirement(min_speedup=None), Quadrant.SAFE_FAST),
        (Requirement(deny=("*",)), Quadrant.UNSAFE_FAST),
    ],
)
def test_by_the_requirement(requirement: Requirement, quadrant: Quadrant) -> None:
    assert forward(timed(lambda _: 50.0), requirement).quadrant is quadrant


@pytest.mark.parametrize(
    ("loss", "safe", "words"),
    [
        ((1e-4, 2e-5), True, "loss +1.0e-04 (se 2.0e-05)"),
        ((-3e-4, 2e-5), True, "loss -3.0e-04"),
        ((1e-4, 1e-4), False, "too uncertain for 2.0e-04: take more held-out rows"),
        ((3e-4, 1e-6), False, "loss +3.0e-04 (se 1.0e-06) > 2.0e-04"),
    ],
)
def test_the_loss_decides_where_it_was_estimated(loss: tuple[float, float], safe: bool, words: str) -> None:
    profile = timed(lambda _: 50.0, loss=lambda site, pass_, a, b: loss if pass_ is Pass.FWD else None)
    judged = forward(profile)
    assert judged.quadrant is (Quadrant.SAFE_FAST if safe else Quadrant.UNSAFE_FAST)
    assert words in judged.reason
    assert (judged.delta_ne, judged.se) == loss
    assert forward(profile, Requirement(max_loss_increase=None)).quadrant is Quadrant.SAFE_FAST
    # A pass without an estimate is judged by its error alone.
    dgrad = next(j for j in judge_passes(profile) if j.pass_ is Pass.DGRAD)
    assert dgrad.quadrant is Quadrant.SAFE_FAST


def test_without_times() -> None:
    def level(site: str, pass_: Pass, a: str, b: str, accumulation: str) -> float:
        return {Pass.FWD: 30.0, Pass.DGRAD: 10.0}.get(pass_, 10.0 + 15.0 * ("rowwise" in a))

    profile = ProfileBuilder([SITE], CPU, db=level).build()
    found = {j.pass_: j for j in judge_passes(profile)}
    assert found[Pass.FWD].quadrant is Quadrant.SAFE
    assert found[Pass.FWD].kernel == "emulated.tensorwise"  # the coarsest that passes
    assert found[Pass.DGRAD].quadrant is Quadrant.UNSAFE
    assert found[Pass.WGRAD].kernel == "emulated.rowwise"
    assert all(j.speedup is None for j in found.values())


def test_what_is_not_judged_says_why() -> None:
    sites = [
        Site("cross", "functional", 64, 64, False, 100, not_planned="functional: a raw Parameter"),
        linear("head", 4096, 1, 256),
        linear("unreached", 0, 64, 64),
        linear("frozen", 128, 64, 64),
    ]
    profile = ProfileBuilder(
        sites, CPU, db=lambda site, pass_, *_: None if (site, pass_) == ("frozen", Pass.WGRAD) else 30.0
    ).build()
    left = {(j.site, j.pass_): j.reason for j in judge_passes(profile) if j.quadrant is Quadrant.NOT_JUDGED}
    assert left["cross", Pass.FWD] == "functional: a raw Parameter"
    assert "N=1" in left["head", Pass.FWD]
    assert left["unreached", Pass.FWD] == "never reached in an observed step"
    assert left["frozen", Pass.WGRAD] == "no error was measured: the pass ran in no observed step"
    assert ("frozen", Pass.FWD) not in left


def test_a_pass_that_was_tried_but_not_timed_is_still_judged_by_its_error() -> None:
    profile = timed(lambda _: 50.0)
    table = profile.products
    for i in reversed(range(len(table))):
        if table.pass_[i] is Pass.WGRAD:
            for name in table.__struct_fields__:
                del getattr(table, name)[i]
    wgrad = next(j for j in judge_passes(profile) if j.pass_ is Pass.WGRAD)
    assert wgrad.quadrant is Quadrant.SAFE
    assert forward(profile).quadrant is Quadrant.SAFE_FAST


def test_every_pass_once_by_quadrant_then_flops() -> None:
    sites = [linear("small", 512, 64, 64), linear("large", 4096, 1024, 1024), linear("head", 512, 1, 64)]
    judged = judge_passes(ProfileBuilder(sites, CPU).build())
    assert len({(j.site, j.pass_) for j in judged}) == len(judged) == 9
    assert [j.site for j in judged[:6]] == ["large"] * 3 + ["small"] * 3
    assert sum(j.flops_share for j in judged) == pytest.approx(1.0)


def shown(parts: list[object], width: int = 80) -> list[str]:
    out = io.StringIO()
    console = Console(width=width, no_color=True, file=out)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)
    return out.getvalue().split("\n")


def test_the_table_fits_80_columns_and_loses_nothing() -> None:
    name = "tower.interactions.0.feature_projection.hidden.0"
    profile = ProfileBuilder([replace(SITE, name=name), linear("head", 512, 1, 64)], CPU).build()
    lines = shown(quadrants_parts(judge_passes(profile)))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    header = next(line for line in lines if line.lstrip().startswith("site"))
    sites = "".join(line[: header.index("pass")].strip() for line in lines)
    reasons = " ".join(line[header.index("why") :].strip() for line in lines)
    assert name in sites
    assert "emulated.tensorwise: 30.5 dB, row error p99 0.05 (live), loss not estimated" in " ".join(
        reasons.split()
    )
    assert [line for line in lines if line.startswith("not judged: 3 passes")]


def test_as_json() -> None:
    judged = judge_passes(timed(lambda _: 50.0))
    plain = quadrants_json(judged)
    assert list(plain) == [str(q) for q in Quadrant]
    assert [row["pass"] for row in plain["safe and fast"]] == ["fwd", "dgrad", "wgrad"]
    assert plain["unsafe and slow"] == []
    assert plain["safe and fast"][0]["speedup"] == pytest.approx(100 / 60)


def test_the_parts_name_limits_overhead_and_bad_rows() -> None:
    profile = ProfileBuilder([SITE], CPU).build()
    lines = [part for part in judged_parts(profile) if isinstance(part, str)]
    assert "observing: not clocked (train for more steps)" in lines
    assert not [line for line in lines if line.startswith("warning")]
    profile.sites.nonfinite_rows = [1234]
    profile.overhead = Overhead(
        plain_step_us=50_000.0,
        observed_step_us=70_000.0,
        full_step_us=None,
        every=100,
        live_every=10,
        percent=0.4,
    )
    text = "\n".join(part for part in judged_parts(profile) if isinstance(part, str))
    assert "observing one step in 100 makes the training 0.4 % longer: a plain step takes 50 ms" in text
    assert "warning: 1,234 rows at tower.deep.0 held a NaN or an infinity" in text
    assert limits_text(Requirement(max_loss_increase=None, min_speedup=None)) == (
        "judged by: SQNR >= 20 dB, row error p99 <= 0.25, any loss, 1x where timed; "
        "`loka plan` takes other limits"
    )
