"""`loka bench gemm` from shapes to record, on the kernels that a CPU really has; no time is asserted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from loka.artifacts import read_benchmark, read_envelope, write_benchmark
from loka.artifacts.records import BENCHMARK
from loka.bench import GemmBench, PairResult, Shape, bench_gemm, default_shapes, partial_path, read_shapes
from loka.bench.accounting import Pair
from loka.bench.journal import held_journal
from loka.bench.time_pair import PairTimer
from loka.errors import ArtifactError, DataError, LokaError, UnknownNameError, UsageError
from loka.kernels import kernel
from loka.kernels.base import BaseKernel
from loka.kernels.operands import linear_operands
from loka.numerics import Quantized
from loka.timing import DeviceLostError
from loka.vocab import Device, GemmProblem, Granularity, OperandSpec, Pass, Support

CPU = torch.device("cpu")
BF16 = "high_precision.bf16"
SMALL = GemmBench(shapes=(Shape(48, 32, 16), Shape(17, 16, 24)), rounds=8, kernels=("torch.tensorwise",))


def test_the_list_that_comes_with_loka() -> None:
    shapes = default_shapes()
    assert len(shapes) == len({s.key for s in shapes}) == 66
    assert {"2048x768x256", "2048x1024x123200"} <= {s.key for s in shapes}
    listed = {model for s in shapes for model in s.models} - {"end_point"}
    assert len(listed) == 25
    for family in ("dlrm_mlperf", "dlrm_dcnv2", "dcnv2_bars", "wukong", "hstu", "interformer", "lrm_sweep"):
        assert any(model.startswith(family) for model in listed)
    unaligned = [s for s in shapes if s.n % 16 or s.k % 16]
    skinny = [s for s in shapes if s.m >= 100_000 and max(s.n, s.k) <= 400]
    assert len(unaligned) >= 8
    assert len(skinny) >= 10


def test_a_file_of_shapes(tmp_path: Path) -> None:
    file = tmp_path / "shapes.csv"
    file.write_text("# mine\nm,n,k,models\n64, 32,16,dlrm wukong\n\n# more\n8,8,8\n64,32,16,again\n")
    assert read_shapes(file) == (Shape(64, 32, 16, models=("dlrm", "wukong")), Shape(8, 8, 8))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("rows,n,k\n1,2,3\n", "line 1 is `rows,n,k`"),
        ("m,n,k\n", "lists no shape"),
        ("m,n,k\n64,32,16\n64,0,16\n", "line 3, has n = `0`"),
        ("m,n,k\n64,-8,16\n", "line 2, has n = `-8`"),
        ("# c\nm,n,k\n64,32,1.5\n", "line 3, has k = `1.5`"),
        ("m,n,k\n64,32\n", "line 2, has 2 values, `64,32`"),
        ("m,n,k\n64,32,16,dlrm\n", "line 2, has 4 values"),
        ("m,n,k\n٣,32,16\n", "line 2, has m = `٣`"),
        ("m,n,k\n9999999999999,32,16\n", "line 2, has m = `9999999999999`"),
    ],
)
def test_a_bad_file_of_shapes_is_one_sentence_with_line_and_value(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "shapes.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_shapes(file)
    assert said in error.value.what
    assert str(file) in error.value.what
    assert error.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_shapes(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_shapes(tmp_path / "binary")


def test_settings_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="at least one shape and one pass"):
        GemmBench(shapes=())
    with pytest.raises(UsageError, match="4 rounds are too few"):
        GemmBench(rounds=4)
    with pytest.raises(UnknownNameError, match=r"`cutlass\.\*` matches no kernel"):
        GemmBench(kernels=("cutlass.*",))
    with pytest.raises(UsageError, match="leave no kernel whose speed"):
        GemmBench(kernels=("emulated.*",))
    with pytest.raises(UsageError, match="device `mps`"):
        GemmBench(device="mps")


def test_emulated_kernels_are_not_timed() -> None:
    names = [k.name for k in GemmBench().chosen()]
    assert BF16 in names
    assert "torch.rowwise" in names
    assert not [name for name in names if name.startswith("emulated")]


def test_every_kernel_has_a_time_or_a_reason(tmp_path: Path) -> None:
    told: list[tuple[int, int, str | None]] = []
    settings = GemmBench(shapes=(Shape(48, 32, 16),), rounds=8)
    record = tmp_path / "gemm.json"
    result = bench_gemm(
        settings, record=record, on_pair=lambda done, of, last: told.append((done, of, last and last.key))
    )
    assert told == [
        (0, 3, None),
        (1, 3, "48x32x16.fwd"),
        (2, 3, "48x32x16.dgrad"),
        (3, 3, "48x32x16.wgrad"),
    ]
    everything = {k.name for k in settings.chosen()}
    for pair in result.pairs:
        assert {r.kernel for r in pair.kernels} | set(pair.refused) == everything
        assert {r.kernel for r in pair.kernels} >= {BF16, "torch.tensorwise", "torch.rowwise"}
        assert pair.pick in everything
        assert pair.flops == 2 * 48 * 32 * 16
        for row in pair.kernels:
            assert row.reason or None not in (row.p50_us, row.product_us, row.speedup)
            assert row.reason or row.p10_us <= row.p50_us <= row.p90_us  # type: ignore[operator]
            assert row.reason or (row.cast_us is not None) == row.quantized
    body = read_benchmark(record)
    assert body.metrics == result.metrics
    assert body.metrics["pairs"] == 3
    assert {f"speedup@48x32x16.{p}" for p in Pass} <= set(body.metrics)
    assert body.metrics["clock_overhead_us"] >= 0
    assert body.details["refused"]["torch.tensorwise.fast"] == {"a CPU ignores fast accumulation": 3}
    assert len(body.details["kernels"]["key"]) == sum(len(p.kernels) for p in result.pairs)
    assert not partial_path(record).exists()


def test_the_commit_can_be_given(tmp_path: Path) -> None:
    record = tmp_path / "gemm.json"
    bench_gemm(SMALL, record=record, commit="0123abc")
    assert read_envelope(record, BENCHMARK).environment.commit == "0123abc"


def test_only_what_the_patterns_take(tmp_path: Path) -> None:
    result = bench_gemm(SMALL)
    assert {r.kernel for p in result.pairs for r in p.kernels} == {BF16, "torch.tensorwise"}


class StopTestError(Exception):
    """What a test throws into a run."""


def stopped_after(pairs: int) -> Any:
    def tell(done: int, of: int, last: PairResult | None) -> None:
        if done == pairs:
            raise StopTestError

    return tell


def test_a_stopped_run_keeps_what_it_measured_and_goes_on(tmp_path: Path) -> None:
    record = tmp_path / "gemm.json"
    with pytest.raises(StopTestError):
        bench_gemm(SMALL, record=record, on_pair=stopped_after(2))
    assert not record.exists()
    partial = partial_path(record)
    kept = [msgspec.json.decode(line)["pair"] for line in partial.read_bytes().splitlines()[1:]]
    assert [pair["key"] for pair in kept] == ["48x32x16.fwd", "48x32x16.dgrad"]
    with pytest.raises(UsageError, match="unfinished run") as error:
        bench_gemm(SMALL, record=record)
    assert "--resume" in str(error.value.hint)
    done: list[int] = []
    result = bench_gemm(SMALL, record=record, resume=True, on_pair=lambda d, of, last: done.append(d))
    assert done == [2, 3, 4, 5, 6]
    assert [pair.key for pair in result.pairs] == [pair.key for pair in SMALL.pairs]
    assert [msgspec.to_builtins(p) for p in result.pairs[:2]] == [
        msgspec.to_builtins(msgspec.convert(p, PairResult)) for p in kept
    ]
    assert record.exists()
    assert not partial.exists()


def test_a_torn_last_line_is_measured_again(tmp_path: Path) -> None:
    record = tmp_path / "gemm.json"
    with pytest.raises(StopTestError):
        bench_gemm(SMALL, record=record, on_pair=stopped_after(2))
    partial = partial_path(record)
    whole = partial.read_bytes()
    for torn in (
        whole[:-40],
        whole[:-1],
        whole + b'{"pair":{"key":"48x',
        whole + b"\x00\x00\n",
        whole[:20],
        b"",
    ):
        partial.write_bytes(torn)
        result = bench_gemm(SMALL, record=record, resume=True)
        assert [pair.key for pair in result.pairs] == [pair.key for pair in SMALL.pairs]
        record.unlink()


def test_a_bad_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "gemm.json"
    with pytest.raises(StopTestError):
        bench_gemm(SMALL, record=record, on_pair=stopped_after(2))
    partial = partial_path(record)
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(lines[0] + b"{}}\n" + lines[2])
    with pytest.raises(ArtifactError, match="line 2, is not of an unfinished run"):
        bench_gemm(SMALL, record=record, resume=True)
    partial.write_bytes(b"".join(lines[1:]))
    with pytest.raises(ArtifactError, match="does not begin with what the run is"):
        bench_gemm(SMALL, record=record, resume=True)


def test_an_unfinished_run_of_other_settings_or_machines_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "gemm.json"
    with pytest.raises(StopTestError):
        bench_gemm(SMALL, record=record, on_pair=stopped_after(1))
    other = GemmBench(shapes=SMALL.shapes, rounds=9, kernels=SMALL.kernels)
    with pytest.raises(UsageError, match="unfinished run of another kind") as error:
        bench_gemm(other, record=record, resume=True)
    assert error.value.lines == ("rounds: was 8, is 9",)
    partial = partial_path(record)
    lines = partial.read_bytes().splitlines(keepends=True)
    first = msgspec.json.decode(lines[0])
    first["identity"]["device"] = "cuda: NVIDIA H200"
    partial.write_bytes(msgspec.json.encode(first) + b"\n" + b"".join(lines[1:]))
    with pytest.raises(UsageError) as error:
        bench_gemm(SMALL, record=record, resume=True)
    assert error.value.lines == ("device: was cuda: NVIDIA H200, is cpu: CPU",)
    assert "--overwrite" in str(error.value.hint)
    assert bench_gemm(SMALL, record=record, overwrite=True).metrics["pairs"] == 6


def test_a_finished_record_is_neither_measured_again_nor_lost(tmp_path: Path) -> None:
    record = tmp_path / "gemm.json"
    first = bench_gemm(SMALL, record=record)
    before = record.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        bench_gemm(SMALL, record=record)
    again = bench_gemm(SMALL, record=record, resume=True)
    assert record.read_bytes() == before
    assert again.metrics == first.metrics
    assert [p.kernels for p in again.pairs] == [p.kernels for p in first.pairs]
    assert [p.pick for p in again.pairs] == [p.pick for p in first.pairs]
    other = GemmBench(shapes=SMALL.shapes, rounds=9, kernels=SMALL.kernels)
    with pytest.raises(UsageError, match="of another run"):
        bench_gemm(other, record=record, resume=True)


def test_what_is_no_record_of_ours_is_not_overwritten(tmp_path: Path) -> None:
    record = tmp_path / "metrics.json"
    write_benchmark(record, {"ne": 0.5})
    before = record.read_bytes()
    for flags in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match="no record of `loka bench gemm`"):
            bench_gemm(SMALL, record=record, **flags)
    assert record.read_bytes() == before
    with pytest.raises(UsageError, match="exclude each other"):
        bench_gemm(SMALL, record=tmp_path / "a.json", resume=True, overwrite=True)
    with pytest.raises(ArtifactError, match="it is a directory"):
        bench_gemm(SMALL, record=tmp_path)
    with pytest.raises(ArtifactError, match="does not exist"):
        bench_gemm(SMALL, record=tmp_path / "no" / "a.json")


def test_two_processes_do_not_measure_into_one_file(tmp_path: Path) -> None:
    record = tmp_path / "gemm.json"
    with (
        held_journal(partial_path(record), {"a": 1}),
        pytest.raises(UsageError, match="another process"),
        held_journal(partial_path(record), {"a": 1}),
    ):
        pass


def test_a_kernel_that_takes_the_device_down_is_left_out_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PairTimer.run

    def deadly(self: PairTimer, pair: Pair, *, left_out: dict[str, str]) -> PairResult:
        if pair.key == "48x32x16.dgrad" and "torch.tensorwise" not in left_out:
            raise DeviceLostError("product torch.tensorwise", "an illegal memory access")
        return run(self, pair, left_out=left_out)

    monkeypatch.setattr(PairTimer, "run", deadly)
    record = tmp_path / "gemm.json"
    with pytest.raises(LokaError, match=r"48x32x16.dgrad: an illegal memory access") as error:
        bench_gemm(SMALL, record=record)
    assert "--resume" in str(error.value.hint)
    result = bench_gemm(SMALL, record=record, resume=True)
    row = result.pairs[1].row("torch.tensorwise")
    assert row is not None
    assert (row.p50_us, row.vetted) == (None, False)
    assert row.reason == "took the device down: an illegal memory access"
    assert result.pairs[2].row("torch.tensorwise").vetted  # type: ignore[union-attr]


class _Odd(BaseKernel):
    """Kernels that a library could have: one raises, one is wrong."""

    def supports(self, problem: GemmProblem, device: Device) -> Support:
        return Support.yes()

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        return linear_operands(problem, Granularity.TENSORWISE, Granularity.TENSORWISE)

    def matmul(
        self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        if self.name == "odd.raises":
            raise RuntimeError("no tile for this shape")
        return torch.zeros(a.values.shape[0], b.values.shape[0], dtype=out_dtype)


def test_what_fails_its_vetting_is_recorded_and_never_picked() -> None:
    kernels = [kernel(BF16), _Odd("odd.raises"), _Odd("odd.wrong"), kernel("torch.tensorwise")]
    timer = PairTimer(CPU, kernels, 8)
    result = timer.run(Pair(Shape(48, 32, 16), Pass.FWD), left_out={})
    for name, said in {"odd.raises": "no tile for this shape", "odd.wrong": "off by"}.items():
        row = result.row(name)
        assert row is not None
        assert (row.vetted, row.p50_us) == (False, None)
        assert said in row.reason
    assert result.pick in (BF16, "torch.tensorwise")
    good = result.row("torch.tensorwise")
    assert good is not None
    assert good.vetted


def test_a_kernel_is_vetted_once_a_shape_class() -> None:
    timer = PairTimer(CPU, [kernel(BF16), kernel("torch.tensorwise")], 8)
    timer.run(Pair(Shape(48, 32, 16), Pass.FWD), left_out={})
    assert len(timer.vetting) == 1
    timer.run(Pair(Shape(48, 32, 16), Pass.FWD), left_out={})
    assert len(timer.vetting) == 1
    timer.run(Pair(Shape(48, 32, 24), Pass.FWD), left_out={})
    assert len(timer.vetting) == 2


def test_a_killed_process_leaves_what_it_measured(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("m,n,k\n" + "".join(f"{16 * i},32,16\n" for i in range(1, 101)))
    record = tmp_path / "gemm.json"
    command = [sys.executable, "-m", "loka", "bench", "gemm", "--shapes", str(shapes), "-o", str(record)]
    command += ["--rounds", "8", "--kernels", "torch.tensorwise", "--device", "cpu"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        partial = partial_path(record)
        end = time.monotonic() + 60
        while (not partial.exists() or partial.read_bytes().count(b"\n") < 4) and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = partial.read_bytes().count(b"\n") - 1
    assert 3 <= kept < 300
    settings = GemmBench(shapes=read_shapes(shapes), rounds=8, kernels=("torch.tensorwise",))
    begun: list[int] = []

    def once(done: int, of: int, last: PairResult | None) -> None:
        begun.append(done)
        raise StopTestError

    with pytest.raises(StopTestError):
        bench_gemm(settings, record=record, resume=True, on_pair=once)
    assert begun == [kept]
