"""A run's folder: never somebody else's, never half of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka.artifacts import read_record
from loka.errors import ArtifactError, UsageError
from loka.recsys.job.folder import held_folder, take_folder

IDENTITY = {"model": "dlrm", "overrides": {"top": (64, 32)}}


def _run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    take_folder(folder, IDENTITY)
    arm = folder / "seed-0" / "bf16"
    arm.mkdir(parents=True)
    (arm / "checkpoint.safetensors").write_bytes(b"x")
    staging = arm / "checkpoint.safetensors.writing"
    staging.mkdir()
    (staging / "checkpoint.safetensors").write_bytes(b"half")
    for name in ("plan.json", "predictions-test-seed-0.parquet", "predictions-valid.parquet.part"):
        (folder / name).write_bytes(b"x")
    (folder / f".plan.json.{'0a' * 16}.tmp").write_bytes(b"x")
    return folder


def _names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_new_folder_gets_its_record(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    take_folder(folder, IDENTITY)
    assert read_record(folder / "run.json", "loka.run").body == {
        "model": "dlrm",
        "overrides": {"top": [64, 32]},
    }


def test_an_earlier_run_is_kept_unless_told(tmp_path: Path) -> None:
    folder = _run_folder(tmp_path)
    before = _names(folder)
    with pytest.raises(UsageError, match="not empty") as caught:
        take_folder(folder, IDENTITY)
    assert "--resume" in str(caught.value.hint)
    assert _names(folder) == before


def test_resume_takes_the_same_run_only(tmp_path: Path) -> None:
    folder = _run_folder(tmp_path)
    take_folder(folder, IDENTITY, resume=True)  # tuples in the settings are lists in the record
    with pytest.raises(UsageError, match="another run") as caught:
        take_folder(folder, {**IDENTITY, "model": "wukong"}, resume=True)
    assert caught.value.lines == ("model: was dlrm, is wukong",)
    with pytest.raises(UsageError, match="another run"):
        take_folder(folder, {"model": "dlrm"}, resume=True)


def test_overwrite_empties_a_run(tmp_path: Path) -> None:
    folder = _run_folder(tmp_path)
    take_folder(folder, {"model": "wukong"}, overwrite=True)
    assert _names(folder) == ["run.json"]
    assert read_record(folder / "run.json", "loka.run").body == {"model": "wukong"}


@pytest.mark.parametrize("name", ["notes.txt", "seed-0/bf16/mine.csv", "plan2.json", "data/log.tsv"])
def test_overwrite_deletes_nothing_where_something_else_lies(tmp_path: Path, name: str) -> None:
    folder = _run_folder(tmp_path)
    other = folder / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("mine")
    before = _names(folder)
    with pytest.raises(UsageError, match="did not write") as caught:
        take_folder(folder, IDENTITY, overwrite=True)
    assert any(line.startswith(name.split("/")[0]) for line in caught.value.lines)
    assert _names(folder) == before


def test_overwrite_follows_no_link(tmp_path: Path) -> None:
    folder = _run_folder(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "checkpoint.safetensors").write_text("mine")
    (folder / "seed-1").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="did not write"):
        take_folder(folder, IDENTITY, overwrite=True)
    assert (elsewhere / "checkpoint.safetensors").read_text() == "mine"


def test_overwrite_wants_a_run(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("mine")
    with pytest.raises(UsageError, match="no run to overwrite"):
        take_folder(tmp_path, IDENTITY, overwrite=True)
    (tmp_path / "run.json").write_text('{"name": "not of LoKA"}')
    with pytest.raises(ArtifactError):
        take_folder(tmp_path, IDENTITY, overwrite=True)
    assert _names(tmp_path) == ["plan.json", "run.json"]
    with pytest.raises(UsageError, match="exclude"):
        take_folder(tmp_path, IDENTITY, overwrite=True, resume=True)


def test_overwrite_of_nothing(tmp_path: Path) -> None:
    take_folder(tmp_path / "new", IDENTITY, overwrite=True)
    assert _names(tmp_path / "new") == ["run.json"]


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    """The lock is of the open folder, so one process can play both."""
    folder = _run_folder(tmp_path)
    before = _names(folder)
    with held_folder(folder, IDENTITY, resume=True):
        for how in ({"resume": True}, {"overwrite": True}):
            with (
                pytest.raises(UsageError, match="another process is working"),
                held_folder(folder, IDENTITY, **how),
            ):
                pass
        assert _names(folder) == before
    with held_folder(folder, IDENTITY, overwrite=True):
        assert _names(folder) == ["run.json"]
    with (
        held_folder(tmp_path / "new", IDENTITY),
        pytest.raises(UsageError),
        held_folder(tmp_path / "new", {}),
    ):
        pass
