"""Choose the shapes that `loka bench gemm` times by default, from a table of published models' products.

    python benchmarks/select_gemm_shapes.py TABLE src/loka/bench/shapes.csv

The table has a line a product and the columns model, kind, op, batch, count, M, N, K. Batched products are
left out: they multiply activations with activations. The rule, which decides everything:

1. Every narrow kind (Wukong's LCB, FM projection and residual, whose rows are batch times width) of every
   model gives the one shape on which the model spends the most arithmetic (count x M x N x K).
2. Every model's linear layers give theirs, in the order of the table; then every model its next one; and so
   on, until there are 64 shapes. A shape that is taken already is passed over.
3. The two end points that were published for such products are added:
   (2048, 256) @ (256, 768) and (2048, 123200) @ (123200, 1024).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

LISTED = 64
END_POINTS = ((2048, 768, 256), (2048, 1024, 123200))

Shape = tuple[int, int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with args.table.open(newline="") as lines:
        rows = [r for r in csv.DictReader(lines) if r["op"] == "fwd" and r["batch"] == "1"]
    models: dict[Shape, list[str]] = {}
    for row in rows:
        named = models.setdefault(_shape(row), [])
        if row["model"] not in named:
            named.append(row["model"])
    for shape in END_POINTS:
        models.setdefault(shape, []).append("end_point")
    chosen = sorted({*_chosen(rows), *END_POINTS})
    text = "".join(f"{m},{n},{k},{' '.join(models[m, n, k])}\n" for m, n, k in chosen)
    head = (
        "# M rows, N out and K in features of the linear layers that `loka bench gemm` times by default.\n"
        "# Chosen by benchmarks/select_gemm_shapes.py, which says how.\n"
        "m,n,k,models\n"
    )
    args.out.write_text(head + text, encoding="utf-8")
    print(f"{len(chosen)} shapes of {len({m for s in chosen for m in models[s]})} models")


def _shape(row: dict[str, str]) -> Shape:
    return int(row["M"]), int(row["N"]), int(row["K"])


def _chosen(rows: list[dict[str, str]]) -> list[Shape]:
    groups: dict[tuple[str, str], dict[Shape, int]] = {}
    for row in rows:
        work = groups.setdefault((row["model"], row["kind"]), {})
        m, n, k = shape = _shape(row)
        work[shape] = work.get(shape, 0) + int(row["count"]) * m * n * k
    ranked = {g: sorted(work, key=lambda s: (-work[s], s)) for g, work in groups.items()}
    taken: list[Shape] = []
    for (_, kind), queue in ranked.items():
        if kind != "linear":
            _take(queue, taken)
    queues = [queue for (_, kind), queue in ranked.items() if kind == "linear"]
    while any(queues) and len(taken) < LISTED:
        for queue in queues:
            if len(taken) < LISTED:
                _take(queue, taken)
    return taken


def _take(queue: list[Shape], taken: list[Shape]) -> None:
    """Move the first shape that is not taken yet."""
    while queue:
        shape = queue.pop(0)
        if shape not in taken:
            taken.append(shape)
            return


if __name__ == "__main__":
    main()
