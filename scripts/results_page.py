"""Write docs/results.md from the records in benchmarks/results/. The page is generated, never typed.

python scripts/results_page.py            # write the page
python scripts/results_page.py --check    # exit 1 if the page is not what the records give
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from loka.artifacts import BENCHMARK, read_envelope

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"

_OF_A_PASS = re.compile(r"(\w+)@(\d+x\d+x\d+)\.(fwd|dgrad|wgrad)")

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
    metrics = envelope.body.metrics
    lines += ["| metric | value |", "|---|--:|"]
    lines += [f"| `{n}` | {_number(v)} |" for n, v in sorted(metrics.items()) if not _OF_A_PASS.fullmatch(n)]
    lines += ["", *_passes(metrics), *_notes(envelope.body.details)]
    return "\n".join(lines)


def _passes(metrics: dict[str, float]) -> list[str]:
    """Metrics named `NAME@MxNxK.PASS` as a table, a line a shape."""
    rows: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
    for name, value in metrics.items():
        found = _OF_A_PASS.fullmatch(name)
        if found:
            shape = tuple(int(size) for size in found[2].split("x"))
            rows.setdefault((found[1], shape), {})[found[3]] = value
    if not rows:
        return []
    lines = ["| metric | fwd | dgrad | wgrad |", "|---|--:|--:|--:|"]
    for (name, shape), values in sorted(rows.items()):
        cells = (_number(values[p]) if p in values else "" for p in ("fwd", "dgrad", "wgrad"))
        lines.append(f"| `{name}@{'x'.join(map(str, shape))}` | {' | '.join(cells)} |")
    return [*lines, ""]


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
