"""How far single pairs (bf16 against planned) scatter: the noise that `loka run` prints beside one pair.

    python benchmarks/paired_noise.py --out OUT [--pairs 8] [--only dcnv2:adult]

Runs the main job with several pairs for each model and data, on the CPU, and writes `paired_noise_cpu.json`
(a benchmark record) and `paired_noise.json`, the table that the package carries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from loka.artifacts import write_benchmark
from loka.recsys import JobConfig, TrainConfig, run_job

CASES = {
    "dcnv2:adult": TrainConfig(batch_size=512, epochs=4),
    "dlrm:adult": TrainConfig(batch_size=512, epochs=4),
    "wukong:adult": TrainConfig(batch_size=512, epochs=2),
    "dcnv2:synthetic": TrainConfig(),
    "dlrm:synthetic": TrainConfig(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--only", action="append", choices=list(CASES), help="these cases alone; repeatable")
    args = parser.parse_args()
    rows, metrics, details = [], {}, {}
    for case in args.only or list(CASES):
        model, _, source = case.partition(":")
        train = CASES[case]
        with tempfile.TemporaryDirectory() as scratch:
            job = JobConfig(model=model, data=source, train=train, seeds=args.pairs)
            result = run_job(job, Path(scratch) / "job", bar=False)
        changes = [p.relative_ne_percent for p in result.comparison.tasks[0].pairs]
        known = [c for c in changes if c is not None]
        row = {
            "model": model,
            "preset": job.preset,
            "source": source,
            "batch_size": train.batch_size,
            "epochs": train.epochs,
            "pairs": len(known),
            "sd_percent": statistics.stdev(known),
            "mean_percent": statistics.fmean(known),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
        metrics |= {f"{name}@{case}": row[name] for name in ("sd_percent", "mean_percent", "pairs")}
        change = result.comparison.tasks[0].relative_ne_percent
        metrics |= {f"low_percent@{case}": change.low, f"high_percent@{case}": change.high}
        details[case] = {"job": job.identity(), "pairs_percent": changes}
        write_benchmark(args.out / "paired_noise_cpu.json", metrics, details)
        (args.out / "paired_noise.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
