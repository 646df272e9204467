"""Write docs/results.md from the records in benchmarks/results/. The page is generated, never typed.

python scripts/results_page.py            # write the page
python scripts/results_page.py --check    # exit 1 if the page is not what the records give
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from loka.artifacts import BENCHMARK, read_envelope

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"

HEAD = """# Results

Every number here comes from a record under `benchmarks/results/`, with the machine, the versions and the
commit that gave it. This page is written by `scripts/results_page.py`, and a test holds it to the records.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(path) for path in sorted(RECORDS.glob("*.json")))])


def _section(path: Path) -> str:
    envelope = read_envelope(path, BENCHMARK)
    environment = envelope.environment
    device = ", ".join(environment.devices) or f"CPU, {environment.cpu_count} cores"
    about = {
        "device": device,
        "torch": environment.torch,
        "CUDA": environment.cuda,
        "Python": environment.python,
        "commit": environment.commit,
        "taken": envelope.created,
    }
    lines = [f"## {path.name}", "", "; ".join(f"{k} {v}" for k, v in about.items() if v), ""]
    lines += ["| metric | value |", "|---|--:|"]
    lines += [f"| `{name}` | {_number(value)} |" for name, value in sorted(envelope.body.metrics.items())]
    lines += ["", *_notes(envelope.body.details)]
    return "\n".join(lines)


def _notes(details: Any) -> list[str]:
    notes = details.get("notes", []) if isinstance(details, dict) else []
    return [f"- {note}" for note in notes] + [""] * bool(notes)


def _number(value: float) -> str:
    whole = float(value).is_integer() or abs(value) >= 1e5
    return f"{value:,.0f}" if whole else f"{value:,.5g}"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        if not same:
            print(f"{PAGE} is not what the records give; run {sys.argv[0]}", file=sys.stderr)
        return 0 if same else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
