"""The static checks are tests too: what passes here passes in review."""

from __future__ import annotations

from running import run


def test_ruff_finds_nothing() -> None:
    run("-m", "ruff", "check", "--no-cache", "--output-format", "concise", ".")


def test_everything_is_formatted() -> None:
    run("-m", "ruff", "format", "--no-cache", "--check", ".")


def test_types_hold_in_strict_mode() -> None:
    run("-m", "mypy")
