"""One record of `fidelity.py` from those of several seeds.

    python benchmarks/fidelity_pool.py 2=seed2.json 3=seed3.json --seen 0=seed0.json --out fidelity_cpu.json

Unsuffixed metrics are of all places of the seeds named first, `.seedN` of each of them alone. Seeds that were
looked at while the distributions were being improved come behind `--seen`: they stand for themselves alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fidelity_shares import Record, metrics_of
from loka.artifacts import write_benchmark
from loka.artifacts.envelope import read_envelope
from loka.artifacts.records import BENCHMARK
from loka.vocab import Pass

HEADLINES = (
    "fidelity_percent_within_0.5db@live.fwd_dgrad",
    "fidelity_percent_within_0.5db@copula.fwd",
    "fidelity_percent_within_1db@copula.dgrad",
    "fidelity_percent_within_0.5db@normal.fwd",
    "fidelity_percent_within_1db@normal.dgrad",
    "fidelity_percent_within_0.5db@published.fwd",
    "fidelity_percent_within_1db@published.dgrad",
)
_FURTHEST = 20
NOTE = (
    "benchmarks/fidelity.py on a CPU: three trainings, emulated kernels. Unsuffixed metrics pool the seeds "
    "that nobody had looked at before the distributions were final. The {count} places where the copula is "
    "furthest off stand below; sites with fewer than 16 inputs or outputs count in `.all_sites` alone."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=_numbered, metavar="SEED=FILE")
    parser.add_argument("--seen", nargs="*", type=_numbered, default=[], metavar="SEED=FILE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    seeds = [seed for seed, _ in (*args.records, *args.seen)]
    if len(set(seeds)) < len(seeds):
        parser.error(f"a seed is named twice: {', '.join(map(str, sorted(seeds)))}")
    write_pool(dict(args.records), dict(args.seen), args.out)


def write_pool(blind: dict[int, Path], seen: dict[int, Path], out: Path) -> None:
    """Write the pooled record."""
    envelopes = {seed: read_envelope(path, BENCHMARK) for seed, path in (blind | seen).items()}
    found = {seed: _records(envelope.body.details["records"]) for seed, envelope in envelopes.items()}
    pooled = [record for seed in blind for record in found[seed]]
    metrics = metrics_of(pooled)
    for seed in sorted(found):
        alone = metrics_of(found[seed])
        metrics |= {f"{name}.seed{seed}": alone[name] for name in HEADLINES}
    details = {
        "note": NOTE.format(count=_FURTHEST),
        "seeds": {"pooled": sorted(blind), "seen while the distributions were improved": sorted(seen)},
        "commits": {str(seed): envelope.environment.commit for seed, envelope in envelopes.items()},
        "furthest_off": _furthest({seed: found[seed] for seed in blind}),
    }
    write_benchmark(out, metrics, details, environment=envelopes[next(iter(blind))].environment)


def _furthest(found: dict[int, list[Record]]) -> list[dict[str, object]]:
    """Of the sites that a plan may take to FP8, fwd and dgrad."""
    wide = [
        (abs(r.predicted_db["copula"] - r.real_db), seed, r)
        for seed, records in found.items()
        for r in records
        if not r.narrow and r.pass_ is not Pass.WGRAD
    ]
    ranked = sorted(wide, key=lambda entry: -entry[0])[:_FURTHEST]
    return [
        {
            "off_db": off,
            "seed": seed,
            "case": r.case,
            "look": r.look,
            "site": r.site,
            "pass": str(r.pass_),
            "recipe": r.recipe,
            "real_db": r.real_db,
            "spread_db": r.spread_db,
            "copula_db": r.predicted_db["copula"],
        }
        for off, seed, r in ranked
    ]


def _records(rows: object) -> list[Record]:
    if not isinstance(rows, list):
        raise SystemExit("error: a record of fidelity.py holds a list of places")
    return [Record(**{**row, "pass_": Pass(row["pass_"])}) for row in rows]


def _numbered(text: str) -> tuple[int, Path]:
    seed, _, path = text.partition("=")
    if not seed.isdecimal() or not path:
        raise argparse.ArgumentTypeError(f"`{text}` is not SEED=FILE, such as 2=seed2.json")
    return int(seed), Path(path)


if __name__ == "__main__":
    main()
