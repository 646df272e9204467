"""The record of `loka bench gemm` with the commit given by hand, where there is no checkout.

    python benchmarks/gemm_h200.py --out gemm_h200.json --commit HASH [--resume]

Measures the committed list of shapes in every pass; see `loka bench gemm --help`.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from loka.bench import GemmBench, PairResult, bench_gemm, read_shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where the checkout does not say")
    parser.add_argument("--shapes", type=Path, help="CSV with m,n,k; the committed list if not given")
    parser.add_argument("--kernels", default="", help="patterns, apart by commas")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile and vet first")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms %(message)s")
    chosen = {} if args.shapes is None else {"shapes": read_shapes(args.shapes)}
    settings = GemmBench(
        **chosen,
        kernels=tuple(pattern for pattern in args.kernels.split(",") if pattern),
        rounds=args.rounds,
        device=args.device,
    )
    begun = time.monotonic()

    def tell(done: int, total: int, last: PairResult | None) -> None:
        if last is not None:
            logging.info(
                "%d of %d, %.0f s, %s: %s", done, total, time.monotonic() - begun, last.key, last.pick
            )

    result = bench_gemm(
        settings,
        record=args.out,
        resume=args.resume,
        overwrite=args.overwrite,
        commit=args.commit,
        workers=args.workers,
        on_pair=tell,
    )
    for name, value in result.metrics.items():
        if "speedup@" not in name:
            print(f"{name:48} {value:.6g}")


if __name__ == "__main__":
    main()
