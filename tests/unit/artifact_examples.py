"""One small example of each record: the objects behind tests/golden/ and docs/files.md."""

from __future__ import annotations

from loka.artifacts import (
    CastTable,
    Choice,
    Environment,
    ErrorTable,
    LossTable,
    Overhead,
    Override,
    Plan,
    Predicted,
    ProductTable,
    Profile,
    Rejected,
    SitePlan,
    SiteTable,
    StepShares,
    fingerprint,
)
from loka.vocab import Device, Format, Granularity, OperandSpec, Pass, Requirement

H200 = Device("cuda", "NVIDIA H200", (9, 0), (2, 11))

ENVIRONMENT = Environment(
    python="3.12.3",
    platform="Linux 6.8.0",
    machine="x86_64",
    cpu_count=16,
    loka="0.1.0",
    torch="2.11.0+cu130",
    cuda="13.0",
    devices=("NVIDIA H200",),
    driver="580.65.06",
    libraries={"numpy": "2.2.0", "triton": "3.6.0"},
    commit="3432e3f0000000000000000000000000000000ab",
)


def sites() -> SiteTable:
    return SiteTable(
        name=["tower.0", "tower.cross.weight"],
        kind=["linear", "functional"],
        n=[512, 64],
        k=[256, 64],
        bias=[True, False],
        calls=[1, 1],
        input_group=[0, 1],
        parameter=["tower.0.weight", "tower.cross.weight"],
        not_planned=["", "functional: a product with a raw Parameter"],
        m_min=[1000, 1000],
        m_p50=[1024, 1024],
        m_max=[1024, 1024],
        nonfinite_rows=[3, 0],
    )


def profile() -> Profile:
    table = sites()
    rowwise = OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16)
    return Profile(
        model=fingerprint(table.sites(), 131584, ["no_bias"]),
        device=H200,
        steps_seen=400,
        steps_observed=4,
        sites=table,
        errors=ErrorTable(
            site=["tower.0"],
            pass_=[Pass.FWD],
            spec_a=["e4m3.rowwise"],
            spec_b=["e4m3.rowwise"],
            accumulation=["exact"],
            kernel=["torch.rowwise"],
            source=["live"],
            m=[0],
            observations=[4],
            sqnr_db=[28.75],
            sqnr_db_low=[28.5],
            sqnr_db_high=[29.0],
            rel_err=[0.0365],
            rel_err_half=[0.001],
            row_p50=[0.0365],
            row_p50_half=[0.0005],
            row_p99=[0.0421],
            row_p99_half=[0.0015],
            row_max=[0.0512],
            row_max_half=[0.002],
            bias=[-1.5e-05],
            bias_half=[2e-05],
            mere=[0.11],
            mere_half=[0.03],
            underflow=[0.0021],
            underflow_half=[0.0001],
            saturation=[0.0],
            saturation_half=[0.0],
        ),
        products=ProductTable(
            device=["NVIDIA H200"],
            m=[1024],
            n=[512],
            k=[256],
            pass_=[Pass.FWD],
            out_dtype=[Format.BF16],
            kernel=["torch.rowwise"],
            p10_us=[5.5],
            p50_us=[5.75],
            p90_us=[6.25],
            vetted=[True],
        ),
        casts=CastTable(
            device=["NVIDIA H200"],
            rows=[1024],
            columns=[256],
            from_dtype=[Format.BF16],
            producer=["memory"],
            specs=[[rowwise]],
            p50_us=[2.5],
        ),
        loss=LossTable(
            site=["tower.0"],
            pass_=[Pass.FWD],
            spec_a=["e4m3.rowwise"],
            spec_b=["e4m3.rowwise"],
            delta_ne=[1.2e-05],
            se=[4e-06],
            method=["paired"],
        ),
        step=StepShares(
            step_us=2000.0,
            eligible_gemm=0.4,
            other_gemm=0.1,
            norm_cast_activation=0.2,
            embedding=0.15,
            optimizer=0.1,
            other=0.05,
            ceiling=1.25,
            basis="eligible products at twice the bf16 rate, casts free",
        ),
        overhead=Overhead(
            plain_step_us=2000.0,
            observed_step_us=3200.0,
            full_step_us=5600.0,
            every=100,
            live_every=10,
            percent=0.72,
        ),
        notes=["tower.0 saw M from 1000 to 1024"],
    )


def profile_v1() -> Profile:
    """What the example of version 1 reads as: no kernel, no bad rows, SQNR's interval alone."""
    old = profile()
    old.sites.nonfinite_rows = [0, 0]
    old.overhead = None
    errors = old.errors
    errors.kernel, errors.m = [""], [0]
    errors.rel_err = [10 ** (-28.75 / 20)]
    errors.rel_err_half = [(10 ** (-28.5 / 20) - 10 ** (-29.0 / 20)) / 2]
    for name in ("row_p50", "row_p99", "row_max", "bias", "mere", "underflow", "saturation"):
        setattr(errors, f"{name}_half", [0.0])
    return old


def plan() -> Plan:
    bf16 = OperandSpec.high_precision()
    rowwise = OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16)
    return Plan(
        requirement=Requirement(deny=("*.fast",), pin={"tower.0:wgrad": "bf16"}),
        basis="time",
        device=H200,
        model=fingerprint(sites().sites(), 131584, ["no_bias"]),
        sites=(
            SitePlan(
                name="tower.0",
                n=512,
                k=256,
                bias=True,
                fwd=(
                    Choice(
                        m_below=512,
                        kernel="high_precision.bf16",
                        spec_a=bf16,
                        spec_b=bf16,
                        reason="too small",
                    ),
                    Choice(
                        m_below=None, kernel="torch.rowwise", spec_a=rowwise, spec_b=rowwise, reason="fastest"
                    ),
                ),
                dgrad=(
                    Choice(
                        m_below=None,
                        kernel="high_precision.bf16",
                        spec_a=bf16,
                        spec_b=bf16.with_transposed(True),
                        reason="no recipe has a measured error",
                    ),
                ),
                wgrad=(
                    Choice(
                        m_below=None,
                        kernel="high_precision.bf16",
                        spec_a=bf16.with_transposed(True),
                        spec_b=bf16.with_transposed(True),
                        reason="pinned by `tower.0:wgrad`",
                    ),
                ),
            ),
        ),
        unplanned={"tower.cross.weight": "functional: a product with a raw Parameter"},
        rejected=(
            Rejected(
                site="tower.0",
                pass_=Pass.FWD,
                kernel="torch.tensorwise",
                spec_a="e4m3.tensorwise",
                spec_b="e4m3.tensorwise",
                reason="sqnr 18.1 dB < 20.0",
            ),
        ),
        predicted=Predicted(saved_us=3.25, delta_ne=1.2e-05, se=4e-06, note="median times on NVIDIA H200"),
        overrides=(
            Override(
                site="tower.0",
                pass_=Pass.WGRAD,
                kernel="high_precision.bf16",
                instead_of="torch.rowwise",
                by="pin `tower.0:wgrad`",
            ),
        ),
        history=("made from a profile of 4 observed steps out of 400",),
    )


METRICS = {"relative_ne_change": 1.2e-05, "rows_per_s": 150000, "fp8_sites": 12}
DETAILS = {"arms": ["bf16", "planned"], "seeds": [0, 1], "settings": {"rows": 100000}}
