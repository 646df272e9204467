"""Run a program as a person would, and show all it said when it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, cwd: Path = ROOT) -> str:
    """Run with this Python interpreter; returns stdout, fails the test with both streams otherwise."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=280
    )
    if done.returncode:
        shown = " ".join(arguments)
        raise AssertionError(f"`python {shown}` ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def repository_files(*suffixes: str) -> list[Path]:
    """The files of the repository with one of these suffixes, without what is built or installed."""
    skipped = {"site", "build", "dist", "data", "runs"}
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.suffix in suffixes
        and not any(part.startswith(".") and part != ".ci" for part in path.relative_to(ROOT).parts)
        and path.relative_to(ROOT).parts[0] not in skipped
        and not any(part.endswith(".egg-info") for part in path.parts)
    )
