"""Files on disk: one JSON envelope for profile, plan and benchmark, safetensors for tensors. No pickle."""

from loka.artifacts.atomic import write_atomically
from loka.artifacts.envelope import Envelope, Schema, body_text, read_envelope, write_envelope
from loka.artifacts.environment import Environment, describe_environment
from loka.artifacts.fingerprint import explain_difference, fingerprint
from loka.artifacts.plan import Choice, Override, Plan, Predicted, Rejected, SitePlan
from loka.artifacts.plan_text import plan_headline, plan_text
from loka.artifacts.profile import (
    CastTable,
    ErrorTable,
    Fingerprint,
    LossTable,
    Overhead,
    ProductTable,
    Profile,
    SiteTable,
    StepShares,
)
from loka.artifacts.records import (
    BENCHMARK,
    PLAN,
    PROFILE,
    Benchmark,
    check_columns,
    read_benchmark,
    read_plan,
    read_profile,
    read_record,
    write_benchmark,
    write_plan,
    write_profile,
    write_record,
)
from loka.artifacts.statistics import (
    BackgroundWrite,
    Statistics,
    read_statistics,
    write_statistics,
    write_statistics_in_background,
)

__all__ = [
    "BENCHMARK",
    "PLAN",
    "PROFILE",
    "BackgroundWrite",
    "Benchmark",
    "CastTable",
    "Choice",
    "Envelope",
    "Environment",
    "ErrorTable",
    "Fingerprint",
    "LossTable",
    "Overhead",
    "Override",
    "Plan",
    "Predicted",
    "ProductTable",
    "Profile",
    "Rejected",
    "Schema",
    "SitePlan",
    "SiteTable",
    "Statistics",
    "StepShares",
    "body_text",
    "check_columns",
    "describe_environment",
    "explain_difference",
    "fingerprint",
    "plan_headline",
    "plan_text",
    "read_benchmark",
    "read_envelope",
    "read_plan",
    "read_profile",
    "read_record",
    "read_statistics",
    "write_atomically",
    "write_benchmark",
    "write_envelope",
    "write_plan",
    "write_profile",
    "write_record",
    "write_statistics",
    "write_statistics_in_background",
]
