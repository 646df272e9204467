"""A profile's body of version 1 made one of version 2. Works on plain JSON values, before any check."""

from __future__ import annotations

from typing import Any

__all__ = ["upgrade_profile"]

_WITH_INTERVAL = ("rel_err", "row_p50", "row_p99", "row_max", "bias", "mere", "underflow", "saturation")


def upgrade_profile(body: dict[str, Any]) -> dict[str, Any]:
    """Version 1 did not say which kernel was tried, counted no bad rows and kept one interval, SQNR's.

    What is malformed stays so, for the reader to refuse by its own name. rel_err follows from SQNR, which was
    averaged in dB: 10^(-dB / 20) is the geometric mean over observations, not the arithmetic one.

    Args:
        body: Plain dicts and lists.

    Returns:
        The body of version 2; the given one is left as it was.
    """
    return body | {
        name: filled(body[name])
        for name, filled in (("sites", _sites), ("errors", _errors))
        if isinstance(body.get(name), dict)
    }


def _sites(table: dict[str, Any]) -> dict[str, Any]:
    return table | {"nonfinite_rows": [0] * _rows(table, "name")}


def _errors(table: dict[str, Any]) -> dict[str, Any]:
    rows = _rows(table, "site")
    added: dict[str, list[Any]] = {"kernel": [""] * rows, "m": [0] * rows}
    added |= {f"{name}_half": [0.0] * rows for name in _WITH_INTERVAL}
    levels = {name: _numbers(table.get(name), rows) for name in ("sqnr_db", "sqnr_db_low", "sqnr_db_high")}
    added["rel_err"] = [_relative(db) for db in levels["sqnr_db"]]
    ends = zip(levels["sqnr_db_low"], levels["sqnr_db_high"], strict=True)
    added["rel_err_half"] = [abs(_relative(low) - _relative(high)) / 2 for low, high in ends]
    return table | added


def _rows(table: dict[str, Any], column: str) -> int:
    values = table.get(column)
    return len(values) if isinstance(values, list) else 0


def _numbers(column: Any, rows: int) -> list[float]:
    """As many numbers as the table has rows; 0 where the file holds none, which the reader will refuse."""
    found = column if isinstance(column, list) else []
    numbers = [float(v) if type(v) in (int, float) else 0.0 for v in found[:rows]]
    return numbers + [0.0] * (rows - len(numbers))


def _relative(db: float) -> float:
    bounded: float = 10.0 ** (-max(-300.0, min(300.0, db)) / 20)
    return bounded
