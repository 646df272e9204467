"""What the trials of one kernel have shown, and how one of them is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.kernels.protocol import Kernel
from loka.kernels.vetting.operands import PlacedOperand
from loka.kernels.vetting.poison import poison_free_memory
from loka.kernels.vetting.verdict import Trial, Verdict
from loka.numerics import torch_dtype
from loka.timing import DeviceLostError, check_device
from loka.vocab import GemmProblem

__all__ = ["LARGE", "Notes", "output_of"]

LARGE = 2**24
_MOST_REASONS = 3


@dataclass(slots=True)
class Notes:
    """What the trials have shown so far.

    Attributes:
        kernel: Under test.
        where: Runs there.
        wrong: Trials that went wrong, and how.
        differs: Trials whose runs differed.
        remarks: What is neither.
        checked: Every trial that was compared, in words.
        rows: Error of the worst row, by trial.
        columns: Error of the worst column, by trial.
        rel_err: See `Verdict`.
        one_sign_error: See `Verdict`.
        fp32_error: See `Verdict`.
    """

    kernel: Kernel
    where: torch.device
    wrong: list[tuple[Trial, str]] = field(default_factory=list)
    differs: list[tuple[Trial, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)
    columns: list[float] = field(default_factory=list)
    rel_err: float | None = None
    one_sign_error: float | None = None
    fp32_error: float | None = None

    def runs(self, trial: Trial, call: Callable[[], object]) -> bool:
        """Whether the call returns; what it raises is a finding.

        Raises:
            DeviceLostError: where the GPU answers nothing any more.
        """
        try:
            call()
        except DeviceLostError:
            raise  # nothing more can be found out in this process
        # What torch, Triton and the libraries raise for arguments and launches that they refuse.
        except (RuntimeError, ValueError, TypeError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            self.wrong.append((trial, f"raised {type(error).__name__}: {first[:200]}"))
            check_device(self.where, culprit=self.kernel.name, reason=first[:200])
            return False
        return True

    def verdict(self, problem: GemmProblem) -> Verdict:
        """All of it; trials other than the problem itself are named in the reason."""
        plain = Trial(problem, out_dtype=problem.out_dtype)
        # Runs that differ go first: they are named even where the list of faults is long.
        found = [*self.differs[:1], *self.wrong, *self.differs[1:]]
        texts = [text if trial == plain else f"{trial}: {text}" for trial, text in found]
        texts += self.remarks
        more = len(texts) - _MOST_REASONS
        shown = texts[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else [])
        return Verdict(
            ok=not self.wrong,
            reason="; ".join(shown),
            deterministic=not self.differs,
            rel_err=self.rel_err,
            worst_row=max(self.rows, default=None),
            worst_column=max(self.columns, default=None),
            one_sign_error=self.one_sign_error,
            fp32_error=self.fp32_error,
            checked=tuple(self.checked),
            failed=(self.wrong or self.differs)[0][0] if found else None,
        )


def output_of(
    notes: Notes, trial: Trial, a: PlacedOperand, b: PlacedOperand, bias: Tensor | None = None
) -> Tensor | None:
    """The result of one call in poisoned memory; None where it is no result at all, which is noted."""
    dtype, (m, n) = torch_dtype(trial.out_dtype), (trial.problem.m, trial.problem.n)
    poison_free_memory(m, n, dtype.itemsize, notes.where)
    outs: list[Tensor] = []
    call = notes.kernel.matmul
    if not notes.runs(trial, lambda: outs.append(call(a.full, b.full, out_dtype=dtype, bias=bias))):
        return None
    out = outs[0]
    if tuple(out.shape) != (m, n) or out.dtype != dtype:
        found, needed = f"{out.dtype} {tuple(out.shape)}", f"{dtype} {(m, n)}"
        notes.wrong.append((trial, f"the output is {found}, not {needed}"))
        return None
    count = _nonfinite(out)
    if count:
        text = f"non-finite output on finite operands ({count} of {out.numel()} elements)"
        notes.wrong.append((trial, text))
        return None
    return out


def _nonfinite(out: Tensor) -> int:
    """How many elements are NaN or infinite; in parts, since the question needs memory of its own."""
    counts = [(~torch.isfinite(part)).sum() for part in out.flatten().split(LARGE)]
    return int(torch.stack(counts).sum()) if counts else 0
