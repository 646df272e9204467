"""Tasks in processes of their own: what they answer, and what a kernel that ends its process leaves."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import types

import msgspec
import pytest
import torch
from ending_kernel import ENDS_AT, LOSES_AT, SHORT_AT, Ending
from faulty_kernels import Double

from loka.errors import UsageError
from loka.kernels import KERNELS, Kernel, kernel
from loka.kernels.preparing import (
    Answer,
    CastTask,
    Prepared,
    Preparer,
    ProductTask,
    Task,
    default_workers,
    kernel_type,
    pool,
    prepare_all,
    process,
)
from loka.kernels.preparing.carry_out import known_kernel
from loka.kernels.preparing.pool import _grouped, _Shares
from loka.kernels.preparing.worker import Begun, Group
from loka.vocab import Format, GemmProblem, Granularity, OperandSpec, Pass

CPU = torch.device("cpu")
ENDING = Ending("ending.tensorwise")


def product(kernel_: Kernel, n: int, pass_: Pass = Pass.FWD, **options: object) -> ProductTask:
    problem = GemmProblem(64, n, 32, pass_)
    return ProductTask(kernel_.name, kernel_type(kernel_), problem, vet_as=problem, **options)  # type: ignore[arg-type]


def cast_of(granularity: Granularity, *, rows: int = 64, given_scale: bool = False) -> CastTask:
    spec = OperandSpec.of(Format.E4M3, granularity, pad=16)
    return CastTask(rows, 32, Format.FP32, (spec, spec.with_transposed(True)), given_scale)


RIGHT = [product(kernel("torch.tensorwise"), n) for n in (32, ENDS_AT)]
FATAL = {n: product(ENDING, n) for n in (32, ENDS_AT, LOSES_AT, SHORT_AT, 96)}
CASTS = [cast_of(Granularity.ROWWISE), cast_of(Granularity.TENSORWISE, given_scale=True)]
UNKNOWN = product(Double("torch.rowwise"), 32)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare_all([*RIGHT, *FATAL.values(), *CASTS, UNKNOWN, *RIGHT], CPU, workers=1)


def test_a_right_kernel_and_a_cast_have_empty_answers(prepared: Prepared) -> None:
    for task in (*RIGHT, *CASTS, FATAL[32], FATAL[96]):
        answer = prepared.of(task)
        assert answer is not None
        assert msgspec.structs.replace(answer, task=0, seconds=0.0) == Answer()


def test_what_a_kernel_ends_goes_on_behind_it(prepared: Prepared) -> None:
    ended, lost = prepared.of(FATAL[ENDS_AT]), prepared.of(FATAL[LOSES_AT])
    assert ended is not None
    assert lost is not None
    assert ended.ended
    assert lost.ended
    assert ended.failed == "ended the process that tried it (exit code 7)"
    assert lost.failed == "lost the GPU: an illegal instruction was encountered"


def test_what_only_the_caller_can_do_is_left_to_it(prepared: Prepared) -> None:
    assert prepared.of(UNKNOWN) is None  # another class has this name there
    assert prepared.of(FATAL[SHORT_AT]) is None  # memory may have been short because of the others
    assert prepared.of(product(kernel("torch.tensorwise"), 999)) is None  # never asked
    assert prepared.workers == 1


def test_no_processes_prepare_nothing() -> None:
    assert prepare_all(RIGHT, CPU, workers=0) == Prepared()
    assert prepare_all([], CPU, workers=4) == Prepared()
    assert default_workers(CPU) == 0
    with pytest.raises(UsageError, match="workers=-1"):
        prepare_all(RIGHT, CPU, workers=-1)


@pytest.mark.parametrize("executable", [None, "no such program"])
def test_a_process_that_cannot_start_leaves_everything(
    executable: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_BOOT", "raise SystemExit('no torch here')")
    monkeypatch.setattr(process.sys, "executable", executable or sys.executable)
    assert prepare_all(RIGHT, CPU, workers=2).answers == {}
    assert f"ended with code {None if executable else 1} before it tried anything" in caplog.text


def test_a_stalled_process_is_ended_and_nothing_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_BOOT", "import time; time.sleep(600)")
    monkeypatch.setitem(pool._STALLED_S, "cpu", 0.5)
    assert prepare_all(RIGHT, CPU, workers=1).answers == {}
    monkeypatch.setitem(pool._STALLED_S, "cpu", 600.0)
    # Only the name in `pool`: another thread that waits for its process sleeps by the module itself.
    monkeypatch.setattr(pool, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=_interrupted))
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        prepare_all(RIGHT, CPU, workers=1)
    assert threading.active_count() == before


def _interrupted(seconds: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("task", [*RIGHT, *CASTS, UNKNOWN])
def test_a_task_and_its_answer_are_lines_of_json(task: Task) -> None:
    line = msgspec.json.encode(Group([(3, task)]))
    assert b"\n" not in line
    ((number, again),) = msgspec.json.decode(line, type=Group).tasks
    assert (number, again, hash(again)) == (3, task, hash(task))
    for said in (Begun(3), Answer(3, failed="two\nlines", ended=True)):
        assert msgspec.json.decode(msgspec.json.encode(said), type=Answer | Begun) == said


def test_a_kernel_is_found_by_name_and_class() -> None:
    for name, known in KERNELS.items():
        assert known_kernel(ProductTask(name, kernel_type(known), GemmProblem(1, 1, 1))) is known
    assert known_kernel(FATAL[32]) == ENDING
    assert known_kernel(UNKNOWN) is None
    for type_ in ("__main__:Mine", "no.such.module:Mine", "loka.kernels.backends.mslk:Mine"):
        assert known_kernel(ProductTask("mine", type_, GemmProblem(1, 1, 1))) is None


def test_an_unfit_kernel_is_run_only_where_that_is_wanted() -> None:
    zeros = Double("mine.rowwise", product=lambda a, b: torch.zeros(a.values.shape[0], b.values.shape[0]))
    fails = Double("mine.rowwise", product=_raises)
    for broken, wanted in ((zeros, ""), (fails, "no image for this device")):
        asked = product(broken, 32)
        unfit = Preparer(CPU).carry_out(asked, broken)
        assert unfit.unfit
        assert not unfit.failed
        run = Preparer(CPU).carry_out(msgspec.structs.replace(asked, run_unfit=True), broken)
        assert (run.unfit, run.failed) == (unfit.unfit, wanted)


def _raises(a: object, b: object) -> torch.Tensor:
    raise RuntimeError("no image for this device")


def test_operands_arrive_as_autograd_holds_them() -> None:
    seen: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]] = []

    @dataclasses.dataclass(frozen=True, slots=True)
    class Seen(Double):
        def matmul(self, a, b, *, out_dtype, bias=None):  # type: ignore[no-untyped-def]
            seen.append((tuple(a.values.shape), tuple(b.values.shape), out_dtype, bias is not None))
            return Double.matmul(self, a, b, out_dtype=out_dtype, bias=bias)

    watching = Seen("mine.rowwise")
    for pass_ in Pass:
        problem = GemmProblem(24, 40, 18, pass_, out_dtype=Format.FP32)
        task = ProductTask("mine.rowwise", kernel_type(watching), problem, biased=pass_ is Pass.FWD)
        assert not Preparer(CPU).carry_out(task, watching).failed
    padded = [((24, 32), (40, 32), torch.float32, pass_ is Pass.FWD) for pass_ in Pass]
    assert seen == padded


def test_casts_come_first_and_kernels_take_turns() -> None:
    names = ("torch.tensorwise", "triton.rowwise", "deep_gemm.blockwise_1x128")
    tasks: list[Task] = [product(kernel(name), n) for name in names for n in (32, 64, 128)]
    groups = _grouped([*tasks, *CASTS])
    assert len(groups) == 9 + 2
    firsts = [group.tasks[0][1] for group in groups]
    assert all(isinstance(task, CastTask) for task in firsts[:2])
    order = [task.kernel for task in firsts[2:] if isinstance(task, ProductTask)]
    assert order == list(reversed(names)) * 3  # what compiles longest before the others, in each turn
    same_class = _grouped([product(kernel("torch.rowwise"), n) for n in (33, 35)])
    assert [len(group.tasks) for group in same_class] == [2]


def test_no_more_is_handed_out_than_the_memory_holds() -> None:
    small, large, endless = (cast_of(Granularity.ROWWISE, rows=rows) for rows in (64, 2**24, 2**32))
    spread = [msgspec.structs.replace(task, columns=32 + i) for i, task in enumerate((large, small, endless))]
    groups = [_grouped([task])[0] for task in spread]
    shares = _Shares(groups, budget=1.1 * large.nbytes)
    first = shares.take()
    assert first is groups[0]
    shares.done(first)
    shares = _Shares(groups, budget=1.5 * small.nbytes)
    assert shares.take() is groups[1]
    shares.done(groups[1])
    assert shares.take() is None  # the others would never fit
