"""The page of results is what the records give, and every record is a flat map of finite numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loka.artifacts import read_benchmark

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_the_page_is_generated_from_the_records() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/results_page.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.name)
def test_records_can_be_read(path: Path) -> None:
    assert read_benchmark(path).metrics
