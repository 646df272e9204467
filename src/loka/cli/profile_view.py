"""A profile for people: a line a site, what observing cost, rows that were not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from loka.artifacts import Profile
from loka.artifacts.profile import Overhead
from loka.cli.output import cell
from loka.sites import check_site_patterns, matches
from loka.vocab import RECIPES, Pass, Site

__all__ = ["matching", "nonfinite_lines", "overhead_text", "profile_rows", "site_rows", "sites_table"]

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
    bad = dict(zip(profile.sites.name, profile.sites.nonfinite_rows, strict=True))
    return [_site_row(site, site.flops / total, bad[site.name], errors) for site in sites]


def _site_row(site: Site, share: float, nonfinite: int, errors: Mapping[tuple[Any, ...], Row]) -> Row:
    row: Row = {
        "site": site.name,
        "kind": site.kind,
        "m": site.rows,
        "n": site.n,
        "k": site.k,
        "flops_share": share,
        "nonfinite_rows": nonfinite,
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
    """`site_rows` as a table that fits 80 columns; what cannot be planned has its reason below its name."""
    table = Table(title="sites: SQNR in dB, tensorwise/rowwise", title_justify="left", box=box.SIMPLE_HEAD)
    table.collapse_padding, table.show_edge = True, False
    table.add_column("site", overflow="fold")
    for title in ("M x N x K", "FLOPs", *(f"{p} dB" for p in Pass), "row p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        levels = [
            _pair([row[f"{pass_}_{recipe}"] for recipe in _SHOWN], "sqnr_db", "{:.1f}") for pass_ in Pass
        ]
        worst = [_worst(row, recipe) for recipe in _SHOWN]
        reason = f" ({row['not_planned']})" if row["not_planned"] else ""
        table.add_row(
            cell(row["site"] + reason),
            f"{row['m']}x{row['n']}x{row['k']}",
            f"{100 * row['flops_share']:.1f} %",
            *levels,
            _pair(worst, "row_p99", "{:.2f}"),
        )
    table.caption = "M x N x K of the forward pass; FLOPs: share of all GEMMs; row p99: the worst pass"
    table.caption_justify = "left"
    return table


def _worst(row: Row, recipe: str) -> Row | None:
    found = [row[f"{pass_}_{recipe}"] for pass_ in Pass]
    known = [f for f in found if f is not None]
    return max(known, key=lambda f: f["row_p99"]) if known else None


def _pair(found: Sequence[Row | None], name: str, form: str) -> str:
    if all(f is None for f in found):
        return "-"
    return "/".join("-" if f is None else form.format(f[name]) for f in found)


def overhead_text(overhead: Overhead | None) -> str:
    """What observing cost the training, in one line."""
    if overhead is None:
        return "observing: not clocked (train for more steps)"
    kinds = (("an observed one", overhead.observed_step_us), ("one with live errors", overhead.full_step_us))
    seen = [f"{title} {us / 1000:.3g} ms" for title, us in kinds if us is not None]
    percent = f"{overhead.percent:,.0f}" if overhead.percent >= 100 else f"{overhead.percent:.2g}"
    return (
        f"observing one step in {overhead.every} makes the training {percent} % longer: a plain "
        f"step takes {overhead.plain_step_us / 1000:.3g} ms, {', '.join(seen) or 'none was observed'}"
    )


def nonfinite_lines(profile: Profile) -> list[str]:
    """A line for each site whose activations or gradients held rows that are not finite."""
    return [
        f"warning: {rows:,} rows at {name} held a NaN or an infinity; they are in no statistics"
        for name, rows in zip(profile.sites.name, profile.sites.nonfinite_rows, strict=True)
        if rows
    ]
