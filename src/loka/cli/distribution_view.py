"""The distributions of one operand drawn with plain characters: 80 columns, no colour needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from loka.cli.distributions import FORMATS, QUANTILES, Fate, fate_of
from loka.numerics import HISTOGRAM_BINS, HISTOGRAM_MIN_EXPONENT

__all__ = ["distribution_parts", "history_lines"]

_BAR = 30  # characters of the fullest octave
_TAIL = 1e-4  # the smallest octaves that hold no more than this together are one line
_HISTORY_HEIGHT = 4
_RAMP = " .:-=+*#%@"


def distribution_parts(title: str, numbers: Mapping[str, Any], *, brief: bool = False) -> list[Any]:
    """Lines and tables that show one operand.

    Args:
        title: Which operand of which site.
        numbers: As `operand_numbers` gives them.
        brief: Three lines, where several sites are shown.
    """
    head = f"{title}: {numbers['rows']:,} rows of {numbers['features']:,} features"
    if numbers["nonfinite_rows"]:
        head += f" ({numbers['nonfinite_rows']:,} more not finite, left out)"
    if not numbers["rows"] or not numbers["features"]:
        return [f"{head}; nothing to show"]
    if brief:
        return [head, _share_lines(numbers)[0], *_shape_lines(numbers)]
    parts: list[Any] = [head, *_share_lines(numbers)]
    if numbers["exponents"]:
        parts.append(_octaves(numbers))
    parts += history_lines(numbers["amax_history"]["steps"], numbers["amax_history"]["amax"])
    if numbers["quantiles"]:
        parts.append(_quantiles(numbers["quantiles"]))
    return parts


def _share_lines(numbers: Mapping[str, Any]) -> list[str]:
    zero, negative = numbers["zero_share"], numbers["negative_share"]
    signs = f"  exact zeros {_percent(zero)}, below zero {_percent(negative)}"
    if zero < 1 and (negative == 0 or negative >= 1 - zero):
        signs += " (one sign: fast sums are biased)"
    lines = [signs]
    if numbers["amax"] > 0:
        lines.append(f"  largest magnitude {numbers['amax']:.4g}; at the one scale that fits it")
        for format_ in FORMATS:
            shares = numbers["formats"][str(format_)]
            lines.append(
                f"    {format_.upper()}: {_percent(shares['underflow'])} become zero, "
                f"{_percent(shares['subnormal'])} subnormal (octaves marked below)"
            )
    for name, title in (("row_amax_octaves", "rows"), ("feature_amax_octaves", "features")):
        spread = numbers[name]
        if spread is not None:
            line = f"  amax of {title}: 1 % 2^{spread['p1']:.0f}, half 2^{spread['p50']:.0f}, "
            line += f"99 % 2^{spread['p99']:.0f}: {spread['p99'] - spread['p1']:.0f} octaves"
            dead = int(spread.get("always_zero", 0))
            lines.append(line + (f"; {dead:,} always zero" if dead else ""))
    drift = numbers["drift"]
    if drift is not None:
        lines.append(
            f"  drift: exponents {drift['total_variation']:.3f} of 1, largest magnitude "
            f"{drift['amax_octaves']:+.1f} octaves"
        )
    return lines


def _shape_lines(numbers: Mapping[str, Any]) -> list[str]:
    """A character an octave, from the largest down: `@` is the fullest, a blank is empty."""
    if not numbers["exponents"]:
        return []
    total = sum(numbers["exponents"].values())
    shares = {int(e): n / total for e, n in numbers["exponents"].items()}
    shown, _ = _with_tail(shares)
    fullest, top = max(shares.values()), len(_RAMP) - 1
    marks = "".join(
        _RAMP[math.ceil(shares.get(e, 0.0) / fullest * top)] for e in range(max(shown), min(shown) - 1, -1)
    )
    return [f"  octaves of |x| from {_octave(max(shown))} |{marks}| down to {_octave(min(shown))}"]


def _percent(share: float) -> str:
    if share and share < 5e-5:
        return "< 0.01 %"
    return f"{100 * share:.2f} %"


def _octaves(numbers: Mapping[str, Any]) -> Table:
    """A line an octave, from the largest down, with what becomes of it in each format."""
    total = sum(numbers["exponents"].values())
    shares = {int(e): n / total for e, n in numbers["exponents"].items()}
    shown, tail = _with_tail(shares)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for title in ("|x| from", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for format_ in FORMATS:
        table.add_column(format_.upper(), no_wrap=True)
    fullest = max(shares.values())
    for exponent in range(max(shown), min(shown) - 1, -1):
        share = shares.get(exponent, 0.0)
        fates = [_word(fate_of(exponent, numbers["amax"], format_)) for format_ in FORMATS]
        table.add_row(_octave(exponent), _percent(share), _bar(share / fullest), *fates)
    if tail:
        fates = [_word(fate_of(max(tail), numbers["amax"], format_)) for format_ in FORMATS]
        table.add_row("less", _percent(sum(shares[e] for e in tail)), "", *fates)
    return table


def _octave(exponent: int) -> str:
    """The ends of the histogram are open."""
    if exponent == HISTOGRAM_MIN_EXPONENT:
        return f"below 2^{exponent + 1}"
    last = HISTOGRAM_MIN_EXPONENT + HISTOGRAM_BINS - 1
    return f"2^{exponent}" + (" and more" if exponent == last else "")


def _with_tail(shares: Mapping[int, float]) -> tuple[list[int], list[int]]:
    """The octaves to show, and those of the smallest magnitudes that are one line together."""
    rising = sorted(shares)
    held, count = 0.0, 0
    for exponent in rising[:-1]:
        held += shares[exponent]
        if held > _TAIL:
            break
        count += 1
    count = count if count > 1 else 0
    return rising[count:], rising[:count]


def _word(fate: Fate) -> str:
    if fate.zero >= 1:
        return "zero"
    if fate.zero > 0:
        return "part zero"
    return "" if fate.subnormal <= 0 else "subnormal"


def _bar(share: float, width: int = _BAR) -> str:
    length = round(share * width)
    return "#" * length if length or not share else "."


def history_lines(steps: Sequence[int], amax: Sequence[float]) -> list[str]:
    """The amax of the last observed steps as a small chart, one column a step; log scale."""
    known = [v for v in amax if v > 0]
    if len(known) < 2:
        return []
    low, high = math.log2(min(known)), math.log2(max(known))
    span = max(high - low, 1e-9)
    levels = [0 if v <= 0 else 1 + round((math.log2(v) - low) / span * (_HISTORY_HEIGHT - 1)) for v in amax]
    first, last = f"{steps[0]:,}", f"{steps[-1]:,}"
    lines = [f"  amax of the last {len(amax)} observed steps, {first} to {last}"]
    for height in range(_HISTORY_HEIGHT, 0, -1):
        label = {1: f"{min(known):.3g}", _HISTORY_HEIGHT: f"{max(known):.3g}"}.get(height, "")
        lines.append(f"{label:>10} |" + "".join("#" if level >= height else " " for level in levels))
    return [line.rstrip() for line in lines]


def _quantiles(features: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("feature", justify="right", no_wrap=True)
    for title in ("least", *(f"{100 * q:g} %" for q in QUANTILES), "largest"):
        table.add_column(title, justify="right", no_wrap=True)
    for feature in features:
        numbers = (feature["low"], *feature["values"], feature["high"])
        table.add_row(str(feature["feature"]), *(f"{v:.2g}" for v in numbers))
    return table
