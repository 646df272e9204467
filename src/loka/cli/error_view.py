"""Every measured error of one site: live beside sampled, kernel by kernel, with intervals; and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from loka.artifacts import Profile
from loka.cli.output import cell
from loka.vocab import Pass

__all__ = ["error_parts", "loss_rows", "loss_table"]

_BAR_DB = 4.0  # a character of a bar
_SHOWN_DB = 60.0
Row = Mapping[str, Any]


def error_parts(title: str, rows: Sequence[Row]) -> list[Any]:
    """Two tables with the same numbered lines, each narrow enough for 80 columns: SQNR, then all else.

    Args:
        title: Which site.
        rows: Rows of the profile's error table at one site, column to value.
    """
    ordered = _ordered(rows)
    return [
        f"errors {title}: SQNR in dB with its 90 % interval, # = {_BAR_DB:g} dB",
        _levels(ordered),
        "by line, in %: relative error of the product and of its rows, elements that",
        "become zero or are clamped; bias: mean signed error (intervals: --json)",
        _details(ordered),
    ]


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """By pass and recipe, real rows before drawn ones, then by kernel and M."""
    passes = [str(pass_) for pass_ in Pass]
    recipes = list(dict.fromkeys((row["spec_a"], row["spec_b"], row["accumulation"]) for row in rows))

    def place(row: Row) -> tuple[int, int, bool, str, int]:
        recipe = (row["spec_a"], row["spec_b"], row["accumulation"])
        return (
            passes.index(str(row["pass"])),
            recipes.index(recipe),
            row["source"] != "live",
            row["kernel"],
            row["m"],
        )

    return sorted(rows, key=place)


def _names(row: Row) -> tuple[str, str, str]:
    """Pass; what was run; where its rows came from."""
    name = row["kernel"]
    if not name:  # a profile of version 1 knows the recipe only
        name = f"{row['spec_a']} x {row['spec_b']}" + (" fast" if row["accumulation"] == "fast" else "")
    elif row["spec_a"].startswith("e5m2"):
        name += f" ({row['spec_a'].partition('.')[0]})"
    if row["m"]:
        name += f" M={row['m']}"
    return str(row["pass"]), name, row["source"]


def _levels(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, collapse_padding=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    table.add_column("rows", no_wrap=True)
    for title in ("dB", "+-"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    last = ("", "")
    for number, row in enumerate(rows, 1):
        pass_, name, source = _names(row)
        half = (row["sqnr_db_high"] - row["sqnr_db_low"]) / 2
        again = (pass_, name) == last
        table.add_row(
            str(number),
            "" if again else pass_,
            "" if again else cell(name),
            source,
            f"{row['sqnr_db']:.2f}",
            f"{half:.2f}" if row["observations"] > 1 else "?",  # one observation has no spread
            "#" * round(min(_SHOWN_DB, max(0.0, row["sqnr_db"])) / _BAR_DB),
        )
        last = (pass_, name)
    return table


def _details(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, collapse_padding=True)
    for title in ("", "rel", "+-", "p50", "p99", "max", "bias", "MERE", "zero", "clamp"):
        table.add_column(title, justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number),
            *(_percent(row[name]) for name in ("rel_err", "rel_err_half", "row_p50", "row_p99", "row_max")),
            f"{row['bias']:+.0e}",
            f"{row['mere']:.2g}",
            _percent(row["underflow"]),
            _percent(row["saturation"]),
        )
    return table


def _percent(share: float) -> str:
    """In a few characters."""
    percent = 100 * share
    if percent >= 1000:
        return f"{percent:.0e}"
    return "<.01" if 0 < percent < 0.005 else f"{percent:.2f}" if percent < 100 else f"{percent:.0f}"


def loss_rows(profile: Profile, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the table of the loss at these sites, column to value."""
    table = profile.loss
    columns = dict(zip(table.__struct_encode_fields__, table.__struct_fields__, strict=True))
    return [
        {shown: getattr(table, field)[i] for shown, field in columns.items()}
        for i in range(len(table))
        if table.site[i] in set(names)
    ]


def loss_table(rows: Sequence[Row]) -> Table:
    """What one switch does to the loss, relative, with its standard error."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("pass", no_wrap=True)
    table.add_column("recipe", overflow="fold")
    for title in ("change of loss", "se", "in se"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("method", overflow="fold")
    for row in rows:
        sigmas = f"{row['delta_ne'] / row['se']:+.1f}" if row["se"] > 0 else "-"
        table.add_row(
            str(row["pass"]),
            f"{row['spec_a']} x {row['spec_b']}",
            f"{row['delta_ne']:+.2e}",
            f"{row['se']:.1e}",
            sigmas,
            cell(row["method"]),
        )
    return table
