"""Preparing in processes on one GPU: what they compile is found, and what they lose is theirs alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from losing_kernel import LOSES_AT, Losing

from loka.kernels import Kernel, device_of, kernel
from loka.kernels.preparing import Prepared, ProductTask, default_workers, kernel_type, prepare_all
from loka.probe import times
from loka.probe.live import LIVE_ROWS, Captured, live_errors, site_generator
from loka.probe.times import time_kernels
from loka.probe.trial import kernel_trials_of
from loka.vocab import GemmProblem, Pass, Site

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

WHERE = torch.device("cuda", 0)


def product(kernel_: Kernel, n: int) -> ProductTask:
    problem = GemmProblem(128, n, 256)
    return ProductTask(kernel_.name, kernel_type(kernel_), problem, vet_as=problem)


def test_a_kernel_that_loses_the_gpu_takes_only_its_process_along() -> None:
    losing = Losing("losing.tensorwise")
    fatal = product(losing, LOSES_AT)
    others = [product(losing, 512), product(kernel("torch.tensorwise"), LOSES_AT)]
    prepared = prepare_all([fatal, *others], WHERE, workers=2)
    answer = prepared.of(fatal)
    assert answer is not None
    assert answer.ended
    assert "lost the GPU" in answer.failed or "ended the process" in answer.failed
    for task in others:
        good = prepared.of(task)
        assert good is not None
        assert not good.failed
        assert not good.unfit
    assert float(torch.ones(4, device=WHERE).sum()) == 4.0


def test_what_processes_compiled_is_not_compiled_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for timing, nor for trials on drawn operands, beside what a loop's own have compiled before."""
    site = Site("s", "linear", 384, 256, True, 512)
    device = device_of(WHERE)
    generator = torch.Generator(WHERE).manual_seed(0)
    x, w, g = (
        torch.randn(*size, device=WHERE, generator=generator) for size in ((512, 256), (384, 256), (512, 384))
    )
    captured = Captured(x, w, x.abs().amax(), g, g.abs().amax())
    trials = kernel_trials_of(replace(site, rows=LIVE_ROWS), device, (Pass.FWD, Pass.DGRAD))
    trials += kernel_trials_of(site, device, (Pass.WGRAD,))
    emulated = [trial for trial in trials if trial.kernel.emulated]
    assert emulated
    live_errors(captured, emulated, site_generator(0, "s", "t"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[set[Path]] = []

    def prepared(*args: Any, **options: Any) -> Prepared:
        found = prepare_all(*args, **options)
        compiled.append(machine_code(tmp_path))
        return found

    monkeypatch.setattr(times, "prepare_all", prepared)
    found = time_kernels([site], device, WHERE, rows_of=lambda _: [512])
    assert compiled[0]
    assert what_is_new(tmp_path, compiled[0]) == []
    assert found.left_out == {}
    assert not [note for note in found.notes if " failed at " in note]
    errors = live_errors(captured, trials, site_generator(0, "s", "t"))
    assert bool(errors.isfinite().all())
    assert what_is_new(tmp_path, compiled[0]) == []


def machine_code(folder: Path) -> set[Path]:
    return set(folder.rglob("*.cubin"))


def what_is_new(folder: Path, before: set[Path]) -> list[str]:
    """Kernels compiled since, each with what tells it apart from the most alike of those before."""
    return sorted(f"{path.stem}: {unlike(path, before)}" for path in machine_code(folder) - before)


def unlike(path: Path, others: set[Path]) -> str:
    told = json.loads(path.with_suffix(".json").read_text())
    source = path.with_suffix(".ttir").read_text()
    found = []
    for other in others:
        if other.stem == path.stem:
            theirs = json.loads(other.with_suffix(".json").read_text())
            keys = sorted(
                k for k in told.keys() | theirs.keys() if told.get(k) != theirs.get(k) and k != "hash"
            )
            same = source == other.with_suffix(".ttir").read_text()
            found.append((not same, len(keys), str({k: (told.get(k), theirs.get(k)) for k in keys}), same))
    if not found:
        return "none of that name was prepared"
    _, _, differences, same = min(found)
    return f"{'the same code' if same else 'other code'}, {differences}"


def test_processes_by_default_are_no_more_than_cores() -> None:
    assert 1 <= default_workers(WHERE) <= 14
