"""The plan: which kernel runs each pass of each site, and why not the others."""

from __future__ import annotations

import msgspec

from loka.artifacts.plan_text import plan_text
from loka.artifacts.profile import Fingerprint
from loka.vocab import Device, OperandSpec, Pass, Requirement

__all__ = ["Choice", "Override", "Plan", "Predicted", "Rejected", "SitePlan"]


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What runs a pass while M < m_below (None: any M).

    Attributes:
        m_below: Upper bound of M, exclusive; rising within a pass, None for the last.
        kernel: Name of the kernel; `high_precision.bf16` leaves the pass as it is.
        spec_a: How operand A is cast.
        spec_b: How operand B is cast.
        reason: Why this kernel.
    """

    m_below: int | None
    kernel: str
    spec_a: OperandSpec
    spec_b: OperandSpec
    reason: str


class SitePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The three passes of one site; each pass has one to four choices in rising m_below."""

    name: str
    n: int
    k: int
    bias: bool
    fwd: tuple[Choice, ...]
    dgrad: tuple[Choice, ...]
    wgrad: tuple[Choice, ...]

    def choices(self, pass_: Pass) -> tuple[Choice, ...]:
        """The choices of one pass."""
        return {Pass.FWD: self.fwd, Pass.DGRAD: self.dgrad, Pass.WGRAD: self.wgrad}[pass_]


class Rejected(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"pass_": "pass"}
):
    """A candidate that was not taken. `spec_a`, `spec_b` are recipe keys."""

    site: str
    pass_: Pass
    kernel: str
    spec_a: str
    spec_b: str
    reason: str


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the plan should give; None where it was not measured.

    Attributes:
        saved_us: Time saved in one step.
        delta_ne: Relative change of the loss.
        se: Its standard error.
        note: What the prediction rests on.
    """

    saved_us: float | None
    delta_ne: float | None
    se: float | None
    note: str


class Override(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"pass_": "pass"}
):
    """A pin or a hand's edit, and what the planner would have taken."""

    site: str
    pass_: Pass
    kernel: str
    instead_of: str
    by: str


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of `plan.json`.

    Attributes:
        requirement: What the plan had to keep.
        basis: `accuracy` (no times were measured: the coarsest recipe that passes) or `time`.
        device: The machine the plan is for.
        model: Fingerprint of the model.
        sites: Every plannable site, in the model's order.
        unplanned: Site name to the reason why it cannot be planned.
        rejected: Every candidate that was not taken.
        predicted: What it should give.
        overrides: Pins and edits by hand.
        history: What happened to the plan, oldest first.
    """

    requirement: Requirement
    basis: str
    device: Device
    model: Fingerprint
    sites: tuple[SitePlan, ...]
    unplanned: dict[str, str]
    rejected: tuple[Rejected, ...]
    predicted: Predicted
    overrides: tuple[Override, ...] = ()
    history: tuple[str, ...] = ()

    def site(self, name: str) -> SitePlan | None:
        """The plan of one site, or None."""
        return next((s for s in self.sites if s.name == name), None)

    def __str__(self) -> str:
        """A table of site, pass, kernel and reason, in plain text."""
        return plan_text(self)
