"""`loka bench gemm`: what is printed, what is refused, and the shapes of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loka.bench import GemmResult, KernelRow, PairResult
from loka.bench.summary import metrics_of
from loka.cli.bench_model import model_shapes
from loka.cli.bench_view import PairProgress, gemm_table, summary_lines
from loka.cli.main import command_line
from loka.recsys import open_source
from loka.recsys.models import build_model

BF16 = "high_precision.bf16"


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    file = tmp_path / "shapes.csv"
    file.write_text("m,n,k\n48,32,16\n")
    return file


def bench(*arguments: str) -> int:
    return command_line(["bench", "gemm", "--device", "cpu", "--rounds", "8", *arguments])


def test_a_table_on_stdout_and_a_record(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "gemm.json"
    assert bench("--shapes", str(shapes), "-o", str(record), "--passes", "wgrad, fwd") == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("│ 48x32x16")]
    assert [line.split("│")[2].strip() for line in lines] == ["fwd", "wgrad"]
    assert "of 2 pairs" in out
    assert f"written to {record}" in err
    assert bench("--shapes", str(shapes), "-o", str(record), "--passes", "wgrad,fwd") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert bench("--shapes", str(shapes), "-o", str(record), "--passes", "fwd,wgrad", "--resume") == 0
    assert command_line(["show", str(record)]) == 0


def test_json_is_one_document(shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--shapes", str(shapes), "--passes", "dgrad", "--kernels", "torch.row*", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["metrics"]["pairs"] == 1
    (pair,) = answer["pairs"]
    assert pair["key"] == "48x32x16.dgrad"
    assert {row["kernel"] for row in pair["kernels"]} == {
        BF16,
        "torch.rowwise",
        "torch.rowwise.tensorwise_weight",
    }


@pytest.mark.parametrize(
    ("arguments", "said", "hinted"),
    [
        (("--passes", "fwd,bwd"), "unknown pass `bwd`", "fwd"),
        (("--passes", ","), "at least one shape and one pass", "loka bench --help"),
        (("--kernels", "cutlass.*"), "`cutlass.*` matches no kernel", "known: "),
        (("--preset", "small"), "--preset and --batch-size are about a model", "--model"),
        (("--batch-size", "64"), "--preset and --batch-size are about a model", "--model"),
        (("--resume",), "--resume and --overwrite are about a record", "--out"),
        (("--shapes", "a.csv", "--model", "dlrm"), "exclude each other", "one of them"),
        (("--shapes", "nowhere.csv"), "cannot read the shapes in `nowhere.csv`", "CSV"),
        (("--model", "dlmr"), "unknown model `dlmr`", "dlrm"),
        (("--model", "dlrm", "--preset", "huge"), "unknown preset `huge`", "tiny"),
        (("--model", "dlrm", "--batch-size", "0"), "0", ""),
        (("--rounds", "2"), "2 rounds are too few", "at least 8"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_a_hint(
    arguments: tuple[str, ...], said: str, hinted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert lines[-1].startswith("hint: ")
    assert hinted in lines[-1]


def test_the_shapes_of_a_model_are_those_of_its_layers() -> None:
    found = model_shapes("dlrm", preset="tiny", batch_size=40, device="cpu")
    network = build_model("dlrm", open_source("synthetic?rows=160").schema, device="meta")
    layers = {(m.out_features, m.in_features) for m in network.modules() if isinstance(m, torch.nn.Linear)}
    assert {(shape.n, shape.k) for shape in found} == layers
    assert len(found) == len(layers)
    assert {(shape.m, shape.bias, shape.models) for shape in found} == {(40, True, ("dlrm",))}


def test_a_model_is_benched(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--model", "dlrm", "--batch-size", "32", "--passes", "fwd", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["metrics"]["pairs"] == len(model_shapes("dlrm", preset="tiny", batch_size=32, device="cpu"))


def result() -> GemmResult:
    """Three pairs: one in FP8, one where every FP8 kernel was dropped, one where bf16 failed."""
    bf16 = KernelRow(
        kernel=BF16, quantized=False, exact=True, vetted=True, rounds=16, p50_us=100.0, speedup=1.0
    )
    quick = KernelRow(
        kernel="torch.rowwise",
        quantized=True,
        exact=True,
        vetted=True,
        rounds=16,
        p50_us=80.0,
        product_us=50.0,
        cast_us=25.0,
        speedup=1.25,
        speedup_low=1.2,
        speedup_high=1.3,
        product_speedup=1.9,
        roofline=0.625,
    )
    late = KernelRow(
        kernel="torch.tensorwise",
        quantized=True,
        exact=True,
        vetted=True,
        rounds=3,
        p50_us=400.0,
        reason="dropped",
    )
    wrong = KernelRow(
        kernel="mslk.rowwise", quantized=True, exact=True, vetted=False, reason="worst row 3 is off by 0.5"
    )
    common = {"flops": 1000, "fastest": BF16, "pick_exact": BF16}
    pairs = (
        PairResult(
            **common,
            key="64x32x16.fwd",
            pick="torch.rowwise",
            best_fp8="torch.rowwise",
            kernels=(bf16, quick),
        ),
        PairResult(**common, key="64x32x16.dgrad", pick=BF16, kernels=(bf16, late, wrong)),
        PairResult(**common, key="64x32x16.wgrad", pick=BF16, kernels=(bf16, wrong)),
        PairResult(key="8x8x8.fwd", flops=5, failed="out of [memory]"),
    )
    return GemmResult(pairs=pairs, metrics=metrics_of(pairs), details={})


def test_the_table_tells_each_case() -> None:
    cells = [list(column.cells) for column in gemm_table(result()).columns]
    rows = [list(row) for row in zip(*cells, strict=True)]
    assert rows[0] == [
        "64x32x16",
        "fwd",
        "100.0",
        "torch.rowwise",
        "80.0",
        "1.25x",
        "1.20 .. 1.30",
        "1.90x",
        "62.5 %",
        "torch.rowwise",
    ]
    assert rows[1][2:7] == ["100.0", "torch.tensorwise", "400.0", "-", "-"]
    assert rows[1][-1] == "bf16"
    assert rows[2][3] == "none (mslk.rowwise: worst row 3 is off by 0.5)"
    assert rows[3][2:4] == ["-", "out of \\[memory]"]


def test_the_summary_is_of_the_metrics() -> None:
    assert summary_lines(result()) == [
        "FP8 is picked at 1 of 3 pairs, 33.3 % of the FLOPs",
        "there it is 1.250x as fast as bf16, casts included",
        "casts take 33.3 % of its time",
        "0.0 % of the picks turned out slower than bf16",
        "fastest, bf16 included: high_precision 3, mslk 0, torch 0",
        "failed their vetting somewhere, and are not timed there: mslk.rowwise",
        "1 pair could not be timed in bf16",
    ]
    failed = tuple(pair for pair in result().pairs if pair.failed)
    assert summary_lines(GemmResult(pairs=failed, metrics=metrics_of(failed), details={})) == [
        "no pair could be timed"
    ]


def test_progress_draws_a_bar_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    with PairProgress(bar=True) as progress:
        progress.update(1, 3, None)
        progress.update(2, 3, PairResult(key="8x8x8.fwd", flops=1, pick=BF16))
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/3" in err
