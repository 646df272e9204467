from __future__ import annotations

import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_recsys import TinyModel, TinySource, one_thread  # noqa: F401 (an autouse fixture)
from torch import Tensor

from loka.errors import ArtifactError, UsageError
from loka.recsys.training import tensor_file
from loka.recsys.training.checkpoint import CHECKPOINT_NAME, load_model_state
from loka.recsys.training.config import ComputeDtype, DenseOptimizer, SparseOptimizer, TrainConfig
from loka.recsys.training.interrupt import InterruptedRunError
from loka.recsys.training.step import DivergedError, StepInfo
from loka.recsys.training.tensor_file import read_tensor_file, write_tensor_file
from loka.recsys.training.trainer import Trainer

CONFIG = TrainConfig(batch_size=32, epochs=2, dtype=ComputeDtype.FP32, checkpoint_every_steps=3)


class CrashError(Exception):
    """Stands for a crash in the middle of a run."""


def stop_at(step: int) -> object:
    def after_step(info: StepInfo) -> None:
        if info.step == step:
            raise CrashError

    return after_step


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    parts = trainer._parts
    return {
        **{f"model/{k}": v for k, v in parts.model.state_dict().items()},
        **{f"optimizer/{k}": v for k, v in parts.optimizers.state_dict().items()},
        **{f"metrics/{k}": v for k, v in parts.metrics.state_dict().items()},
    }


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [k for k in a if not torch.equal(a[k], b[k])] == []


@pytest.mark.parametrize("dtype", list(ComputeDtype))
@pytest.mark.parametrize("crash", [1, 7, 11, 13])
def test_resume_is_bitwise(tmp_path: Path, dtype: ComputeDtype, crash: int) -> None:
    config = dataclasses.replace(CONFIG, dtype=dtype)
    through = Trainer(TinyModel(), TinySource(), config)
    through.train()
    with pytest.raises(CrashError):
        Trainer(TinyModel(), TinySource(), config, directory=tmp_path, after_step=stop_at(crash)).train()
    resumed = Trainer(TinyModel(seed=99), TinySource(), config, directory=tmp_path)
    assert resumed.resume()
    assert resumed.state.step == crash - crash % 3
    result = resumed.train()
    assert (result.steps, result.rows) == (22, 660)
    assert_same(whole_state(resumed), whole_state(through))


@pytest.mark.parametrize("dense", list(DenseOptimizer))
@pytest.mark.parametrize("sparse", list(SparseOptimizer))
def test_resume_is_bitwise_with_every_optimizer(
    tmp_path: Path, dense: DenseOptimizer, sparse: SparseOptimizer
) -> None:
    config = dataclasses.replace(CONFIG, dense_optimizer=dense, sparse_optimizer=sparse, epochs=1)
    through = Trainer(TinyModel(), TinySource(weighted=True), config)
    through.train()
    with pytest.raises(CrashError):
        Trainer(
            TinyModel(), TinySource(weighted=True), config, directory=tmp_path, after_step=stop_at(5)
        ).train()
    resumed = Trainer(TinyModel(), TinySource(weighted=True), config, directory=tmp_path)
    resumed.resume()
    resumed.train()
    assert_same(whole_state(resumed), whole_state(through))


def test_a_finished_run_resumes_to_its_end(tmp_path: Path) -> None:
    first = Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path)
    first.train()
    again = Trainer(TinyModel(seed=5), TinySource(), CONFIG, directory=tmp_path)
    assert again.resume()
    assert again.state.finished
    result = again.train()
    assert (result.steps, result.speed) == (22, None)
    assert_same(whole_state(again), whole_state(first))
    assert torch.equal(result.progressive.sums, first.metrics.total.sums)


def test_a_folder_with_a_run_is_not_overwritten_silently(tmp_path: Path) -> None:
    Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path).train()
    with pytest.raises(UsageError, match="already holds a run"):
        Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path).train()
    assert not Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path / "new").resume()


def test_the_file_holds_plain_tensors_and_json(tmp_path: Path) -> None:
    Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path).train()
    assert os.listdir(tmp_path) == [CHECKPOINT_NAME]
    with safe_open(tmp_path / CHECKPOINT_NAME, framework="pt") as file:
        names = set(file.keys())
    assert {
        "model/tower.0.weight",
        "optimizer/dense/tower.0.weight/exp_avg",
        "optimizer/sparse/embeddings.1.weight/sum",
        "metrics/total",
    } <= names
    assert (tmp_path / CHECKPOINT_NAME).stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))


def checkpointed(tmp_path: Path) -> None:
    Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path, identity={"plan": "none"}).train()


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (lambda: (TinyModel(), TinySource(), dataclasses.replace(CONFIG, lr_dense=0.5)), "config.lr_dense"),
        (lambda: (TinyModel(), TinySource(seed=8), CONFIG), "source.seed: 7 in the checkpoint, 8 now"),
        (lambda: (TinyModel(tasks=2), TinySource(), CONFIG), r"tower.3.weight: \(1, 16\) float32 in the"),
        (lambda: (TinyModel().double(), TinySource(), CONFIG), "float64 now"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, trainer: object, message: str) -> None:
    checkpointed(tmp_path)
    model, source, config = trainer()  # type: ignore[operator]
    other = Trainer(model, source, config, directory=tmp_path, identity={"plan": "none"})
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ArtifactError, match=message):
        other.resume()
    assert_same(model.state_dict(), before)


def test_a_checkpoint_with_another_plan_or_extras_is_refused(tmp_path: Path) -> None:
    checkpointed(tmp_path)
    with pytest.raises(ArtifactError, match=r"run\.plan: none in the checkpoint, a1b2 now"):
        Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path, identity={"plan": "a1b2"}).resume()
    counter = Counter()
    with pytest.raises(ArtifactError, match="kept beside"):
        Trainer(
            TinyModel(),
            TinySource(),
            CONFIG,
            directory=tmp_path,
            identity={"plan": "none"},
            extras={"c": counter},
        ).resume()


class Counter:
    """Something that watches a run and must survive with it."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def __call__(self, info: StepInfo) -> None:
        self.total += info.loss

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.total = state["total"].clone()


def test_extras_are_kept(tmp_path: Path) -> None:
    through, first, second = Counter(), Counter(), Counter()
    Trainer(TinyModel(), TinySource(), CONFIG, after_step=through).train()

    def crash(info: StepInfo) -> None:
        first(info)
        stop_at(8)(info)  # type: ignore[operator]

    with pytest.raises(CrashError):
        Trainer(
            TinyModel(), TinySource(), CONFIG, directory=tmp_path, after_step=crash, extras={"c": first}
        ).train()
    resumed = Trainer(
        TinyModel(), TinySource(), CONFIG, directory=tmp_path, after_step=second, extras={"c": second}
    )
    resumed.resume()
    resumed.train()
    assert torch.equal(second.total, through.total)


def test_ctrl_c_finishes_the_step_and_saves(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, checkpoint_every_steps=None)

    def press(info: StepInfo) -> None:
        if info.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(InterruptedRunError, match="stopped after step 5; the checkpoint is") as caught:
        Trainer(TinyModel(), TinySource(), config, directory=tmp_path, after_step=press).train()
    assert caught.value.exit_code == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    through = Trainer(TinyModel(), TinySource(), config)
    through.train()
    resumed = Trainer(TinyModel(), TinySource(), config, directory=tmp_path)
    resumed.resume()
    assert resumed.state.step == 5
    resumed.train()
    assert_same(whole_state(resumed), whole_state(through))


def test_a_second_ctrl_c_acts_at_once(tmp_path: Path) -> None:
    def press(info: StepInfo) -> None:
        # In this thread and at once: two signals to the process may be taken for one.
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path, after_step=press).train()


def test_training_works_outside_the_main_thread() -> None:
    results = []
    thread = threading.Thread(
        target=lambda: results.append(Trainer(TinyModel(), TinySource(), CONFIG).train())
    )
    thread.start()
    thread.join()
    assert results[0].steps == 22


CHILD = """
import os, signal, sys
import torch
from pathlib import Path
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from tiny_recsys import TinyModel, TinySource
from test_trainer_resume import CONFIG
from loka.recsys.training import tensor_file
from loka.recsys.training.trainer import Trainer

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def die_half_way(tensors, path, metadata):
    Path(path).write_bytes(b"half a file")
    die()

def after_step(info):
    if info.step == 8:
        match sys.argv[3]:
            case "step": die()
            case "write": tensor_file.save_file = die_half_way
            case "replace": os.replace = die

Trainer(TinyModel(), TinySource(), CONFIG, directory=Path(sys.argv[2]), after_step=after_step).train()
"""


@pytest.mark.parametrize("moment", ["step", "write", "replace"])
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, moment: str) -> None:
    child = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tmp_path), moment]
    done = subprocess.run(child, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumed = Trainer(TinyModel(seed=1), TinySource(), CONFIG, directory=tmp_path)
    assert resumed.resume()
    assert resumed.state.step == 6
    resumed.train()
    through = Trainer(TinyModel(), TinySource(), CONFIG)
    through.train()
    assert_same(whole_state(resumed), whole_state(through))
    assert os.listdir(tmp_path) == [CHECKPOINT_NAME]


def test_a_diverged_run_keeps_the_checkpoint_from_before(tmp_path: Path) -> None:
    model = TinyModel()

    def poison(info: StepInfo) -> None:
        if info.step == 7:
            model.tower[3].bias.data.fill_(float("inf"))

    with pytest.raises(DivergedError):
        Trainer(model, TinySource(), CONFIG, directory=tmp_path, after_step=poison).train()
    tensors, document = read_tensor_file(tmp_path / CHECKPOINT_NAME)
    assert document["state"]["step"] == 6
    assert all(bool(t.isfinite().all()) for t in tensors.values())


def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.safetensors"
    write_tensor_file(path, {"a": torch.ones(3)}, document={"n": 1})

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensor_file, "save_file", full)
    with pytest.raises(ArtifactError, match=r"(?s)cannot write .*No space left.*hint: .*has room"):
        write_tensor_file(path, {"a": torch.zeros(3)}, document={"n": 2})
    assert os.listdir(tmp_path) == ["file.safetensors"]
    tensors, document = read_tensor_file(path)
    assert document == {"n": 1}
    assert torch.equal(tensors["a"], torch.ones(3))


def test_a_write_that_the_system_refuses_half_way(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_tensor_file(path, {"a": torch.ones(3)}, document={"n": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ArtifactError, match=r"(?s)cannot write .*hint: .*has room"):
            write_tensor_file(path, {"a": torch.zeros(1_000_000)}, document={"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["file.safetensors"]
    assert read_tensor_file(path)[1] == {"n": 1}


def test_weights_of_a_checkpoint_for_another_run(tmp_path: Path) -> None:
    checkpointed(tmp_path)
    trained = Trainer(TinyModel(), TinySource(), CONFIG)
    trained.train()
    model = TinyModel(seed=44)
    load_model_state(tmp_path / CHECKPOINT_NAME, model)
    assert_same(model.state_dict(), trained.model.state_dict())
    with pytest.raises(ArtifactError, match=r"(?s)another model.*tower\.3\.weight"):
        load_model_state(tmp_path / CHECKPOINT_NAME, TinyModel(tasks=2))


def test_a_folder_that_cannot_be_made_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    steps: list[StepInfo] = []
    with pytest.raises(ArtifactError, match="cannot write"):
        Trainer(
            TinyModel(), TinySource(), CONFIG, directory=tmp_path / "file" / "run", after_step=steps.append
        ).train()
    assert steps == []


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpointed(tmp_path)
    path = tmp_path / CHECKPOINT_NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="not a whole safetensors file"):
        Trainer(TinyModel(), TinySource(), CONFIG, directory=tmp_path).resume()
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ArtifactError, match="was not written by LoKA"):
        read_tensor_file(path)
    with pytest.raises(ArtifactError, match="there is no file"):
        read_tensor_file(tmp_path / "none")


def test_tensors_that_share_memory_or_are_strided_are_written(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": base, "b": base, "t": base.T, "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    write_tensor_file(tmp_path / "f", tensors, document={})
    assert_same(read_tensor_file(tmp_path / "f")[0], tensors)
