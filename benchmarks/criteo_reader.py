"""How fast, and in how much memory, the Criteo reader reads.

Writes a file of N rows made from a seed, with Criteo's missing rates and skew, reads its training split once
through `open_source`, as a training run does, and prints rows a second (of the file, all splits) and the peak
resident memory of the reading process.

    python benchmarks/criteo_reader.py --rows 1000000
    python benchmarks/criteo_reader.py --rows 40000000 --keep /data/criteo.tsv     # about 10 GB
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loka.artifacts import write_benchmark
from loka.recsys.data.lines import line_blocks

_ROWS_AT_ONCE = 20_000
_DISTINCT_ROWS = 400_000  # after these the text repeats: making it is slower than reading it
# Roughly those of the public sample: I1, I10, I12 and C22 are mostly empty.
_INT_MISSING = (0.45, 0.0, 0.2, 0.2, 0.05, 0.25, 0.05, 0.0, 0.05, 0.45, 0.05, 0.77, 0.2)
_CAT_MISSING = {18: 0.44, 19: 0.44, 21: 0.82, 24: 0.44, 25: 0.44}


def write_criteo(path: Path, *, rows: int, seed: int, packed: bool) -> None:
    """A Criteo file of `rows` lines; the same seed writes the same text."""
    made: list[bytes] = []
    texts = criteo_text(min(rows, _DISTINCT_ROWS), seed)
    with gzip.open(path, "wb", compresslevel=1) if packed else path.open("wb") as file:
        for start in range(0, rows, _ROWS_AT_ONCE):
            text = next(texts, None)
            if text is None:
                text = made[start // _ROWS_AT_ONCE % len(made)]
            else:
                made.append(text)
            lines = min(_ROWS_AT_ONCE, rows - start)
            file.write(text if lines == _ROWS_AT_ONCE else b"".join(text.splitlines(keepends=True)[:lines]))


def criteo_text(rows: int, seed: int) -> Iterator[bytes]:
    """The lines, 20,000 at a time."""
    rng = np.random.default_rng(seed)
    for start in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - start)
        columns: list[list[str]] = [[str(v) for v in rng.integers(0, 2, count)]]
        for missing in _INT_MISSING:
            values = np.exp(rng.normal(1.5, 2.0, count)).astype(np.int64) - 1
            columns.append([str(v) for v in values])
            _blank(columns[-1], rng.random(count) < missing)
        for field in range(26):
            ranks = np.minimum(rng.zipf(1.2, count), 2**31).astype(np.uint64)
            columns.append([f"{v:08x}" for v in ((ranks * 2654435761 + field) & 0xFFFFFFFF).tolist()])
            _blank(columns[-1], rng.random(count) < _CAT_MISSING.get(field, 0.01))
        yield "".join("\t".join(row) + "\n" for row in zip(*columns, strict=True)).encode()


def _blank(column: list[str], missing: np.ndarray) -> None:
    for i in np.flatnonzero(missing).tolist():
        column[i] = ""


def read(path: str, batch_size: int) -> dict[str, float]:
    """Read the training split once; run in a process of its own, so that memory is the reader's alone."""
    from loka.recsys.data import open_source
    from loka.recsys.source import Split

    before = peak_rss_bytes()
    source = open_source(f"criteo:{path}")
    start, cpu_start = time.perf_counter(), time.process_time()
    batches, train_rows, last_row = 0, 0, 0
    for batch in source.batches(Split.TRAIN, batch_size):
        batches += 1
        train_rows += len(batch)
        last_row = int(batch.rows[-1])
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "batches": batches,
        "train_rows": train_rows,
        "last_train_row": last_row,
        "rss_before_bytes": before,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def peak_rss_bytes() -> int:
    """Most resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage's peak is handed down by the process that started this one; VmHWM begins anew.
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gzip", action="store_true", help="write and read a gzip file")
    parser.add_argument(
        "--keep", type=Path, help="write the file here (used again if it is there) and keep it"
    )
    parser.add_argument("--record", type=Path, help="write a JSON record of the measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = options.keep or Path(scratch) / ("day_0.gz" if options.gzip else "day_0.tsv")
        if not path.exists():
            write_criteo(path, rows=options.rows, seed=options.seed, packed=options.gzip)
        file_bytes = path.stat().st_size
        rows = sum(block.lines for block in line_blocks(path))  # a kept file may be of another size
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, maxtasksperchild=1) as pool:
            runs = [pool.apply(read, (str(path), options.batch_size)) for _ in range(options.repeats)]
    rates = sorted(rows / run["seconds"] for run in runs)
    metrics = {
        "rows": rows,
        "file_bytes": file_bytes,
        "rows_per_s_median": rates[len(rates) // 2],
        "rows_per_s_min": rates[0],
        "rows_per_s_max": rates[-1],
        # Tells a slow reader from a busy machine: with nothing else running it is below the rate above.
        "rows_per_cpu_s_max": rows / min(run["cpu_seconds"] for run in runs),
        "peak_rss_bytes_max": max(run["peak_rss_bytes"] for run in runs),
        "rss_before_bytes": min(run["rss_before_bytes"] for run in runs),
        "train_rows": runs[0]["train_rows"],
        "batch_size": options.batch_size,
        "gzip": float(options.gzip),
    }
    print(json.dumps(metrics, indent=2))
    if options.record:
        write_benchmark(options.record, metrics, {"seed": options.seed})


if __name__ == "__main__":
    main()
