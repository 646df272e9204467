"""A profile as plain text: what `print(profile)` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loka.vocab import Pass

if TYPE_CHECKING:
    from loka.artifacts.profile import Profile

__all__ = ["profile_text"]

_RECIPE = "e4m3.tensorwise"  # the coarsest: what it does not ruin, nothing finer does


def profile_text(profile: Profile) -> str:
    """A headline, a line a site, and what else is in it."""
    errors, loss = profile.errors, profile.loss
    lines = [
        f"profile of {len(profile.sites)} sites on {profile.device.name}: {profile.steps_observed} of "
        f"{profile.steps_seen} steps observed, {len(errors)} errors, {len(profile.products)} products and "
        f"{len(profile.casts)} casts timed, {len(loss)} changes of the loss",
        "",
    ]
    known = {
        (site, pass_): db
        for site, pass_, a, b, accumulation, source, db in zip(
            errors.site,
            errors.pass_,
            errors.spec_a,
            errors.spec_b,
            errors.accumulation,
            errors.source,
            errors.sqnr_db,
            strict=True,
        )
        if (a, b, accumulation, source) == (_RECIPE, _RECIPE, "exact", "live")
    }
    rows = [("site", "M x N x K", *(f"{pass_} dB" for pass_ in Pass))]
    for site in profile.sites.sites():
        levels = [known.get((site.name, pass_)) for pass_ in Pass]
        shown = ["-" if db is None else f"{db:.1f}" for db in levels]
        rows.append((site.name or "(model)", f"{site.rows}x{site.n}x{site.k}", *shown))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        numbers = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers]))
    lines += ["", "dB: SQNR of tensorwise E4M3 on real rows; `profile.errors.records()` has every recipe"]
    lines += [f"note: {note}" for note in profile.notes]
    return "\n".join(lines)
