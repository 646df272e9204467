"""A profile for people: a line a site, and every measured error of some sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from loka.artifacts import Profile
from loka.cli.output import cell
from loka.sites import check_site_patterns, matches
from loka.vocab import RECIPES, Pass, Site

__all__ = ["errors_table", "matching", "profile_rows", "site_rows", "sites_table"]

_SHOWN = ("tensorwise", "rowwise")
Row = dict[str, Any]


def matching(names: Sequence[str], pattern: str) -> list[str]:
    """The names that a glob pattern matches.

    Raises:
        UnknownNameError: where it matches none.
    """
    check_site_patterns([pattern], names)
    return [name for name in names if matches(name, [pattern])]


def profile_rows(profile: Profile, names: Sequence[str]) -> list[Row]:
    """The rows of the error table at these sites, column to value."""
    table = profile.errors
    columns = dict(zip(table.__struct_encode_fields__, table.__struct_fields__, strict=True))
    wanted = set(names)
    return [
        {shown: getattr(table, field)[i] for shown, field in columns.items()}
        for i in range(len(table))
        if table.site[i] in wanted
    ]


def site_rows(profile: Profile) -> list[Row]:
    """A row a site: its product, its share of all GEMM FLOPs, and the live errors of the plain recipes."""
    sites = profile.sites.sites()
    total = sum(site.flops for site in sites) or 1
    errors: dict[tuple[Any, ...], Row] = {}
    for row in profile_rows(profile, [site.name for site in sites]):
        key = (row["site"], row["pass"], row["spec_a"], row["spec_b"])
        if row["accumulation"] == "exact" and (row["source"] == "live" or key not in errors):
            errors[key] = row
    return [_site_row(site, site.flops / total, errors) for site in sites]


def _site_row(site: Site, share: float, errors: Mapping[tuple[Any, ...], Row]) -> Row:
    row: Row = {
        "site": site.name,
        "kind": site.kind,
        "m": site.rows,
        "n": site.n,
        "k": site.k,
        "flops_share": share,
        "not_planned": site.not_planned,
    }
    for pass_ in Pass:
        for recipe in _SHOWN:
            product = RECIPES[recipe].product(pass_)
            found = errors.get((site.name, pass_, product.a.recipe_key, product.b.recipe_key))
            row[f"{pass_}_{recipe}"] = (
                None if found is None else {k: found[k] for k in ("sqnr_db", "row_p99", "source")}
            )
    return row


def sites_table(rows: Sequence[Row]) -> Table:
    """`site_rows` as a table."""
    table = Table(title="sites: SQNR in dB, tensorwise / rowwise", title_justify="left")
    table.add_column("site", no_wrap=True)
    table.add_column("kind")
    for title in ("M x N x K", "FLOPs", *(f"{p} dB" for p in Pass), "row error p99"):
        table.add_column(title, justify="right")
    table.add_column("not planned")
    for row in rows:
        levels = [
            _pair([row[f"{pass_}_{recipe}"] for recipe in _SHOWN], "sqnr_db", "{:.1f}") for pass_ in Pass
        ]
        worst = [_worst(row, recipe) for recipe in _SHOWN]
        table.add_row(
            row["site"],
            row["kind"],
            f"{row['m']}x{row['n']}x{row['k']}",
            f"{100 * row['flops_share']:.1f} %",
            *levels,
            _pair(worst, "row_p99", "{:.3f}"),
            cell(row["not_planned"]),
        )
    table.caption = "M x N x K of the forward pass; FLOPs: share of all GEMMs; row error: the worst pass"
    table.caption_justify = "left"
    return table


def _worst(row: Row, recipe: str) -> Row | None:
    found = [row[f"{pass_}_{recipe}"] for pass_ in Pass]
    known = [f for f in found if f is not None]
    return max(known, key=lambda f: f["row_p99"]) if known else None


def _pair(found: Sequence[Row | None], name: str, form: str) -> str:
    if all(f is None for f in found):
        return "-"
    return " / ".join("-" if f is None else form.format(f[name]) for f in found)


def errors_table(rows: Sequence[Row], title: str) -> Table:
    """Every measured error of one site."""
    table = Table(title=title, title_justify="left")
    for name in ("pass", "recipe", "sums", "source"):
        table.add_column(name)
    for name in ("SQNR dB", "90 %", "row p50", "row p99", "row max", "underflow", "saturated", "seen"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["pass"]),
            f"{row['spec_a']} x {row['spec_b']}",
            row["accumulation"],
            row["source"],
            f"{row['sqnr_db']:.2f}",
            f"{row['sqnr_db_low']:.2f} .. {row['sqnr_db_high']:.2f}",
            *(f"{row[name]:.4f}" for name in ("row_p50", "row_p99", "row_max")),
            *(f"{100 * row[name]:.3f} %" for name in ("underflow", "saturation")),
            str(row["observations"]),
        )
    return table
