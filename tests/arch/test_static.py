"""The static checks are tests too: what passes here passes in review."""

from __future__ import annotations

from running import ROOT, run


def test_ruff_finds_nothing() -> None:
    run("-m", "ruff", "check", "--no-cache", "--output-format", "concise", ".")


def test_everything_is_formatted() -> None:
    run("-m", "ruff", "format", "--no-cache", "--check", ".")


def test_types_hold_in_strict_mode() -> None:
    run("-m", "mypy")


def test_the_hooks_of_pre_commit_are_well_formed_and_download_nothing() -> None:
    run("-m", "pre_commit", "validate-config", ".pre-commit-config.yaml")
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert {line.split()[-1] for line in text.splitlines() if "repo:" in line} == {"local"}
    assert {line.split()[-1] for line in text.splitlines() if "language:" in line} == {"system"}
