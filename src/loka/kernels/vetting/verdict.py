"""What vetting says of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka.vocab import Format, GemmProblem, Support

__all__ = ["Data", "Trial", "Verdict"]


class Data(StrEnum):
    """What the operands of a trial hold."""

    TWO_SIGNED = "two_signed"
    ONE_SIGNED = "one_signed"


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of a kernel under test.

    Attributes:
        problem: Shape, pass and formats of the operands.
        data: What they hold.
        out_dtype: The format asked of the result.
        bias: Whether a bias is added.
    """

    problem: GemmProblem
    data: Data = Data.TWO_SIGNED
    out_dtype: Format = Format.BF16
    bias: bool = False

    def __str__(self) -> str:
        words = [self.problem.key]
        words += [] if self.out_dtype is self.problem.out_dtype else [f"{self.out_dtype} output"]
        words += ["with bias"] if self.bias else []
        words += ["one-signed data"] if self.data is Data.ONE_SIGNED else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found when a kernel was run on known operands.

    A nondeterministic kernel is not wrong: `ok` stays True and `reason` says that its runs differ. It is not
    for plans either: `support` says no to it.

    Attributes:
        ok: Every result was right within the limits.
        reason: What was found; empty where nothing was.
        deterministic: Repeated runs on the same operands were bitwise equal.
        rel_err: Relative L2 error on two-signed data at the problem's own shape, every row and column
            brought to one size.
        worst_row: Largest relative error of a row over all trials on two-signed data.
        worst_column: The same of a column.
        one_sign_error: Relative L2 error on data of one sign.
        fp32_error: Relative L2 error of an fp32 result where one was asked for beside a narrower one; above
            1e-3 the kernel rounds to 16 bits inside.
        checked: The trials, in words.
        failed: The first trial that went wrong or differed, for a script that shows it.
    """

    ok: bool
    reason: str = ""
    deterministic: bool = True
    rel_err: float | None = None
    worst_row: float | None = None
    worst_column: float | None = None
    one_sign_error: float | None = None
    fp32_error: float | None = None
    checked: tuple[str, ...] = ()
    failed: Trial | None = None

    @property
    def support(self) -> Support:
        """Whether a plan may use the kernel: right, and the same in every run."""
        return Support.yes() if self.ok and self.deterministic else Support.no(self.reason)
