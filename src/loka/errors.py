"""Every error that LoKA raises on purpose, and the shape of its message.

A message is one sentence (what, where, which value), then a line for each candidate where there are
several, a blank line and one `hint:`. The command line prints exactly this text and exits with
`exit_code`; a caller in Python catches the class.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ArtifactError",
    "DataError",
    "LokaError",
    "NoKernelError",
    "PlanMismatchError",
    "RequirementNotMetError",
    "UnknownNameError",
    "UsageError",
]


class LokaError(Exception):
    """Base of all LoKA errors.

    Args:
        what: One sentence: what is wrong, where, with which value.
        lines: One line for each candidate or offending item, shown indented.
        hint: What to do about it, shown last after `hint:`.
    """

    exit_code = 2

    def __init__(self, what: str, *, lines: Sequence[str] = (), hint: str | None = None) -> None:
        self.what = what
        self.lines = tuple(lines)
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [self.what, *(f"  {line}" for line in self.lines)]
        if self.hint:
            parts += ["", f"hint: {self.hint}"]
        return "\n".join(parts)


class UsageError(LokaError, ValueError):
    """An argument, option or call order that cannot work."""


class UnknownNameError(UsageError):
    """A name (model, kernel, site pattern, column, ...) that is not among those that exist."""


class DataError(LokaError, ValueError):
    """A file or row that cannot be read as what it should be."""


class ArtifactError(LokaError, ValueError):
    """A profile, plan, benchmark or statistics file that cannot be read or written."""


class PlanMismatchError(LokaError, ValueError):
    """A plan that was made for another model or another machine."""


class NoKernelError(LokaError, RuntimeError):
    """No kernel can run what was asked for by name."""


class RequirementNotMetError(LokaError, RuntimeError):
    """The work was done, and what was required of the result does not hold."""

    exit_code = 1


def unknown_name(kind: str, name: str, known: Sequence[str], *, where: str = "") -> UnknownNameError:
    """An `UnknownNameError` that lists what exists and suggests the nearest name."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    place = f" in {where}" if where else ""
    hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known) or 'none'}"
    if near and len(known) <= 40:
        hint += f" (known: {', '.join(known)})"
    return UnknownNameError(f"unknown {kind} `{name}`{place}", hint=hint)
